"""Gradients averaged over all ranks: `synchronize()`, and the groups it goes over.

From the top: `synchronizer` (one call), `plan` (a set of parameters from call to call), `buckets`,
`header` (what ranks agree on), `parameters` and `optimizers` (which ones), `guard` (steps),
`groups` (what it is sent over), and `shm`, a backend of our own.
"""

"""Gradients averaged over all ranks: `synchronize()`, and the groups it goes over."""

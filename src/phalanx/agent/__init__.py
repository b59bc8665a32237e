"""The agent: one process per node that makes workers, watches them and carries their output.

One thread, one event loop, no torch. It outlives neither the launcher nor its own workers'
need of it: when the launcher is gone, so is everything that the agent started.
"""

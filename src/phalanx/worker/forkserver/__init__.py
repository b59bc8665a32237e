"""The process that makes workers: it imports torch once, then forks.

One thread, no CUDA context, no work of its own. It forks, watches its children, reports how
they ended, kills what they left behind, and goes when the agent goes.
"""

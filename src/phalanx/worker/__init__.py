"""What runs inside a worker: from the fork or exec to the user's function and its end.

This room (with what it imports on first use) is the only one that imports torch.
"""

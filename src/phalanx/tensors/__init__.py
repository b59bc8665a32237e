"""Tensors that ranks share: the store, gradient synchronisation, the shm process group."""

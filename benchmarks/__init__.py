"""Measurements, with the peers beside them in the same run: ``python -m benchmarks``."""

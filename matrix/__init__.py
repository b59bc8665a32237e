"""Proves the versions that the metadata promises: ``python -m matrix`` writes docs/support.md."""

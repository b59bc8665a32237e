"""The tensor store: values shared by all ranks, alive as long as the run.

The agent has the memory and the table (`server`, `segments`, `versions`: no torch there);
workers and launcher are clients (`client`, with `layout` and `memory`, which import torch).
A value is what one put brought: the bytes of its tensors in one piece, and a description
that only clients understand. Large values are copied by the writer into a shared-memory
segment, and mapped by readers; small ones travel in the messages.
"""

"""What all collectives are made of: rounds of publishing and reading, and copies.

See `Exchange` for why rounds are safe. Tensors are dense, on the CPU, of any strides; what is
not contiguous is copied before and after.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from phalanx.tensors.sync.shm.exchange import DTYPES, Call

if TYPE_CHECKING:
    from phalanx.tensors.sync.shm.exchange import Exchange

Write = Callable[[int, int], None]
"""(round, address of this rank's slot) -> None."""
Read = Callable[[int, int], None]
"""(round, number of the inputs) -> None."""

copy = ctypes.memmove
"""(destination, source, bytes). Keeps the interpreter lock, for some 10 µs a piece."""


class Rounds:
    """Runs the rounds of one group's collectives; for one thread at a time."""

    def __init__(self, exchange: Exchange) -> None:
        """Keep the exchange that all go through."""
        self._exchange = exchange
        self._rank = exchange.rank
        self._size = exchange.size
        self._layout = exchange.segment.layout
        self._address = exchange.segment.address

    def _run(
        self, call: tuple[int, int], num_rounds: int, write: Write, read: Read, timeout_s: float
    ) -> None:
        """Run rounds of inputs, of which a rank publishes one before it reads the last."""
        exchange = self._exchange
        count = max(1, num_rounds)
        first = exchange.num_inputs
        exchange.begin(call, count, 0, timeout_s)
        for k in range(count + 1):
            if k < count:
                if num_rounds:
                    write(k, self._address + exchange.input_offset(self._rank, first + k))
                exchange.publish_input()
            if k >= 1:
                exchange.await_inputs(first + k - 1)
                if k == 1:
                    exchange.compare_calls()
                if num_rounds:
                    read(k - 1, first + k - 1)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy with its values as plain bytes."""
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if bytes can be put into it, or something contiguous."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


@torch.no_grad()  # type: ignore[untyped-decorator]
def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor of any strides, beside autograd."""
    if tensor.is_inference():
        with torch.inference_mode():
            tensor.copy_(values)
    else:
        tensor.detach().copy_(values)


@functools.lru_cache(maxsize=4096)
def describe(
    name: str, dtype: torch.dtype | None = None, reduction: str = "", root: int = 0, count: int = 0
) -> tuple[int, int]:
    """Return a packed `Call`; kept, since it is asked for at each call."""
    text = str(dtype).removeprefix("torch.")
    text = text if text in DTYPES else ""
    return Call(name=name, dtype=text, reduction=reduction, root=root, count=count).pack()

"""Collectives that reduce: everybody's tensors become one, in rank order.

A small all-reduce is one round: everybody publishes its tensor and reduces all of them itself.
A larger one goes in rounds that fit the caches. In each, a rank publishes the pieces that
its peers own, reduces the piece that it owns, publishes the result, and takes the others'
results one round later, so that it seldom waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from phalanx.tensors.sync.shm.reduction import Reduction
from phalanx.tensors.sync.shm.rounds import Rounds, copy, dense, describe, empty_like, fill
from phalanx.tensors.sync.shm.segment import NUM_SLOTS

if TYPE_CHECKING:
    from phalanx.tensors.sync.shm.exchange import Exchange

_ONE_ROUND: Final = 64 << 10
"""Bytes up to which everybody reduces everything: one wait is dearer than the extra work."""
_MAX_ELEMENTS: Final = 32_768
"""torch would use several threads for more, and other ranks need the cores."""
_MAX_KEPT: Final = 512
_ALIGNMENT: Final = 64


class _Small(NamedTuple):
    """What a one-round all-reduce of one dtype and shape needs, by slot."""

    reduction: Reduction
    call: tuple[int, int]
    num_bytes: int
    addresses: tuple[int, ...]
    inputs: tuple[tuple[torch.Tensor, ...], ...]


class _Cut(NamedTuple):
    """How a large reduction is cut: `num_rounds` rounds of `step` elements per rank."""

    num_rounds: int
    step: int
    stride: int
    inputs: tuple[tuple[torch.Tensor, ...], ...]
    outputs: tuple[torch.Tensor, ...]


class Reductions(Rounds):
    """The reducing collectives of one group; for one thread at a time.

    Every rank of the group calls the same methods in the same order, with the same sizes;
    each blocks until this rank's part is done. Errors are those of `Exchange`, and what
    `Reduction` lacks.
    """

    def __init__(self, exchange: Exchange) -> None:
        """Begin with nothing prepared."""
        super().__init__(exchange)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._smalls: dict[tuple[torch.dtype, torch.Size, str], _Small] = {}
        self._cuts: dict[tuple[torch.dtype, int, int], _Cut] = {}

    def all_reduce(self, tensor: torch.Tensor, name: str, timeout_s: float) -> None:
        """Replace the tensor on every rank by the reduction of all."""
        small = self._smalls.get((tensor.dtype, tensor.shape, name))
        if small is None:
            if tensor.nbytes > _ONE_ROUND or tensor.numel() > _MAX_ELEMENTS:
                self._reduce("all_reduce", tensor, name, None, timeout_s)
                return
            small = self._remember(tensor, name)
        exchange = self._exchange
        direct = tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_inference()
        source = tensor if direct else dense(tensor)
        number = exchange.num_inputs
        slot = number % NUM_SLOTS
        exchange.begin(small.call, 1, 0, timeout_s)
        copy(small.addresses[slot], source.data_ptr(), small.num_bytes)
        exchange.publish_input()
        exchange.await_inputs(number)
        exchange.compare_calls()
        if direct and tensor.dtype is small.reduction.dtype:
            small.reduction.reduce(small.inputs[slot], tensor)
            return
        result = torch.empty(tensor.shape, dtype=small.reduction.dtype)
        small.reduction.reduce(small.inputs[slot], result)
        fill(tensor, result.view(tensor.dtype))

    def reduce(self, tensor: torch.Tensor, name: str, root: int, timeout_s: float) -> None:
        """Replace the tensor on `root` by the reduction of all; the others keep theirs."""
        self._reduce("reduce", tensor, name, root, timeout_s)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], name: str, timeout_s: float
    ) -> None:
        """Reduce the ranks' `inputs[i]`; rank i gets the result.

        Args:
            output: What to fill; as many elements as each input.
            inputs: One tensor per rank, of one size and dtype.
            name: Of the reduction.
            timeout_s: Seconds until a peer counts as missing.
        """
        reduction = Reduction(name, output.dtype, self._size)
        sources = [dense(tensor).view(-1) for tensor in inputs]
        total = output.numel()
        cut = self._cut(reduction.dtype, total, 1)
        own = sources[self._rank].view(reduction.dtype)
        result, itemsize = empty_like(output), output.element_size()
        scratch = torch.empty(cut.step, dtype=reduction.dtype)
        starts = [source.data_ptr() for source in sources]

        def write(k: int, address: int) -> None:
            begin = k * cut.step * itemsize
            num_bytes = min(cut.step, total - k * cut.step) * itemsize
            for peer, start in enumerate(starts):
                if peer != self._rank and num_bytes > 0:
                    copy(address + peer * cut.stride, start + begin, num_bytes)

        def read(k: int, number: int) -> None:
            begin = k * cut.step
            count = min(cut.step, total - begin)
            if count > 0:
                parts = self._parts(cut, number, own[begin : begin + count], count)
                reduction.reduce(parts, scratch[:count])
                copy(result.data_ptr() + begin * itemsize, scratch.data_ptr(), count * itemsize)

        call = describe("reduce_scatter", output.dtype, name, 0, total)
        self._run(call, cut.num_rounds, write, read, timeout_s)
        if result is not output:
            fill(output, result)

    def _reduce(
        self, what: str, tensor: torch.Tensor, name: str, root: int | None, timeout_s: float
    ) -> None:
        reduction = Reduction(name, tensor.dtype, self._size)
        source = dense(tensor)
        receives = root is None or root == self._rank
        flat = source.detach().view(-1).view(reduction.dtype)
        call = describe(what, tensor.dtype, name, root or 0, flat.numel())
        self._reduce_in_rounds(flat, reduction, call, timeout_s, receives=receives)
        if receives and source is not tensor:
            fill(tensor, source)

    def _reduce_in_rounds(
        self,
        flat: torch.Tensor,
        reduction: Reduction,
        call: tuple[int, int],
        timeout_s: float,
        *,
        receives: bool,
    ) -> None:
        exchange, size, rank = self._exchange, self._size, self._rank
        total, itemsize, start = flat.numel(), flat.element_size(), flat.data_ptr()
        cut = self._cut(flat.dtype, total, size)
        pieces = flat.split(cut.step) if total else ()
        step_bytes = cut.step * itemsize
        total_bytes = total * itemsize
        first, first_out = exchange.num_inputs, exchange.num_outputs

        def send(k: int) -> None:
            address = self._address + exchange.input_offset(rank, first + k)
            for owner in range(size):
                begin = (k * size + owner) * step_bytes
                if owner != rank and begin < total_bytes:
                    length = min(step_bytes, total_bytes - begin)
                    copy(address + owner * cut.stride, start + begin, length)
            exchange.publish_input()

        def combine(k: int) -> None:
            index = k * size + rank
            if index < len(pieces):
                own = pieces[index]
                out = cut.outputs[(first_out + k) % NUM_SLOTS]
                if own.numel() < cut.step:
                    out = out[: own.numel()]
                parts = self._parts(cut, first + k, own, own.numel())
                reduction.reduce(parts, out)
                if receives:
                    copy(own.data_ptr(), out.data_ptr(), own.nbytes)
            exchange.publish_output()

        def take(k: int) -> None:
            for owner in range(size):
                begin = (k * size + owner) * step_bytes
                if owner != rank and begin < total_bytes:
                    length = min(step_bytes, total_bytes - begin)
                    address = self._address + exchange.output_offset(owner, first_out + k)
                    copy(start + begin, address, length)

        exchange.begin(call, cut.num_rounds, cut.num_rounds, timeout_s)
        for k in range(min(2, cut.num_rounds)):
            send(k)
        for k in range(cut.num_rounds + 1):
            if k < cut.num_rounds:
                exchange.await_inputs(first + k)
                if k == 0:
                    exchange.compare_calls()
                combine(k)
            if k >= 1 and receives:
                exchange.await_outputs(first_out + k - 1)
                take(k - 1)
            if k + 2 < cut.num_rounds:
                send(k + 2)

    def _cut(self, dtype: torch.dtype, total: int, owners: int) -> _Cut:
        """Cut `total` elements into rounds in which each of `owners` gets one piece."""
        key = (dtype, total, owners)
        cut = self._cuts.get(key)
        if cut is None:
            most = min(_MAX_ELEMENTS, self._layout.piece_bytes // dtype.itemsize)
            count = max(1, -(-total // (most * owners)))
            unit = _ALIGNMENT // dtype.itemsize
            step = max(unit, -(-total // (count * owners) // unit) * unit)
            stride = step * dtype.itemsize
            cut = _Cut(
                num_rounds=count,
                step=step,
                stride=stride,
                inputs=tuple(
                    tuple(
                        self._view(
                            dtype,
                            self._exchange.input_offset(peer, slot) + self._rank * stride,
                            step,
                        )
                        for peer in range(self._size)
                    )
                    for slot in range(NUM_SLOTS)
                ),
                outputs=tuple(
                    self._view(dtype, self._exchange.output_offset(self._rank, slot), step)
                    for slot in range(NUM_SLOTS)
                ),
            )
            _keep(self._cuts, key, cut)
        return cut

    def _parts(self, cut: _Cut, number: int, own: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return what the ranks have for this rank's piece, in rank order."""
        parts = list(cut.inputs[number % NUM_SLOTS])
        if count < cut.step:
            parts = [part[:count] for part in parts]
        parts[self._rank] = own
        return parts

    def _remember(self, tensor: torch.Tensor, name: str) -> _Small:
        reduction = Reduction(name, tensor.dtype, self._size)
        exchange = self._exchange
        offsets = [
            [exchange.input_offset(peer, slot) for peer in range(self._size)]
            for slot in range(NUM_SLOTS)
        ]
        small = _Small(
            reduction=reduction,
            call=describe("all_reduce", tensor.dtype, name, 0, tensor.numel()),
            num_bytes=tensor.nbytes,
            addresses=tuple(self._address + by_peer[self._rank] for by_peer in offsets),
            inputs=tuple(
                tuple(
                    self._view(reduction.dtype, offset, tensor.numel()).view(tensor.shape)
                    for offset in by_peer
                )
                for by_peer in offsets
            ),
        )
        _keep(self._smalls, (tensor.dtype, tensor.shape, name), small)
        return small

    def _view(self, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
        typed = self._typed.get(dtype)
        if typed is None:
            whole = self._exchange.segment.bytes
            typed = self._typed[dtype] = whole.view(dtype)
        begin = offset // dtype.itemsize
        return typed[begin : begin + count]


def _keep(kept: dict[Any, Any], key: object, value: object) -> None:
    if len(kept) >= _MAX_KEPT:
        kept.clear()
    kept[key] = value

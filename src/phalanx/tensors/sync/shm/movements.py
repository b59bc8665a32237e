"""Collectives that move tensors: copied into the sender's slots, and from there to who needs them.

They take bytes as they are, so every dtype will do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch

from phalanx.tensors.sync.shm.rounds import Rounds, copy, dense, describe, empty_like, fill
from phalanx.values.errors import CallMismatchError

_ALIGNMENT: Final = 64


class Movements(Rounds):
    """The moving collectives of one group; for one thread at a time.

    Every rank of the group calls the same methods in the same order, with the same sizes;
    each blocks until this rank's part is done. Errors are those of `Exchange`.
    """

    def barrier(self, timeout_s: float) -> None:
        """Return when every rank has come here."""
        self._run(describe("barrier"), 1, _nothing, _nothing, timeout_s)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        """Replace the tensor on every rank by that of `root`."""
        whole = dense(tensor)
        start, total = whole.data_ptr(), whole.nbytes
        piece = self._movement_piece(1)

        def write(k: int, address: int) -> None:
            if self._rank == root:
                copy(address, start + k * piece, min(piece, total - k * piece))

        def read(k: int, number: int) -> None:
            if self._rank != root:
                source = self._address + self._exchange.input_offset(root, number)
                copy(start + k * piece, source, min(piece, total - k * piece))

        call = describe("broadcast", tensor.dtype, "", root, tensor.numel())
        self._run(call, -(-total // piece), write, read, timeout_s)
        if self._rank != root and whole is not tensor:
            fill(tensor, whole)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float
    ) -> None:
        """Fill `outputs[i]` with rank i's tensor, on every rank."""
        self._gather("all_gather", outputs, tensor, None, timeout_s)

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout_s: float,
    ) -> None:
        """Fill `outputs[i]` with rank i's tensor on `root`; elsewhere `outputs` is empty."""
        self._gather("gather", outputs, tensor, root, timeout_s)

    def _gather(
        self,
        what: str,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int | None,
        timeout_s: float,
    ) -> None:
        source = dense(tensor)
        start, total = source.data_ptr(), source.nbytes
        targets = [empty_like(output) for output in outputs]
        ends = [target.data_ptr() for target in targets]
        piece = self._movement_piece(1)

        def write(k: int, address: int) -> None:
            copy(address, start + k * piece, min(piece, total - k * piece))

        def read(k: int, number: int) -> None:
            length = min(piece, total - k * piece)
            for peer, end in enumerate(ends):
                if peer != self._rank:
                    origin = self._address + self._exchange.input_offset(peer, number)
                    copy(end + k * piece, origin, length)

        if targets:
            copy(ends[self._rank], start, total)
        call = describe(what, tensor.dtype, "", root or 0, tensor.numel())
        self._run(call, -(-total // piece), write, read, timeout_s)
        for output, target in zip(outputs, targets, strict=True):
            if target is not output:
                fill(output, target)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout_s: float,
    ) -> None:
        """Fill `output` with `inputs[rank]` of `root`; elsewhere `inputs` is empty."""
        sources = [dense(tensor) for tensor in inputs]
        starts = [source.data_ptr() for source in sources]
        target = empty_like(output)
        end, total = target.data_ptr(), output.nbytes
        piece = self._movement_piece(self._size)

        def write(k: int, address: int) -> None:
            length = min(piece, total - k * piece)
            for peer, start in enumerate(starts):
                copy(address + peer * piece, start + k * piece, length)

        def read(k: int, number: int) -> None:
            source = self._address + self._exchange.input_offset(root, number)
            copy(end + k * piece, source + self._rank * piece, min(piece, total - k * piece))

        call = describe("scatter", output.dtype, "", root, output.numel())
        self._run(call, -(-total // piece), write, read, timeout_s)
        if target is not output:
            fill(output, target)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], timeout_s: float
    ) -> None:
        """Fill `outputs[i]` with rank i's `inputs[rank]`; sizes may differ from pair to pair."""
        sources = [dense(tensor) for tensor in inputs]
        targets = [empty_like(output) for output in outputs]
        starts, ends = [t.data_ptr() for t in sources], [t.data_ptr() for t in targets]
        sent, wanted = [t.nbytes for t in sources], [t.nbytes for t in targets]
        piece = self._movement_piece(self._size)
        longest = self._agree_on_sizes(sent, wanted, outputs[0].dtype, timeout_s)

        def write(k: int, address: int) -> None:
            for peer, start in enumerate(starts):
                length = min(piece, sent[peer] - k * piece)
                if length > 0:
                    copy(address + peer * piece, start + k * piece, length)

        def read(k: int, number: int) -> None:
            for peer, end in enumerate(ends):
                length = min(piece, wanted[peer] - k * piece)
                if length > 0:
                    source = self._address + self._exchange.input_offset(peer, number)
                    copy(end + k * piece, source + self._rank * piece, length)

        call = describe("all_to_all", outputs[0].dtype, "", 0, longest)
        self._run(call, -(-longest // piece), write, read, timeout_s)
        for output, target in zip(outputs, targets, strict=True):
            if target is not output:
                fill(output, target)

    def _agree_on_sizes(
        self, sent: list[int], wanted: list[int], dtype: torch.dtype, timeout_s: float
    ) -> int:
        """Return the largest size of any pair, in bytes, after checking each pair's two ends."""
        size = self._size
        table: list[list[int]] = []

        def write(_: int, address: int) -> None:
            numbers = (ctypes.c_uint64 * (2 * size))(*sent, *wanted)
            copy(address, ctypes.addressof(numbers), ctypes.sizeof(numbers))

        def read(_: int, number: int) -> None:
            for peer in range(size):
                first = self._exchange.input_offset(peer, number) // 8
                table.append(self._exchange.segment.words[first : first + 2 * size].tolist())

        self._run(describe("all_to_all", dtype), 1, write, read, timeout_s)
        for source in range(size):
            for destination in range(size):
                gives, takes = table[source][destination], table[destination][size + source]
                if gives != takes:
                    raise CallMismatchError(
                        f"in all_to_all rank {source} sends {gives:,} bytes to rank {destination}, "
                        f"which expects {takes:,}; make the split sizes of both agree"
                    )
        return max(max(row) for row in table)

    def _movement_piece(self, parts: int) -> int:
        return self._layout.input_bytes // parts // _ALIGNMENT * _ALIGNMENT


def _nothing(_k: int, _place: int) -> None:
    pass

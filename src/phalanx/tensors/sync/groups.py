"""The process groups that gradients travel over: made on first use, and nobody else's.

A group of its own keeps gradients that are sent while backward() runs apart from the
collectives of user code, whose order among the ranks has nothing to do with them.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist

from phalanx.tensors.sync.shm.backend import make_group as make_shm_group
from phalanx.values.errors import GroupUnsupportedError, PhalanxError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.values.spec import WorkerSpec

_TIMEOUT: Final = timedelta(minutes=30)
"""Bounds what user code has no timeout for."""


def ask_to_block(options: Any) -> None:  # noqa: ANN401 - a class of torch for each operation
    """Let a collective block where it is called, which is faster than waiting for it later.

    Torch 2.6 has no such option for some operations; waiting does the same there.
    """
    if hasattr(options, "asyncOp"):
        options.asyncOp = False


class Pending(Protocol):
    """Something on its way."""

    def wait(self) -> object:
        """Block until it has arrived."""


def make_group(worker: WorkerSpec, backend: str, purpose: str) -> dist.ProcessGroup:
    """Join a group of all ranks on a prefix of the generation's store. Blocks for all of them.

    Raises:
        PhalanxError: With ``restart="worker"`` there is no group to share.
    """
    if worker.restart == "worker":
        raise PhalanxError(
            'restart="worker" is for workers that share no process group, so barrier(), '
            'should_stop() and synchronize() are not for them; use restart="group"'
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, None, is_master=False, timeout=_TIMEOUT)
    prefix = dist.PrefixStore(f"phalanx/{purpose}/{worker.generation}", store)
    place = (prefix, worker.rank, worker.world_size, _TIMEOUT)
    if backend == "nccl":
        return dist.ProcessGroupNCCL(*place)
    if backend == "shm":
        # Where ranks can't share memory, all of them learn it, and go on together.
        with contextlib.suppress(GroupUnsupportedError):
            return make_shm_group(*place)
    return dist.ProcessGroupGloo(*place)


class GradientGroup:
    """All ranks' gradients: reduces them, and what has to be told about them."""

    def __init__(self, worker: WorkerSpec, backend: str) -> None:
        """Join the group for CPU tensors. Blocks until every rank has come here."""
        self._worker = worker
        self._backend = backend
        on_cpu = make_group(worker, "gloo" if backend == "gloo" else "shm", "gradients")
        self._groups = {"cpu": on_cpu}
        self.shares_memory = on_cpu.name() == "shm"
        if backend == "gloo":  # it takes CUDA tensors, too
            self._groups["cuda"] = self._groups["cpu"]

    def scale(self, device: torch.device, *, average: bool) -> float:
        """What gradients on a device are multiplied by before they are sent."""
        if not average or self._averages_itself(device):
            return 1.0
        return 1 / self._worker.world_size

    def all_reduce(self, tensor: torch.Tensor, *, average: bool, at_once: bool = False) -> Pending:
        """Sum a tensor over all ranks, in place (or average it, see `scale`).

        Args:
            tensor: What to sum; dense.
            average: Whether it is to be averaged.
            at_once: Block until it is done, which is faster than waiting for it later.
        """
        options = dist.AllreduceOptions()
        average = average and self._averages_itself(tensor.device)
        options.reduceOp = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        if at_once:
            ask_to_block(options)
        pending: Pending = self._group_for(tensor.device).allreduce([_real(tensor)], options)
        return pending

    def _averages_itself(self, device: torch.device) -> bool:
        return self._group_for(device).name() in ("nccl", "shm")

    def combine(self, words: torch.Tensor, timeout_s: float) -> torch.Tensor:
        """Return the bitwise or of all ranks' words (int64, on the CPU). Blocks.

        Raises:
            RuntimeError: It took longer, or a rank is gone.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.BOR
        ask_to_block(options)
        options.timeout = timedelta(seconds=timeout_s)
        work = self._groups["cpu"].allreduce([words], options)
        work.wait(options.timeout)
        return words

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank. Blocks."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._worker.world_size)]
        self._groups["cpu"].allgather([sizes], [torch.tensor([len(data)])]).wait()
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(data.ljust(longest + 1)), dtype=torch.uint8)
        pieces = [torch.zeros_like(padded) for _ in sizes]
        self._groups["cpu"].allgather([pieces], [padded]).wait()
        return [
            bytes(piece[: int(size)].tolist()) for piece, size in zip(pieces, sizes, strict=True)
        ]

    def union(self, numbers: frozenset[int], count: int) -> frozenset[int]:
        """Return which of `count` numbers any rank has. Blocks."""
        mask = torch.zeros(count, dtype=torch.uint8)
        mask[sorted(numbers)] = 1
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._groups["cpu"].allreduce([mask], options).wait()
        return frozenset(mask.nonzero().flatten().tolist())

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all ranks the values of rank 0. Blocks."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            plain = tensor.detach()
            dense = plain.contiguous()
            self._group_for(tensor.device).broadcast([_real(dense)], options).wait()
            if dense is not plain:
                plain.copy_(dense)

    def _group_for(self, device: torch.device) -> dist.ProcessGroup:
        kind = device.type
        if kind not in self._groups:  # on CUDA: NCCL, or Gloo where gradients are small enough
            backend = "nccl" if self._backend == "nccl" else "gloo"
            self._groups[kind] = make_group(self._worker, backend, f"gradients-{kind}")
        return self._groups[kind]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs: Gloo and NCCL don't sum them as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor

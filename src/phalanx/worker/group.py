"""The context's own process group: made on first use, beside torch's default group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx.tensors.sync.groups import ask_to_block, make_group
from phalanx.tensors.sync.shm.backend import cpu_backend
from phalanx.values.errors import SpecError

if TYPE_CHECKING:
    from phalanx.values.spec import WorkerSpec


class ControlGroup:
    """Barriers and votes among all ranks.

    Uses torch's default group if the user made one before; otherwise a group of its own (over
    shared memory where the backend is ``shm``, else Gloo) on a prefix of the group's store,
    which is never registered as the default, so that a later ``init_process_group()`` of the
    user does not collide with it.
    """

    def __init__(self, worker: WorkerSpec) -> None:
        """Join the group. Blocks until every rank has come here.

        Raises:
            PhalanxError: With ``restart="worker"`` there is no group to share.
        """
        self._worker = worker
        self._group: dist.ProcessGroup | None = None
        if not dist.is_initialized():
            self._group = make_group(worker, backend_of(worker), "control")

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        if self._group is None:
            dist.barrier()
        else:
            options = dist.BarrierOptions()
            ask_to_block(options)
            self._group.barrier(options).wait()

    def any(self, vote: bool) -> bool:  # noqa: FBT001 - it is a vote
        """Return on every rank whether any rank voted yes."""
        ballot = torch.tensor([int(vote)], device=self._ballot_device())
        if self._group is None:
            dist.all_reduce(ballot, op=dist.ReduceOp.MAX)
        else:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            ask_to_block(options)
            self._group.allreduce([ballot], options).wait()
        return bool(ballot.item())

    def _ballot_device(self) -> torch.device:
        if self._group is None and dist.get_backend() == "nccl":
            return device_of(self._worker)
        return torch.device("cpu")


def device_of(worker: WorkerSpec) -> torch.device:
    """Return the CUDA device of a local rank, or the CPU where there is no CUDA."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", worker.local_rank % torch.cuda.device_count())


def backend_of(worker: WorkerSpec) -> str:
    """Return the backend of the group that gradients travel over.

    Raises:
        SpecError: NCCL was asked for and this machine has no CUDA.
    """
    if dist.is_initialized():
        return str(dist.get_backend())
    if worker.backend == "auto":
        return "nccl" if torch.cuda.is_available() else cpu_backend(worker.num_nodes)
    if worker.backend == "nccl" and not torch.cuda.is_available():
        raise SpecError('backend="nccl" needs CUDA, which torch does not find here; use "gloo"')
    return worker.backend

"""The process group that `torch.distributed` sees."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceScatterOptions

from phalanx.tensors.sync.shm.arguments import check_each, check_parts, checked, equal_parts, split
from phalanx.tensors.sync.shm.mailbox import Mailboxes
from phalanx.tensors.sync.shm.member import Member
from phalanx.tensors.sync.shm.movements import Movements
from phalanx.tensors.sync.shm.reduction import name_of
from phalanx.tensors.sync.shm.reductions import Reductions
from phalanx.tensors.sync.shm.rounds import dense, empty_like, fill

if TYPE_CHECKING:
    from torch.distributed import Store, Work

Tensors = list[torch.Tensor]


class ShmGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Collectives of CPU tensors among processes of one machine, over shared memory.

    Methods follow torch's `ProcessGroup`: each returns a `Work`, and lists hold one tensor
    per device, so one. Asynchronous ones are done by one thread in the order of their issue.

    Raises (each method, or the work that it returns):
        PeerLostError: A rank died, left the group, or failed in it.
        GroupTimeoutError: A rank did not come in time.
        CallMismatchError: Ranks called different things.
        GroupUnsupportedError: A tensor is not a dense one on the CPU.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """Join the group. Blocks until every rank has come here."""
        super().__init__(rank, size)
        self._group_name = self._group_desc = ""
        self._member = Member(store, rank, size, timeout.total_seconds())
        self._finalizer = weakref.finalize(self, self._member.close)

    def __repr__(self) -> str:
        """Say who this is."""
        return f"<shm group: rank {self.rank()} of {self.size()}>"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return ``shm``."""
        return "shm"

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that torch gave it."""
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the description that torch gave it."""
        return self._group_desc

    setGroupName = _set_group_name  # noqa: N815 - torch's names
    setGroupDesc = _set_group_desc  # noqa: N815
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _reductions(self) -> Reductions:
        self._member.check()
        return self._member.reductions

    @property
    def _movements(self) -> Movements:
        self._member.check()
        return self._member.movements

    @property
    def _mailboxes(self) -> Mailboxes:
        self._member.check()
        return self._member.mailboxes

    @property
    def _device_types(self) -> list[torch.device]:
        """What object collectives put their bytes on."""
        return [torch.device("cpu")]

    supports_coalescing = supports_splitting = supports_time_estimate = False
    """What torch asks a backend; `_get_backend` gives it this group."""

    def _get_backend(self, device: torch.device) -> ShmGroup:
        """Return the backend that works on tensors of a device: for the CPU, the group itself.

        Newer versions of torch ask every group, also one that has no backends below it.

        Raises:
            RuntimeError: There is none for this device; what torch's groups raise.
        """
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"the shm group has no backend for {device}: it takes CPU tensors. For others "
                'use init_process_group("cpu:gloo,cuda:nccl")'
            )
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long later operations may wait for a peer."""
        self._member.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group: thread, descriptors and memory go. Peers that wait are told."""
        self._member.close()

    abort = shutdown

    def _do(
        self,
        opts: Any,  # noqa: ANN401 - a different class for each operation
        result: Any,  # noqa: ANN401 - as torch.distributed expects it
        task: Callable[[float], None],
    ) -> Work:
        member = self._member
        timeout_s = opts.timeout.total_seconds() if opts is not None else 0.0
        timeout_s = timeout_s if timeout_s > 0 else member.timeout_s
        return member.lane.do(
            lambda: member.attempt(lambda: task(timeout_s)),
            result,
            blocking=not getattr(opts, "asyncOp", True),
        )

    # ── reductions ───────────────────────────────────────────────────────────────────────

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:  # noqa: ANN401
        """Reduce a tensor over all ranks, in place."""
        (tensor,) = checked(tensors)
        opts = opts or AllreduceOptions()
        name = name_of(opts.reduceOp)
        run = self._reductions.all_reduce
        return self._do(opts, tensors, lambda timeout_s: run(tensor, name, timeout_s))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:  # noqa: ANN401
        """Reduce several tensors over all ranks, in place."""
        check_each(tensors)
        opts = opts or AllreduceOptions()
        name = name_of(opts.reduceOp)
        run = self._reductions.all_reduce

        def task(timeout_s: float) -> None:
            for tensor in tensors:
                run(tensor, name, timeout_s)

        return self._do(opts, tensors, task)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:  # noqa: ANN401
        """Reduce a tensor over all ranks, in place on the root only."""
        (tensor,) = checked(tensors)
        name, root = name_of(opts.reduceOp), opts.rootRank
        run = self._reductions.reduce
        return self._do(opts, tensors, lambda timeout_s: run(tensor, name, root, timeout_s))

    def reduce_scatter(
        self,
        outputs: Tensors,
        inputs: list[Tensors],
        opts: Any = None,  # noqa: ANN401
    ) -> Work:
        """Reduce lists of one tensor per rank; each rank gets its own."""
        (output,), (parts,) = checked(outputs), inputs
        check_each(parts)
        check_parts(self.size(), "reduce_scatter", output, parts)
        return self._reduce_scatter([(output, parts)], outputs, opts)

    def _reduce_scatter_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        opts: Any = None,  # noqa: ANN401
    ) -> Work:
        """Reduce a tensor of one equal part per rank; each rank gets its own."""
        pair = (output, equal_parts(self.size(), "reduce_scatter_tensor", output, source))
        return self._reduce_scatter([pair], [output], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Tensors,
        sources: Tensors,
        opts: Any = None,  # noqa: ANN401
    ) -> Work:
        """Do `_reduce_scatter_base` with several."""
        pairs = [
            (output, equal_parts(self.size(), "reduce_scatter_tensor", output, source))
            for output, source in zip(outputs, sources, strict=True)
        ]
        return self._reduce_scatter(pairs, outputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(
        self,
        pairs: list[tuple[torch.Tensor, Sequence[torch.Tensor]]],
        result: Tensors,
        opts: Any,  # noqa: ANN401
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        name = name_of(opts.reduceOp)
        run = self._reductions.reduce_scatter

        def task(timeout_s: float) -> None:
            for output, parts in pairs:
                run(output, parts, name, timeout_s)

        return self._do(opts, result, task)

    # ── movements ────────────────────────────────────────────────────────────────────────

    def barrier(self, opts: Any = None) -> Work:  # noqa: ANN401
        """Wait until every rank has come here."""
        return self._do(opts, [], self._movements.barrier)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:  # noqa: ANN401
        """Give every rank the root's tensor."""
        (tensor,) = checked(tensors)
        root, run = opts.rootRank, self._movements.broadcast
        return self._do(opts, tensors, lambda timeout_s: run(tensor, root, timeout_s))

    def allgather(
        self,
        outputs: list[Tensors],
        inputs: Tensors,
        opts: Any = None,  # noqa: ANN401
    ) -> Work:
        """Give every rank the tensors of all, in a list."""
        (parts,), (tensor,) = outputs, checked(inputs)
        check_each(parts)
        check_parts(self.size(), "all_gather", tensor, parts)
        return self._all_gather([(parts, tensor)], outputs, opts)

    def _allgather_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        opts: Any = None,  # noqa: ANN401
    ) -> Work:
        """Give every rank the tensors of all, in one tensor."""
        return self.allgather_into_tensor_coalesced([output], [source], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self,
        outputs: Tensors,
        sources: Tensors,
        opts: Any = None,  # noqa: ANN401
    ) -> Work:
        """Do `_allgather_base` with several."""
        pairs = [
            (equal_parts(self.size(), "all_gather_into_tensor", source, output), source)
            for output, source in zip(outputs, sources, strict=True)
        ]
        return self._all_gather(pairs, outputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(
        self,
        outputs: list[Tensors],
        inputs: Tensors,
        opts: Any = None,  # noqa: ANN401
    ) -> Work:
        """Give every rank several tensors of all: `outputs[rank][i]`."""
        check_each(inputs)
        pairs = [([by_rank[i] for by_rank in outputs], each) for i, each in enumerate(inputs)]
        for parts, tensor in pairs:
            check_each(parts)
            check_parts(self.size(), "all_gather_coalesced", tensor, parts)
        return self._all_gather(pairs, outputs, opts)

    def _all_gather(
        self,
        pairs: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]],
        result: Any,  # noqa: ANN401
        opts: Any,  # noqa: ANN401
    ) -> Work:
        run = self._movements.all_gather

        def task(timeout_s: float) -> None:
            for parts, tensor in pairs:
                run(parts, tensor, timeout_s)

        return self._do(opts, result, task)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Work:  # noqa: ANN401
        """Give the root the tensors of all, in a list."""
        (tensor,) = checked(inputs)
        parts = outputs[0] if opts.rootRank == self.rank() else []
        check_each(parts)
        if parts:
            check_parts(self.size(), "gather", tensor, parts)
        root, run = opts.rootRank, self._movements.gather
        return self._do(opts, outputs, lambda timeout_s: run(parts, tensor, root, timeout_s))

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Work:  # noqa: ANN401
        """Give each rank its tensor of the root's list."""
        (output,) = checked(outputs)
        parts = inputs[0] if opts.rootRank == self.rank() else []
        check_each(parts)
        if parts:
            check_parts(self.size(), "scatter", output, parts)
        root, run = opts.rootRank, self._movements.scatter
        return self._do(opts, outputs, lambda timeout_s: run(output, parts, root, timeout_s))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:  # noqa: ANN401
        """Give each rank its tensor of every rank's list."""
        check_each(outputs)
        check_each(inputs)
        run = self._movements.all_to_all
        return self._do(opts, outputs, lambda timeout_s: run(outputs, inputs, timeout_s))

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: list[int] | None = None,
        input_sizes: list[int] | None = None,
        opts: Any = None,  # noqa: ANN401
    ) -> Work:
        """Give each rank its rows of every rank's tensor."""
        check_each([output, source])
        whole = empty_like(output)
        outputs = split(self.size(), "output", whole, output_sizes)
        inputs = split(self.size(), "input", dense(source), input_sizes)
        run = self._movements.all_to_all

        def task(timeout_s: float) -> None:
            run(outputs, inputs, timeout_s)
            if whole is not output:
                fill(output, whole)

        return self._do(opts, [output], task)

    all_to_all_single = alltoall_base

    # ── messages ─────────────────────────────────────────────────────────────────────────

    def send(self, tensors: Tensors, peer: int, tag: int) -> Work:
        """Send a tensor to a rank; over when it may be changed."""
        (tensor,) = checked(tensors)
        return self._mailboxes.send(tensor, peer, tag, self._member.timeout_s)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Work:
        """Receive a tensor from a rank."""
        (tensor,) = checked(tensors)
        return self._mailboxes.receive(tensor, peer, tag, self._member.timeout_s)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a tensor from whichever rank sends first."""
        (tensor,) = checked(tensors)
        return self._mailboxes.receive(tensor, None, tag, self._member.timeout_s)

"""The context as a worker sees it."""

from __future__ import annotations

import os
import socket
import sys
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from phalanx.values.context import SubprocessContext
from phalanx.values.errors import SpecError
from phalanx.values.spec import to_seconds
from phalanx.wire.messages import Reported, StoreOpened

if TYPE_CHECKING:
    from types import FrameType

    import torch

    from phalanx.system.page import ControlPage
    from phalanx.tensors.store.client import TensorClient
    from phalanx.tensors.sync.parameters import Target
    from phalanx.tensors.sync.synchronizer import Synchronizer
    from phalanx.values.spec import Duration, WorkerSpec
    from phalanx.worker.group import ControlGroup
    from phalanx.worker.link import AgentLink


class WorkerContext(SubprocessContext[Any]):
    """Knows a worker's place, and its ways to the agent and to the other ranks.

    Usable from any thread, and from processes that the worker forks (DataLoader workers);
    `barrier` and `should_stop` are for the worker's own process.
    """

    def __init__(self, worker: WorkerSpec, link: AgentLink, page: ControlPage) -> None:
        """Keep what the bootstrap has opened."""
        self._worker = worker
        self._link = link
        self._page = page
        self._group: ControlGroup | None = None
        self._watched = False
        self._pid = os.getpid()

    def __repr__(self) -> str:
        """Say who this is."""
        worker = self._worker
        return f"<worker {worker.rank} of {worker.world_size}, run {worker.run_id}>"

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self._worker.run_id

    def get_world_size(self) -> int:
        """Return the number of workers."""
        return self._worker.world_size

    def get_backend(self) -> str:
        """Return the name of the backend of the context's process group."""
        from phalanx.worker.group import backend_of  # noqa: PLC0415 - imports torch

        return backend_of(self._worker)

    @property
    def restart_count(self) -> int:
        """How often this worker was started again."""
        return self._worker.restart_count

    def get_rank(self) -> int:
        """Return this worker's global rank."""
        return self._worker.rank

    def get_global_rank(self) -> int:
        """Return the same as `get_rank`."""
        return self._worker.rank

    def get_local_rank(self) -> int:
        """Return this worker's rank on its machine."""
        return self._worker.local_rank

    @property
    def node_rank(self) -> int:
        """Rank of this worker's machine."""
        return self._worker.node_rank

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self._worker.rank == self.get_master_rank()

    @property
    def device(self) -> torch.device:
        """The CUDA device of this local rank, or the CPU."""
        from phalanx.worker.group import device_of  # noqa: PLC0415 - imports torch

        return device_of(self._worker)

    @property
    def stop_requested(self) -> bool:
        """Whether this worker was asked to finish."""
        if not self._watched:
            self._watched = True
            self._page.note_polling(self._worker.rank)
        return self._page.stop_wanted

    def should_stop(self) -> bool:
        """Return whether to stop now: the same answer on every rank."""
        wanted = self.stop_requested
        if self._worker.world_size > 1:
            wanted = self._control_group().any(wanted)
        self.heartbeat()
        return wanted

    def heartbeat(self, *, step: int | None = None) -> None:
        """Note that this worker got on."""
        if step is not None and not 0 <= step < 2**64:
            raise SpecError(f"heartbeat(step=…) must be 0 or more, not {step}")
        self._page.note_progress(self._worker.rank, time.monotonic_ns(), step)

    def report(self, **metrics: float | str | bool | None) -> None:
        """Send named values to the launcher."""
        values = {name: _plain(name, value) for name, value in metrics.items()}
        self._link.send(Reported(metrics=values))
        self.heartbeat()

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        if self._worker.world_size > 1:
            self._control_group().barrier()
        self.heartbeat()

    def synchronize(
        self,
        target: Target | None = None,
        *,
        average: bool = True,
        align: bool = True,
        overlap: bool | None = None,
        check_finite: bool = False,
        guard: bool = True,
        bucket_mb: float = 25.0,
        timeout: Duration = 300.0,
    ) -> None:
        """Average gradients over all ranks."""
        from phalanx.tensors.sync.synchronizer import Options  # noqa: PLC0415 - imports torch

        if not 0 < bucket_mb < float("inf"):
            raise SpecError(f"synchronize(bucket_mb=…) must be more than 0, not {bucket_mb!r}")
        options = Options(
            average=average,
            align=align,
            overlap=overlap,
            check_finite=check_finite,
            guard=guard,
            bucket_mb=bucket_mb,
            timeout_s=to_seconds("timeout", timeout),
        )
        self._synchronizer.synchronize(target, options)
        self.heartbeat()

    def broadcast_parameters(self, target: Target) -> None:
        """Give all ranks the parameters and buffers of rank 0."""
        self._synchronizer.broadcast(target)

    def breakpoint(self, rank: int = 0) -> None:
        """Open a debugger on one rank."""
        if not 0 <= rank < self._worker.world_size:
            raise SpecError(
                f"breakpoint(rank={rank}): ranks go from 0 to {self._worker.world_size - 1}"
            )
        if rank == self._worker.rank:
            self._open_debugger(sys._getframe(1))  # noqa: SLF001 - as pdb does

    def on_breakpoint(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Python's own
        """Be `sys.breakpointhook`: what `breakpoint()` does in a function."""
        if os.environ.get("PYTHONBREAKPOINT") or os.getpid() != self._pid:
            return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100 - as asked for
        self._open_debugger(sys._getframe(1))  # noqa: SLF001 - as above
        return None

    def _open_debugger(self, frame: FrameType) -> None:
        from phalanx.worker.debugger import open_debugger  # noqa: PLC0415 - imports pdb

        open_debugger(self._link, self._worker.rank, frame)

    @cached_property
    def _tensors(self) -> TensorClient:
        from phalanx.tensors.store.client import TensorClient  # noqa: PLC0415 - imports torch

        return TensorClient(self._open_store, self.heartbeat)

    @property
    def _own_rank(self) -> int:
        return self._worker.rank

    @property
    def _rank_to_read(self) -> int:
        return self._worker.rank

    def _open_store(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._link.send(StoreOpened(pid=os.getpid()), [theirs.fileno()])
        return ours

    @cached_property
    def _synchronizer(self) -> Synchronizer:
        from phalanx.tensors.sync.synchronizer import Synchronizer  # noqa: PLC0415 - imports torch

        return Synchronizer(self._worker, self._page, self.get_backend())

    def _control_group(self) -> ControlGroup:
        if self._group is None:
            from phalanx.worker.group import ControlGroup  # noqa: PLC0415 - imports torch

            self._group = ControlGroup(self._worker)
        return self._group


def _plain(name: str, value: Any) -> float | int | str | bool | None:  # noqa: ANN401
    """Return a value as the event log can hold it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    item = getattr(value, "item", None)  # a tensor or an array of one element
    if callable(item):
        try:
            plain = item()
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"report({name}=…): {error}; pass one number, as .mean()") from error
        if isinstance(plain, bool | int | float | str):
            return plain
    raise TypeError(
        f"report({name}=…) takes a number, string, bool or None, not {type(value).__name__}"
    )

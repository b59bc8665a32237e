"""The context: one object, seen from the launcher and from a worker.

`SubprocessContext` is the whole surface with its documentation. The launcher's
`phalanx.launcher.context.LauncherContext` and the worker's
`phalanx.worker.context.WorkerContext` each fill in their side; what belongs to the other
side raises an error that says what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from phalanx.values.errors import NotALauncherError, NotAWorkerError
from phalanx.values.tensors import SharedTensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    import torch

    from phalanx.tensors.sync.parameters import Target
    from phalanx.values.events import Event, GroupPhase
    from phalanx.values.spec import Duration

R = TypeVar("R")
"""What the main function returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Generic[R]):
    """What came of a run in which every rank returned.

    Attributes:
        run_id: Name of the run, and of its directory.
        returns: What the main function returned, by rank.
        restart_count: How often the group or a worker was started again.
        duration_s: Seconds from the launch to the end of the last process.
    """

    run_id: str
    returns: tuple[R, ...]
    restart_count: int
    duration_s: float


def _only_in_a_worker(name: str) -> NoReturn:
    raise NotAWorkerError(
        f"context.{name} is for workers: call it inside the function that start_processes "
        "runs (there, phalanx.get_context() returns the worker's context). In the launcher "
        "use wait(), events(), pids() and state."
    )


def _only_in_the_launcher(name: str) -> NoReturn:
    raise NotALauncherError(
        f"context.{name} is for the launcher, the process that called start_processes; "
        "a worker ends by returning from its function, or by raising."
    )


class SubprocessContext(SharedTensors, Generic[R]):
    """Starts, watches and coordinates the workers of one run.

    `start_processes` returns one to the launcher, `get_context` one to a worker. In the
    launcher it is a context manager: leaving the block waits for the run, leaving it by an
    exception shuts the run down.
    """

    def __reduce__(self) -> tuple[object, ...]:
        """A context that reaches a worker (as a global, an argument) is the worker's own."""
        return (get_context, ())

    # ── on both sides ────────────────────────────────────────────────────────────────────

    @property
    def run_id(self) -> str:
        """Name of the run, and of its directory."""
        raise NotImplementedError

    def get_world_size(self) -> int:
        """Return the number of workers."""
        raise NotImplementedError

    def get_master_rank(self) -> int:
        """Return the rank that coordinates: always 0."""
        return 0

    def get_backend(self) -> str:
        """Return the name of the backend of the context's process group, like ``gloo``."""
        raise NotImplementedError

    @property
    def restart_count(self) -> int:
        """How often the group (in a worker: this worker) was started again so far."""
        raise NotImplementedError

    # ── in a worker ──────────────────────────────────────────────────────────────────────

    def get_rank(self) -> int:
        """Return this worker's global rank, 0 to world size − 1."""
        _only_in_a_worker("get_rank()")

    def get_global_rank(self) -> int:
        """Return the same as `get_rank`."""
        _only_in_a_worker("get_global_rank()")

    def get_local_rank(self) -> int:
        """Return this worker's rank on its (possibly emulated) machine."""
        _only_in_a_worker("get_local_rank()")

    @property
    def node_rank(self) -> int:
        """Rank of this worker's (possibly emulated) machine."""
        _only_in_a_worker("node_rank")

    @property
    def is_master(self) -> bool:
        """Whether this worker is the one that coordinates (rank 0)."""
        _only_in_a_worker("is_master")

    @property
    def device(self) -> torch.device:
        """The CUDA device of this local rank, or the CPU where there is no CUDA."""
        _only_in_a_worker("device")

    @property
    def stop_requested(self) -> bool:
        """Whether this worker was asked to finish. A memory read; may differ between ranks.

        A worker that looks at it is not sent SIGTERM on a stop (unless it handles SIGTERM):
        it has the run's grace to save what it needs and return.
        """
        _only_in_a_worker("stop_requested")

    def should_stop(self) -> bool:
        """Return whether to stop now: the same answer on every rank. Blocks.

        Every rank must call it, equally often: it is a vote (a small all-reduce). So all
        ranks leave their loops at the same step.
        """
        _only_in_a_worker("should_stop()")

    def heartbeat(self, *, step: int | None = None) -> None:
        """Note that this worker got on, and optionally at which step it is. A memory write.

        A sign of life, for `start_processes(hang_timeout=…)`.
        """
        _only_in_a_worker("heartbeat()")

    def report(self, **metrics: float | str | bool | None) -> None:
        """Send named values to the launcher, as a `WorkerReported` event. Does not wait.

        Tensors and arrays of one element are taken as numbers.

        Raises:
            TypeError: A value is no number, string, bool or None.
        """
        _only_in_a_worker("report()")

    def barrier(self) -> None:
        """Wait until every rank has come here. Every rank must call it."""
        _only_in_a_worker("barrier()")

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
        """Average gradients over all ranks. Every rank must call it, equally often. Blocks.

        Call it between ``backward()`` (one, or several to accumulate) and ``step()``; scale and
        clip gradients before or after it. Afterwards all ranks hold the same bits. A parameter
        that got a gradient on some ranks counts as zero on the others; one that got none
        anywhere keeps none. In a world of one nothing is copied. Before the first ``backward()``
        it does nothing but compare what the ranks mean.

        Args:
            target: A module, an optimizer, parameters, ``named_parameters()``, or several of
                these; None: the parameters of every optimizer made in this worker.
            average: Average; False: sum.
            align: In the first call with these parameters compare their values, too. If ranks
                differ, all get parameters, buffers and this step's gradients of rank 0.
            overlap: Send gradients while ``backward()`` still runs, once the set of parameters
                is steady. Stops by itself where that does not pay: if gradients change after
                ``backward()`` has made them (several of them, clipping before the call). None:
                do so, but not over shared memory, where the cores that would send are those
                that compute.
            check_finite: Look for gradients that are infinite or no number, on all ranks.
            guard: From now on an optimizer's ``step()`` raises if it would apply a gradient that
                nobody averaged.
            bucket_mb: Size of the pieces that are sent, in MiB.
            timeout: Seconds (or timedelta) to wait for the other ranks.

        Raises:
            SynchronizeError: Ranks mean different parameters (names the first that differs),
                or gradients are sparse, or not finite.
            SynchronizeTimeoutError: Names the ranks that have not come.
        """
        _only_in_a_worker("synchronize()")

    def broadcast_parameters(self, target: Target) -> None:
        """Give all ranks the parameters and buffers of rank 0. Every rank must call it. Blocks.

        Args:
            target: As for `synchronize`; buffers are those of a module.

        Raises:
            SynchronizeError: Ranks mean different tensors.
        """
        _only_in_a_worker("broadcast_parameters()")

    def breakpoint(self, rank: int = 0) -> None:
        """Open a debugger (pdb) on one rank, with the launcher's terminal; no-op on others.

        The launcher must be in `wait()`: it reads the lines that you type. The other ranks
        run on, to their next collective.
        """
        _only_in_a_worker("breakpoint()")

    # ── in the launcher ──────────────────────────────────────────────────────────────────

    def wait(self, timeout: Duration | None = None) -> RunResult[R]:
        """Wait until the run has ended, restarts included. Blocks.

        Args:
            timeout: Seconds, or a timedelta; the run goes on when it is over.

        Raises:
            WorkerFailedError: The run failed; the text says what broke and where.
            RunStoppedError: It was stopped before every rank returned.
            TimeoutError: It has not ended in time.
            KeyboardInterrupt: Ctrl-C stopped it (raised once everything has ended).
        """
        _only_in_the_launcher("wait()")

    def shutdown(self, grace: Duration | None = None) -> None:
        """Stop the run and wait until nothing of it is alive. Blocks; harmless when it ended.

        Args:
            grace: Time that workers have to finish; None: what `start_processes` was told.
        """
        _only_in_the_launcher("shutdown()")

    def restart(self, grace: Duration | None = None) -> None:
        """Replace the workers by a new generation. Does not wait, and uses up no restart.

        Raises:
            RunStoppedError: The run has ended already.
        """
        _only_in_the_launcher("restart()")

    def pids(self) -> dict[int, int]:
        """Return the process ids of the living workers, by rank."""
        _only_in_the_launcher("pids()")

    def dump_stacks(self) -> dict[int, str]:
        """Return where each living worker is, by rank. Blocks for up to about a second.

        A text has a line per call of the worker's main thread, as a traceback has it, the
        innermost last; nothing is interrupted by that. A process that can't say (it is stopped,
        or no Python) has ``no Python stack`` and its state instead. `phalanx stacks` asks from
        another terminal.
        """
        _only_in_the_launcher("dump_stacks()")

    @property
    def state(self) -> GroupPhase:
        """Where the run stands: ``starting``, ``running``, ``stopping``, ``restarting``, …."""
        _only_in_the_launcher("state")

    def events(self) -> Iterator[Event]:
        """Yield the run's events from the first on, as they come, until `RunEnded`. Blocks."""
        _only_in_the_launcher("events()")

    def close(self) -> None:
        """Stop the run if it still runs, and let go of its tensors. Blocks; may be repeated.

        Leaving a ``with`` block does it, and so does collecting the object.
        """
        _only_in_the_launcher("close()")

    def __enter__(self) -> Self:
        """Enter a block that owns the run."""
        _only_in_the_launcher("a context manager, which")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the run, or shut it down if the block ended by an exception; then close it."""
        _only_in_the_launcher("a context manager, which")


_of_this_worker: SubprocessContext[Any] | None = None


def get_context() -> SubprocessContext[Any]:
    """Return this worker's context.

    Raises:
        NotAWorkerError: This process is no worker: in the launcher, use what
            `start_processes` returned.
    """
    if _of_this_worker is None:
        raise NotAWorkerError(
            "get_context() is for workers: call it inside the function that start_processes "
            "runs. In the launcher use the object that start_processes returned."
        )
    return _of_this_worker


def install_context(context: SubprocessContext[Any]) -> None:
    """Make a context the one of this worker (the bootstrap does)."""
    global _of_this_worker  # noqa: PLW0603 - a process is one worker
    _of_this_worker = context

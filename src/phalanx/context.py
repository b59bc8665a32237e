"""The context: one object, seen from the launcher and from a worker.

`SubprocessContext` is the whole surface with its documentation. The launcher's
`phalanx.launcher.context.LauncherContext` and the worker's
`phalanx.worker.context.WorkerContext` each fill in their side; what belongs to the other
side raises an error that says what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from phalanx.errors import NotALauncherError, NotAWorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Self

    import torch

    from phalanx.events import Event
    from phalanx.lifecycle import GroupPhase
    from phalanx.spec import Duration
    from phalanx.store.client import TensorClient
    from phalanx.store.layout import Tree

R = TypeVar("R")
"""What the main function returns."""

_PATIENCE_S = 300.0
"""How long tensors are waited for unless told otherwise."""


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


class SubprocessContext(Generic[R]):
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

    # ── tensors that all ranks share ─────────────────────────────────────────────────────

    def put_tensor(
        self, key: str, tensor: torch.Tensor, *, timeout: Duration | None = _PATIENCE_S
    ) -> None:
        """Share a tensor with all ranks and the launcher, under a key. Blocks for one copy.

        Later readers get it in place of what was there; a reader keeps what it got. It is
        kept by the agent, so it outlives this worker and restarts of the group, and ends with
        the launcher's context.

        Args:
            key: Its name, 1 to 1,024 bytes.
            tensor: Any dtype, shape and device. It arrives dense and without gradient.
            timeout: Seconds (or timedelta; None: no limit) to wait while another process is
                in `update_tensor` with the key.

        Raises:
            TensorError: The key is no key, or the tensor is sparse, quantised, nested or meta.
            StoreFullError: It does not fit (`store_limit` of `start_processes`).
            StoreTimeoutError: The key was not let go in time.
            StoreClosedError: The context was closed, or the agent has ended.
        """
        self._tensors.put(key, tensor, timeout)

    def get_tensor(
        self,
        key: str,
        timeout: Duration | None = _PATIENCE_S,
        *,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Return the tensor that was put last under a key. Blocks until there is one.

        Nothing is copied, whatever its size: it is mapped, and private. You may write into
        it, and nobody else sees that.

        Args:
            key: Its name.
            timeout: Seconds (or timedelta; None: no limit) to wait for it; 0: not at all.
            device: Where it shall be; None: on the CPU.

        Raises:
            StoreTimeoutError: Nobody has put it; names keys like it, and who is alive.
            StoreClosedError: The context was closed, or the agent has ended.
        """
        return self._tensors.get(key, timeout, device)

    def update_tensor(
        self,
        key: str,
        function: Callable[[torch.Tensor], torch.Tensor],
        *,
        timeout: Duration | None = _PATIENCE_S,
    ) -> torch.Tensor:
        """Replace a tensor by what `function` makes of it, with nobody in between.

        Updates of one key follow each other; other writers wait, readers see the old value.
        If the function raises, or this process dies in it, the old value stays and the key is
        free.

        Args:
            key: Its name. Blocks until it is there.
            function: Gets the tensor, which it may change, and returns the new one. Updates
                of several keys inside each other must take them in the same order everywhere.
            timeout: Seconds (or timedelta; None: no limit) to wait for the key.

        Returns:
            The new tensor.

        Raises:
            TensorError: The function returned no tensor.
            StoreTimeoutError: The key did not come, or was not let go, in time.
        """
        return self._tensors.update(key, function, timeout)

    def add_tensor(
        self, key: str, tensor: torch.Tensor, *, timeout: Duration | None = _PATIENCE_S
    ) -> torch.Tensor:
        """Add to a shared tensor, with nobody in between; where there is none, put it.

        Args:
            key: Its name.
            tensor: Of the same shape, and of a dtype that fits into the one that is there.
            timeout: Seconds (or timedelta; None: no limit) to wait for the key.

        Returns:
            The sum.

        Raises:
            TensorError: Shape or dtype don't fit.
            StoreTimeoutError: The key was not let go in time.
        """
        return self._tensors.add(key, tensor, timeout)

    def delete_tensor(self, key: str, *, timeout: Duration | None = _PATIENCE_S) -> bool:
        """Delete what was put, or committed, under a key; return whether there was anything.

        Readers keep what they got. Memory goes back to the system, except for a part that is
        kept for what is put next.
        """
        return self._tensors.delete(key, timeout)

    def has_tensor(self, key: str) -> bool:
        """Return whether something is there under a key. Does not wait for it."""
        return self._tensors.has(key)

    def keys(self) -> list[str]:
        """Return the names of all tensors and trees that are there, sorted."""
        return self._tensors.keys()

    def put_tensors(self, key: str, tree: Tree, *, timeout: Duration | None = _PATIENCE_S) -> None:
        """Share a nested structure, as a ``state_dict()``, under one key.

        A reader gets all of one version. Otherwise as `put_tensor`.

        Args:
            key: Its name.
            tree: Tensors, numbers, strings, bytes and None in lists, tuples and dicts (keys:
                strings or integers), nested as you like. Subclasses arrive as plain ones.
            timeout: See `put_tensor`.
        """
        self._tensors.put_tree(key, tree, timeout)

    def get_tensors(self, key: str, timeout: Duration | None = _PATIENCE_S) -> Tree:
        """Return the structure (or the tensor) that was put last under a key.

        Its tensors are mapped, not copied, and private. Otherwise as `get_tensor`.
        """
        return self._tensors.get_tree(key, timeout)

    def commit_tensors(self, key: str, tree: Tree, *, version: int) -> None:
        """Store this rank's part of a version, to resume from. In workers only.

        A version is whole once every rank has committed its part of it. The newest whole one
        is kept, with all newer ones; what a fallen generation did not make whole is dropped.

        Args:
            key: Its name.
            tree: As in `put_tensors`; ranks may commit different things.
            version: A number that rises, as the step.

        Raises:
            StoreError: A version as new, or newer, is whole already.
        """
        self._tensors.commit(key, tree, version, self.get_rank())

    def get_committed_tensors(
        self, key: str, *, rank: int | None = None
    ) -> tuple[int, Tree] | None:
        """Return the newest version that all ranks have committed, and a rank's part of it.

        None if there is none. Does not wait.

        Args:
            key: Its name.
            rank: Whose part; None: this rank's own (in the launcher: rank 0's).
        """
        return self._tensors.get_committed(key, self._own_part if rank is None else rank)

    @property
    def _tensors(self) -> TensorClient:
        raise NotImplementedError

    @property
    def _own_part(self) -> int:
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
        """Note that this worker got on, and optionally at which step it is. A memory write."""
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

"""Works, and the thread that does them: what `torch.distributed` gets for an operation."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from phalanx.values.errors import GroupTimeoutError

if TYPE_CHECKING:
    from typing import TypeAlias

Task: TypeAlias = Callable[[], None]

_JOIN_S: Final = 5.0

_TORCH_KEEPS_WORKS: Final[bool] = torch.__version__ >= (2, 9)
_MOST_KEPT: Final = 1024
_kept: dict[int, dist.Work] = {}


def keep(work: dist.Work) -> dist.Work:
    """Keep a work's Python half alive until it was waited for, where torch does not.

    Torch 2.6 forgets it once C++ (as DDP's) has the other half, which then has no future, and
    is never over. Who asks for the future only, as DDP does, never waits: so the oldest go.
    """
    if _TORCH_KEEPS_WORKS:
        return work
    _kept[id(work)] = work
    if len(_kept) > _MOST_KEPT:
        with contextlib.suppress(RuntimeError, StopIteration):  # another thread was at it, too
            _kept.pop(next(iter(_kept)), None)
    return work


class DoneWork(dist.Work):  # type: ignore[misc]
    """An operation that was over when its call returned."""

    def __init__(self, result: Any) -> None:  # noqa: ANN401 - what torch.distributed expects
        """Keep what the future's value will be: a list of tensors."""
        super().__init__()
        self._result = result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 - torch's signature
        """Return at once."""
        _kept.pop(id(self), None)
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return True

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return True

    def exception(self) -> BaseException | None:
        """Return what went wrong, if anything did."""
        return None

    def synchronize(self) -> None:
        """Return at once: there are no streams on the CPU."""

    def result(self) -> Any:  # noqa: ANN401 - as above
        """Return the tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of tensors."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._future.set_result(self._result)
        return self._future


class PendingWork(dist.Work):  # type: ignore[misc]
    """An operation that another thread does.

    Attributes:
        source: Rank that a receive got its message from.
    """

    def __init__(self, result: Any) -> None:  # noqa: ANN401 - what torch.distributed expects
        """Keep what the future's value will be: a list of tensors."""
        super().__init__()
        self.source = -1
        self._result = result
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._over = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Note that it is over, once; wakes who waits."""
        self._error = error
        self._over.set()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is over.

        Raises:
            GroupTimeoutError: It took longer than `timeout`, if that is above 0.
        """
        seconds = timeout.total_seconds()
        if not self._over.wait(seconds if seconds > 0 else None):
            raise GroupTimeoutError(f"the operation was not over after {seconds:g} s")
        _kept.pop(id(self), None)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong, if anything did."""
        return self._error

    def synchronize(self) -> None:
        """Block until it is over."""
        self.wait()

    def result(self) -> Any:  # noqa: ANN401 - as above
        """Return the tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of tensors."""
        return self._future

    def source_rank(self) -> int:
        """Return the rank that a receive got its message from."""
        return self.source

    _source_rank = source_rank


class Lane:
    """Does operations one after the other, in the order in which they were issued.

    A blocking one is done by its caller if nothing is before it; all others by one thread,
    which is started when it is first needed.
    """

    def __init__(self, name: str) -> None:
        """Begin without a thread."""
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Task, PendingWork] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._num_pending = 0
        self._thread: threading.Thread | None = None

    def do(self, task: Task, result: Any, *, blocking: bool) -> dist.Work:  # noqa: ANN401
        """Do a task, now or in its turn.

        Args:
            task: What to do. What it raises comes from here, or from the work's `wait`.
            result: Value of the work's future.
            blocking: Whether the caller would only wait for it anyway.
        """
        if blocking and not self._num_pending and self._turn.acquire(blocking=False):
            try:
                task()
            finally:
                self._turn.release()
            return keep(DoneWork(result))
        work = PendingWork(result)
        with self._lock:
            self._num_pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._tasks.put((task, work))
        return keep(work)

    def stop(self) -> None:
        """End the thread when it has done what was issued; blocks until then."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._tasks.put(None)
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while (entry := self._tasks.get()) is not None:
            task, work = entry
            error: BaseException | None = None
            try:
                with self._turn:
                    task()
            except BaseException as caught:  # noqa: BLE001 - it belongs to whoever waits
                error = caught
            with self._lock:
                self._num_pending -= 1
            work.finish(error)
            del entry, task, work  # the tensors are the user's again

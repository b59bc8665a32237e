"""The error tree: everything Phalanx raises on purpose descends from `PhalanxError`.

Each message says what is wrong and what to do next. Errors that also fit a built-in
class inherit from it, so that ``except ValueError`` keeps meaning what people expect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.values.failures import Failure


class PhalanxError(Exception):
    """Root of all errors that Phalanx raises on purpose."""


class SpecError(PhalanxError, ValueError):
    """An argument of a launch is wrong; raised before anything is started."""


class PortInUseError(SpecError):
    """The port that ``main_process_port`` names can't be bound."""


class RunDirectoryError(PhalanxError, OSError):
    """The run directory or the log directory can't be written."""


class PayloadError(PhalanxError, TypeError):
    """A function, an argument or a return value can't travel between processes."""


class NotAWorkerError(PhalanxError, RuntimeError):
    """Something that only a worker has was asked for outside of one."""


class NotALauncherError(PhalanxError, RuntimeError):
    """Something that only the launcher has was asked for inside a worker."""


class AgentLostError(PhalanxError, RuntimeError):
    """The agent process ended while runs depended on it."""


class RunStoppedError(PhalanxError, RuntimeError):
    """`wait()` was called on a run that was stopped before every rank returned."""


class StoreError(PhalanxError):
    """Something went wrong in the tensor store."""


class StoreFullError(StoreError, MemoryError):
    """A value does not fit into what the tensor store may hold; nothing was changed."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key did not come, or was not let go, in time."""


class StoreClosedError(StoreError, RuntimeError):
    """The tensor store of this run is gone."""


class TensorError(StoreError, TypeError):
    """A key or a value is none that the tensor store can hold."""


class SynchronizeError(PhalanxError, RuntimeError):
    """Ranks don't agree on what `synchronize()` is about, or a gradient was not averaged."""


class SynchronizeTimeoutError(SynchronizeError, TimeoutError):
    """Not all ranks came to a `synchronize()` in time; the text names those that did not."""


class GroupError(PhalanxError, RuntimeError):
    """A process group of the `shm` backend can't go on; it is of no more use."""


class PeerLostError(GroupError):
    """Another rank died, left the group or failed in it. It says which; its own error says why."""


class GroupTimeoutError(GroupError, TimeoutError):
    """Ranks did not come to a collective within the group's timeout. It says which."""


class CallMismatchError(GroupError, ValueError):
    """Ranks of one group called different collectives, or the same with different sizes."""


class GroupUnsupportedError(PhalanxError, NotImplementedError):
    """The `shm` backend can't serve this system, these ranks or this tensor; Gloo can."""


class WorkerFailedError(PhalanxError, RuntimeError):
    """A run failed. The text is a page for a person: the root cause first, then its effects.

    Attributes:
        failures: One record per rank that failed or was stopped, the root cause first.
        exceptions: The exceptions that workers raised, by rank, where they could travel.
    """

    def __init__(
        self,
        page: str,
        failures: tuple[Failure, ...] = (),
        exceptions: Mapping[int, BaseException] | None = None,
    ) -> None:
        """Keep the page and the records that it was made from."""
        super().__init__(page)
        self.failures = failures
        self.exceptions: dict[int, BaseException] = dict(exceptions or {})

    @property
    def root_cause(self) -> Failure:
        """The failure that began it."""
        return self.failures[0]

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without losing the records."""
        return (type(self), (self.args[0], self.failures, self.exceptions))


for _error in tuple(globals().values()):
    if isinstance(_error, type) and issubclass(_error, PhalanxError):
        _error.__module__ = "phalanx"  # where people import it from, and what tracebacks say


class FrameError(PhalanxError):
    """Bytes on a connection are not a frame of the protocol; the connection is closed."""


class IllegalTransitionError(PhalanxError):
    """An event came that the lifecycle's table has no place for: a bug in Phalanx.

    Attributes:
        phase: The group's phase when the event came.
        event: Name of the event.
        story: The last events before it, oldest first.
    """

    def __init__(self, phase: str, event: str, story: tuple[str, ...], detail: str = "") -> None:
        """Keep the parts, so that the error pickles and can be examined."""
        super().__init__(phase, event, story, detail)
        self.phase = phase
        self.event = event
        self.story = story
        self.detail = detail

    def __str__(self) -> str:
        """One line for what happened, one for what came before."""
        why = f" ({self.detail})" if self.detail else ""
        return (
            f"{self.event} has no place in phase {self.phase!r}{why}; "
            f"before it: {' → '.join(self.story) or 'nothing'}. "
            "This is a bug in Phalanx: please report it with the run's events.jsonl."
        )

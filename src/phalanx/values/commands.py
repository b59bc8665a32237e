"""Orders that the lifecycle gives, in the imperative: values only.

`phalanx.lifecycle.step` returns them, the agent's `Run` carries them out, and reports what
came of each as an event.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from phalanx.values.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGeneration:
    """Prepare a generation: clear its control page, start its store host."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start the process of one rank. Answered by WorkerStarted or StartFailed."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelStart:
    """Don't start this rank if that is still possible.

    Answered by StartCancelled, or by the WorkerStarted that could not be helped.
    """

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceStop:
    """Tell the workers, by the control page, that a stop is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceAbort:
    """Tell the workers, by the control page, that this rank's failure ended the generation."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorker:
    """Ask a worker to end: a signal, usually SIGTERM, to its process.

    When `polite`, a worker that polls `stop_requested` or `should_stop()` and left SIGTERM
    at its default is spared the signal: the control page has told it.
    """

    rank: int
    polite: bool
    signum: int = signal.SIGTERM.value


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """End a worker's process with SIGKILL."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonWorker:
    """Stop waiting for a process that even SIGKILL did not end."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGeneration:
    """Every worker has ended: sweep what they left, end the store host, drain the logs.

    Answered by GenerationClosed.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Record a fact that the lifecycle itself brought about, and tell the launcher."""

    event: Event


Command: TypeAlias = (
    OpenGeneration
    | StartWorker
    | CancelStart
    | AnnounceStop
    | AnnounceAbort
    | StopWorker
    | KillWorker
    | AbandonWorker
    | CloseGeneration
    | Announce
)

"""Facts, in the past tense: what happened in a run.

One vocabulary for three uses: what observers tell the lifecycle, what the launcher's
``events()`` yields, and what stands in ``events.jsonl``, one event a line. A recorded log
can be replayed through `phalanx.lifecycle.step`.

Every event has ``at``, seconds since the epoch, stamped by the agent when it is recorded.
"""

from __future__ import annotations

import signal
from typing import Literal, TypeAlias

import msgspec

from phalanx.values.failures import Exit, Failure

GroupPhase: TypeAlias = Literal[
    "starting", "running", "stopping", "restarting", "ending", "succeeded", "failed", "stopped"
]
"""Where a run stands."""
EndState: TypeAlias = Literal["succeeded", "failed", "stopped"]
"""How a run can end."""


class EventBase(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True, omit_defaults=True
):
    """What all events have in common."""

    at: float = 0.0


# ── the run ──────────────────────────────────────────────────────────────────────────────


class RunStarted(EventBase, frozen=True, kw_only=True):
    """The agent accepted a run."""

    run_id: str
    world_size: int
    function: str


class RunEnded(EventBase, frozen=True, kw_only=True):
    """Nothing of the run is alive any more. Always the last event."""

    state: EndState
    restart_count: int


class Warned(EventBase, frozen=True, kw_only=True):
    """Something that a person should know, and that did not end the run."""

    message: str
    rank: int | None = None


# ── a generation ─────────────────────────────────────────────────────────────────────────


class GenerationStarted(EventBase, frozen=True, kw_only=True):
    """The agent began to start the workers of a generation (0 is the first)."""

    generation: int


class GroupRan(EventBase, frozen=True, kw_only=True):
    """Every worker of the generation has reached the user's code."""

    generation: int


class GroupFell(EventBase, frozen=True, kw_only=True):
    """A failure ended the generation; its other workers are being stopped."""

    generation: int
    failure: Failure
    restarting: bool


class GenerationClosed(EventBase, frozen=True, kw_only=True):
    """The generation's workers, their descendants and its store host are gone."""

    generation: int


class StoreContacted(EventBase, frozen=True, kw_only=True):
    """A worker connected to the group's store, so the ranks share a process group."""


class HelperExited(EventBase, frozen=True, kw_only=True):
    """A process that the generation needs ended, and nobody had asked it to.

    Its store host, or a fork server that its workers came from.
    """

    failure: Failure


# ── a worker ─────────────────────────────────────────────────────────────────────────────


class WorkerStarted(EventBase, frozen=True, kw_only=True):
    """The worker's process exists."""

    rank: int
    pid: int


class WorkerEntered(EventBase, frozen=True, kw_only=True):
    """The worker reached the user's code."""

    rank: int


class WorkerReturned(EventBase, frozen=True, kw_only=True):
    """The user's function returned."""

    rank: int


class WorkerRaised(EventBase, frozen=True, kw_only=True):
    """The user's function raised, or the worker failed before it (cause ``startup``)."""

    rank: int
    failure: Failure


class WorkerExited(EventBase, frozen=True, kw_only=True):
    """The worker's process ended."""

    rank: int
    exit: Exit
    log_tail: str = ""
    native_stack: str | None = None


class WorkerHung(EventBase, frozen=True, kw_only=True):
    """The worker has shown no sign of life for ``hang_timeout``, its run's limit."""

    rank: int
    failure: Failure


class WorkerReported(EventBase, frozen=True, kw_only=True):
    """The user's code called ``context.report(**metrics)``."""

    rank: int
    metrics: dict[str, float | int | str | bool | None]


class StartFailed(EventBase, frozen=True, kw_only=True):
    """The worker's process could not be made."""

    rank: int
    failure: Failure


class StartCancelled(EventBase, frozen=True, kw_only=True):
    """A start that was ordered and not yet under way was taken back."""

    rank: int


class WorkerRestarted(EventBase, frozen=True, kw_only=True):
    """With ``restart="worker"``: only this rank is being started again."""

    rank: int
    failure: Failure


# ── wishes and time ──────────────────────────────────────────────────────────────────────


class StopRequested(EventBase, frozen=True, kw_only=True):
    """Somebody wants the run to end: by `signum`, and workers have `grace_s` seconds to finish."""

    grace_s: float
    signum: int = signal.SIGTERM.value
    reason: str = "shutdown"


class KillRequested(EventBase, frozen=True, kw_only=True):
    """Somebody wants the run to end now."""

    reason: str = "kill"


class RestartRequested(EventBase, frozen=True, kw_only=True):
    """Somebody wants a new generation."""

    grace_s: float


class TimePassed(EventBase, frozen=True, kw_only=True):
    """The earliest of the lifecycle's deadlines has come."""


Event: TypeAlias = (
    RunStarted
    | RunEnded
    | Warned
    | GenerationStarted
    | GroupRan
    | GroupFell
    | GenerationClosed
    | StoreContacted
    | HelperExited
    | WorkerStarted
    | WorkerEntered
    | WorkerReturned
    | WorkerRaised
    | WorkerExited
    | WorkerHung
    | WorkerReported
    | StartFailed
    | StartCancelled
    | WorkerRestarted
    | StopRequested
    | KillRequested
    | RestartRequested
    | TimePassed
)

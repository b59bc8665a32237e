"""What the lifecycle knows about a run: frozen values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from phalanx.values.events import GroupPhase
    from phalanx.values.failures import Failure
    from phalanx.values.policy import Policy

WorkerPhase: TypeAlias = Literal["pending", "starting", "running", "succeeded", "failed", "stopped"]
Goal: TypeAlias = Literal["succeed", "fail", "restart", "stop"]
"""What the group is heading for once its workers are gone."""

ABORT_GRACE_S = 1.0
"""Peers of a failed worker sit in a collective that can't complete: no long grace for them."""

VERDICT_S = 0.5
"""How long a failure that looks like a lost peer waits for the one that caused it."""

UNKILLABLE_S = 5.0
"""A process that SIGKILL has not ended after this is in state D: it is reported and left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One rank.

    Attributes:
        rank: Global rank.
        phase: Where it stands.
        pid: Its process, once there was one.
        alive: A process exists (its function may have returned already).
        due_s: When patience with this worker ends: to start, to stop, or to exit.
        killed: SIGKILL was sent.
    """

    rank: int
    phase: WorkerPhase = "pending"
    pid: int | None = None
    alive: bool = False
    due_s: float | None = None
    killed: bool = False

    @property
    def gone(self) -> bool:
        """Whether no process exists and none is being made."""
        return not self.alive and self.phase != "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """The whole run.

    Attributes:
        policy: What the launch asked for.
        workers: One per rank, in order.
        phase: Where the group stands.
        goal: What it is heading for.
        generation: 0 for the first group, one more for each that replaced it.
        restart_count: Restarts so far, of the group or of single workers.
        restarted_at: When (monotonic) the restarts happened that a failure asked for.
        failures: Of this generation, in the order in which they were seen.
        verdict_due_s: When the failure that looked like a lost peer counts as the cause.
        shares_group: Whether a worker has contacted the group's store.
        story: The last events, oldest first.
    """

    policy: Policy
    workers: tuple[WorkerState, ...] = ()
    phase: GroupPhase = "starting"
    goal: Goal = "succeed"
    generation: int = 0
    restart_count: int = 0
    restarted_at: tuple[float, ...] = ()
    failures: tuple[Failure, ...] = ()
    verdict_due_s: float | None = None
    shares_group: bool = False
    story: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.phase in ("succeeded", "failed", "stopped")

    @property
    def all_gone(self) -> bool:
        """Whether no worker has a process and none is being made."""
        return all(worker.gone for worker in self.workers)

    def with_worker(self, worker: WorkerState) -> GroupState:
        """Return the state with one worker replaced."""
        before, after = self.workers[: worker.rank], self.workers[worker.rank + 1 :]
        return replace(self, workers=(*before, worker, *after))


def next_deadline(state: GroupState) -> float | None:
    """Return when `TimePassed` is due, or None while nothing is waited for."""
    dues = [worker.due_s for worker in state.workers if worker.due_s is not None]
    if state.verdict_due_s is not None:
        dues.append(state.verdict_due_s)
    return min(dues, default=None)

"""The moves that several events share: open a generation, fail, stop everybody, settle."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TypeAlias

from msgspec import structs

from phalanx.lifecycle.state import (
    ABORT_GRACE_S,
    UNKILLABLE_S,
    VERDICT_S,
    Goal,
    GroupState,
    WorkerState,
)
from phalanx.values import commands as do
from phalanx.values import events as ev
from phalanx.values.events import GroupPhase
from phalanx.values.failures import Exited, Failure

Step: TypeAlias = tuple[GroupState, tuple[do.Command, ...]]


def open_generation(state: GroupState, generation: int, now: float) -> Step:
    """Start all ranks of a new generation."""
    due_s = now + state.policy.start_timeout_s
    ranks = range(state.policy.world_size)
    opened = replace(
        state,
        phase="starting",
        goal="succeed",
        generation=generation,
        workers=tuple(WorkerState(rank=rank, due_s=due_s) for rank in ranks),
        failures=(),
        verdict_due_s=None,
        shares_group=False,
    )
    return opened, (
        do.Announce(event=ev.GenerationStarted(generation=generation)),
        do.OpenGeneration(generation=generation),
        *(do.StartWorker(rank=rank) for rank in ranks),
    )


def stop_all(
    state: GroupState,
    now: float,
    *,
    goal: Goal,
    grace_s: float,
    polite: bool,
    signum: int = signal.SIGTERM.value,
) -> Step:
    """Ask everybody to end, and go to `stopping` (or past it, when nobody is left)."""
    workers: list[WorkerState] = []
    orders: list[do.Command] = []
    for worker in state.workers:
        if worker.gone:
            workers.append(worker)
            continue
        if worker.phase == "pending":
            orders.append(do.CancelStart(rank=worker.rank))
        elif worker.phase in ("starting", "running"):
            orders.append(do.StopWorker(rank=worker.rank, polite=polite, signum=signum))
        due_s = worker.due_s if worker.killed else now + grace_s
        workers.append(replace(worker, due_s=due_s))
    stopping = replace(
        state, phase="stopping", goal=goal, workers=tuple(workers), verdict_due_s=None
    )
    return settle(stopping, now, tuple(orders))


def kill_all(state: GroupState, now: float, *, goal: Goal) -> Step:
    """End everybody at once."""
    workers: list[WorkerState] = []
    orders: list[do.Command] = []
    for worker in state.workers:
        if worker.gone:
            workers.append(worker)
            continue
        pending = worker.phase == "pending"
        order = do.CancelStart if pending else do.KillWorker
        orders.append(order(rank=worker.rank))
        workers.append(replace(worker, killed=not pending, due_s=now + UNKILLABLE_S))
    killed = replace(state, phase="stopping", goal=goal, workers=tuple(workers), verdict_due_s=None)
    return settle(killed, now, tuple(orders))


def settle(state: GroupState, now: float, orders: tuple[do.Command, ...] = ()) -> Step:
    """Once every worker is gone, close the generation."""
    if not state.all_gone:
        return state, orders
    if state.verdict_due_s is not None:  # everybody has spoken: no other cause can come
        state, more = abort(state, now)
        return state, (*orders, *more)
    phase: GroupPhase = "restarting" if state.goal == "restart" else "ending"
    return replace(state, phase=phase), (*orders, do.CloseGeneration())


def may_restart(state: GroupState, failure: Failure, now: float) -> bool:
    """Whether the failure allows a restart and the budget has one left."""
    window_s = state.policy.restart_window_s
    recent = [at for at in state.restarted_at if window_s is None or now - at <= window_s]
    return failure.retry and len(recent) < state.policy.max_restarts


def restarts_alone(state: GroupState, failure: Failure, now: float) -> bool:
    """Whether only the fallen rank is to be started again."""
    alone = state.policy.restart == "worker" and not state.shares_group
    return alone and may_restart(state, failure, now)


def abort(state: GroupState, now: float) -> Step:
    """A failure ends the generation: stop the others, then restart or fail."""
    first = next((f for f in state.failures if f.kind == "primary"), state.failures[0])
    hopeless = any(not failure.retry for failure in state.failures)
    restarting = state.policy.restart == "group" and not hopeless and may_restart(state, first, now)
    if restarting:
        state = count_restart(state, now)
    fell = ev.GroupFell(generation=state.generation, failure=first, restarting=restarting)
    after, orders = stop_all(
        state,
        now,
        goal="restart" if restarting else "fail",
        grace_s=min(ABORT_GRACE_S, state.policy.grace_s),
        polite=False,
    )
    return after, (do.Announce(event=fell), do.AnnounceAbort(rank=first.rank), *orders)


def count_restart(state: GroupState, now: float) -> GroupState:
    """Book a restart that a failure asked for."""
    return replace(
        state,
        restart_count=state.restart_count + 1,
        restarted_at=(*state.restarted_at, now),
    )


def fail(state: GroupState, failure: Failure, now: float) -> Step:
    """Take in a failure while the group is up, the failed worker's state being set already."""
    if state.policy.restart == "worker" and state.shares_group and failure.retry:
        failure = _refuse_alone(failure)
    state = replace(state, failures=(*state.failures, failure))
    if restarts_alone(state, failure, now):
        if state.workers[failure.rank].alive:
            return state, ()  # it is on its way out: its exit starts it again
        return restart_alone(state, failure, now)
    if failure.kind == "effect" and not state.all_gone:
        due_s = state.verdict_due_s if state.verdict_due_s is not None else now + VERDICT_S
        return replace(state, verdict_due_s=due_s), ()
    return abort(state, now)


def restart_alone(state: GroupState, failure: Failure, now: float) -> Step:
    """Start one fallen rank again, its peers running on (``restart="worker"``)."""
    due_s = now + state.policy.start_timeout_s
    state = state.with_worker(WorkerState(rank=failure.rank, due_s=due_s))
    others = tuple(known for known in state.failures if known is not failure)
    restarted = ev.WorkerRestarted(rank=failure.rank, failure=failure)
    return count_restart(replace(state, failures=others), now), (
        do.Announce(event=restarted),
        do.StartWorker(rank=failure.rank),
    )


def _refuse_alone(failure: Failure) -> Failure:
    note = (
        'Only this rank could not be started again: restart="worker" is for workers that '
        'share no process group, and these made one. Use restart="group".'
    )
    return structs.replace(failure, message=f"{failure.message}\n{note}", retry=False)


def failure_of_exit(state: GroupState, worker: WorkerState, event: ev.WorkerExited) -> Failure:
    """Make the record of a process that ended without having said why."""
    entered = worker.phase != "starting"
    by_itself = isinstance(event.exit, Exited)
    verb = "left with" if by_itself else "was ended by"
    where = "" if entered else " before it reached the user's code"
    return Failure(
        rank=worker.rank,
        pid=worker.pid,
        generation=state.generation,
        cause=("exit" if by_itself else "signal") if entered else "startup",
        message=f"the process {verb} {event.exit}{where}",
        exit=event.exit,
        log_tail=event.log_tail,
        native_stack=event.native_stack,
        at=event.at,
        # One that leaves by itself would do so again; a signal came from somewhere else.
        retry=entered or not by_itself,
    )


def with_exit(state: GroupState, event: ev.WorkerExited) -> GroupState:
    """Complete the record of a rank that had said why it failed."""
    failures = tuple(
        structs.replace(failure, exit=event.exit, log_tail=event.log_tail)
        if failure.rank == event.rank and failure.exit is None
        else failure
        for failure in state.failures
    )
    return replace(state, failures=failures)

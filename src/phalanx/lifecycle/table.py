"""The table: which event may come in which phase, and what it means there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from msgspec import structs

from phalanx.lifecycle import moves
from phalanx.lifecycle.moves import Step
from phalanx.lifecycle.state import UNKILLABLE_S, GroupState, WorkerPhase, WorkerState
from phalanx.values import commands as do
from phalanx.values import events as ev
from phalanx.values.errors import IllegalTransitionError
from phalanx.values.events import GroupPhase
from phalanx.values.failures import Exited, Failure, Signaled
from phalanx.values.policy import Policy

_STORY_LENGTH = 30


def begin(policy: Policy, now: float) -> Step:
    """Return a new run's first state, and the orders that start its first generation."""
    return moves.open_generation(GroupState(policy=policy), 0, now)


def step(state: GroupState, event: ev.Event, now: float) -> Step:
    """Return the state after `event`, and what to do.

    Args:
        state: The state so far; never modified.
        event: What happened.
        now: The current time on the clock that deadlines are on, in seconds.

    Raises:
        IllegalTransitionError: The table has no place for the event; nothing changed.
    """
    handler = TRANSITIONS.get((state.phase, type(event)))
    if handler is None:
        raise _illegal(state, event)
    after, orders = handler(state, event, now)
    story = (*state.story, _describe(event))[-_STORY_LENGTH:]
    return replace(after, story=story), orders


def table_as_markdown() -> str:
    """Return the table as documentation shows it: a row per event, a column per phase."""
    phases: list[GroupPhase] = []
    events: list[type[Any]] = []
    for phase, event in TRANSITIONS:
        phases += [phase] * (phase not in phases)
        events += [event] * (event not in events)
    lines = [f"| event | {' | '.join(phases)} |", f"| --- |{' --- |' * len(phases)}"]
    for event in events:
        handlers = (TRANSITIONS.get((phase, event)) for phase in phases)
        cells = (
            handler.__name__.strip("_").replace("_", " ") if handler else "–"
            for handler in handlers
        )
        lines.append(f"| `{event.__name__}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _describe(event: ev.Event) -> str:
    rank: int | None = getattr(event, "rank", None)
    name = type(event).__name__
    return name if rank is None else f"{name}({rank})"


def _illegal(state: GroupState, event: ev.Event, detail: str = "") -> IllegalTransitionError:
    return IllegalTransitionError(state.phase, _describe(event), state.story, detail)


def _worker(state: GroupState, event: ev.Event, *phases: WorkerPhase) -> WorkerState:
    """Return the worker that an event is about, checked to be in one of `phases`."""
    rank: int = getattr(event, "rank", -1)
    if not 0 <= rank < len(state.workers):
        raise _illegal(state, event, "no such rank")
    worker = state.workers[rank]
    if worker.phase not in phases:
        raise _illegal(state, event, f"rank {rank} is {worker.phase}")
    return worker


def _living(state: GroupState, event: ev.WorkerExited) -> WorkerState:
    """Return the worker that an exit is about, checked to have had a process."""
    worker = _worker(state, event, "starting", "running", "succeeded", "failed", "stopped")
    if not worker.alive:
        raise _illegal(state, event, "it has no process")
    return worker


def _warn(rank: int, message: str) -> do.Announce:
    return do.Announce(event=ev.Warned(rank=rank, message=message))


# ── a worker starts, enters, returns ─────────────────────────────────────────────────────


def _started(state: GroupState, event: ev.WorkerStarted, now: float) -> Step:
    del now
    worker = _worker(state, event, "pending")
    return state.with_worker(replace(worker, phase="starting", pid=event.pid, alive=True)), ()


def _started_too_late(state: GroupState, event: ev.WorkerStarted, now: float) -> Step:
    worker = _worker(state, event, "pending")
    worker = replace(worker, phase="stopped", pid=event.pid, alive=True, killed=True)
    return state.with_worker(replace(worker, due_s=now + UNKILLABLE_S)), (
        do.KillWorker(rank=event.rank),
    )


def _start_failed(state: GroupState, event: ev.StartFailed, now: float) -> Step:
    worker = _worker(state, event, "pending")
    state = state.with_worker(replace(worker, phase="failed", due_s=None))
    return moves.fail(state, event.failure, now)


def _start_failed_while_stopping(state: GroupState, event: ev.StartFailed, now: float) -> Step:
    worker = _worker(state, event, "pending")
    state = state.with_worker(replace(worker, phase="failed", due_s=None))
    return moves.settle(state, now)


def _start_cancelled(state: GroupState, event: ev.StartCancelled, now: float) -> Step:
    worker = _worker(state, event, "pending")
    return moves.settle(state.with_worker(replace(worker, phase="stopped", due_s=None)), now)


def _entered(state: GroupState, event: ev.WorkerEntered, now: float) -> Step:
    del now
    worker = _worker(state, event, "starting")
    state = state.with_worker(replace(worker, phase="running", due_s=None))
    waiting = any(worker.phase in ("pending", "starting") for worker in state.workers)
    if state.phase == "running" or waiting:
        return state, ()
    ran = ev.GroupRan(generation=state.generation)
    return replace(state, phase="running"), (do.Announce(event=ran),)


def _entered_while_stopping(state: GroupState, event: ev.WorkerEntered, now: float) -> Step:
    del now
    worker = _worker(state, event, "starting", "failed", "stopped")
    if worker.phase == "starting":
        worker = replace(worker, phase="running")
    return state.with_worker(worker), ()


def _returned(state: GroupState, event: ev.WorkerReturned, now: float) -> Step:
    worker = _worker(state, event, "running", "failed")
    if worker.phase == "failed":  # its hang was noticed while it was about to say this
        return state, ()
    due_s = now + state.policy.grace_s
    return state.with_worker(replace(worker, phase="succeeded", due_s=due_s)), ()


def _returned_while_stopping(state: GroupState, event: ev.WorkerReturned, now: float) -> Step:
    del now
    worker = _worker(state, event, "running", "failed", "stopped")
    if worker.phase == "running":
        worker = replace(worker, phase="succeeded")
    return state.with_worker(worker), ()


# ── a worker raises, ends ────────────────────────────────────────────────────────────────


def _raised(state: GroupState, event: ev.WorkerRaised, now: float) -> Step:
    worker = _worker(state, event, "starting", "running", "failed")
    if worker.phase == "failed":  # as above
        return state, ()
    worker = replace(worker, phase="failed", due_s=now + state.policy.grace_s)
    return moves.fail(state.with_worker(worker), event.failure, now)


def _raised_while_stopping(state: GroupState, event: ev.WorkerRaised, now: float) -> Step:
    del now
    worker = _worker(state, event, "starting", "running", "failed", "stopped")
    if worker.phase == "failed":  # there is a record of it already
        return state, ()
    state = state.with_worker(replace(worker, phase="failed"))
    return replace(state, failures=(*state.failures, event.failure)), ()


def _hung(state: GroupState, event: ev.WorkerHung, now: float) -> Step:
    worker = state.workers[event.rank]
    if worker.phase != "running" or worker.pid != event.failure.pid:
        return state, ()  # it has said something while its stack was looked at
    # It may ignore SIGTERM, or be stopped; and there is nothing that it could still save.
    worker = replace(worker, phase="failed", killed=True, due_s=now + UNKILLABLE_S)
    state, orders = moves.fail(state.with_worker(worker), event.failure, now)
    return state, (do.KillWorker(rank=event.rank), *orders)


def _exited(state: GroupState, event: ev.WorkerExited, now: float) -> Step:
    worker = _living(state, event)
    gone = replace(worker, alive=False, due_s=None)
    if worker.phase == "succeeded":
        orders: tuple[do.Command, ...] = ()
        if event.exit != Exited(0) and not worker.killed:
            how = f"rank {event.rank} returned, then its process ended by {event.exit}"
            orders = (_warn(event.rank, how),)
        return moves.settle(state.with_worker(gone), now, orders)
    if worker.phase == "failed":
        state = moves.with_exit(state.with_worker(gone), event)
        own = next(f for f in reversed(state.failures) if f.rank == event.rank)
        if moves.restarts_alone(state, own, now):
            return moves.restart_alone(state, own, now)
        return moves.settle(state, now)
    if worker.phase == "running" and event.exit == Exited(0):
        how = f"rank {event.rank} left with exit code 0 before its function returned"
        warning = () if state.policy.runs_program else (_warn(event.rank, how),)
        state = state.with_worker(replace(gone, phase="succeeded"))
        return moves.settle(state, now, warning)
    failure = moves.failure_of_exit(state, worker, event)
    return moves.fail(state.with_worker(replace(gone, phase="failed")), failure, now)


def _exited_while_stopping(state: GroupState, event: ev.WorkerExited, now: float) -> Step:
    worker = _living(state, event)
    gone = replace(worker, alive=False, due_s=None)
    if worker.phase == "failed":
        state = moves.with_exit(state, event)
    elif worker.phase == "running" and event.exit == Exited(0) and state.policy.runs_program:
        gone = replace(gone, phase="succeeded")
    elif worker.phase in ("starting", "running"):
        gone = replace(gone, phase="stopped")
        with_server = not worker.killed and event.exit == Signaled(9, "SIGKILL")
        bereaved = with_server and any(f.cause == "helper" for f in state.failures)
        who = "ended with its fork server" if bereaved else "stopped by Phalanx"
        record = Failure(
            rank=worker.rank,
            pid=worker.pid,
            generation=state.generation,
            cause="signal",
            kind="stopped",
            message=f"{who} ({event.exit})",
            exit=event.exit,
            log_tail=event.log_tail,
            at=event.at,
        )
        state = replace(state, failures=(*state.failures, record))
    return moves.settle(state.with_worker(gone), now)


# ── wishes ───────────────────────────────────────────────────────────────────────────────


def _stop(state: GroupState, event: ev.StopRequested, now: float) -> Step:
    state, orders = moves.stop_all(
        state, now, goal="stop", grace_s=event.grace_s, polite=True, signum=event.signum
    )
    return state, (do.AnnounceStop(), *orders)


def _stop_instead(state: GroupState, event: ev.StopRequested, now: float) -> Step:
    """A stop takes the place of a restart that is under way; a failure stays one."""
    del event, now
    return (replace(state, goal="stop") if state.goal == "restart" else state), ()


def _end_instead(state: GroupState, event: ev.StopRequested | ev.KillRequested, now: float) -> Step:
    del event, now
    return replace(state, phase="ending", goal="stop"), ()


def _restart(state: GroupState, event: ev.RestartRequested, now: float) -> Step:
    state = replace(state, restart_count=state.restart_count + 1)
    state, orders = moves.stop_all(state, now, goal="restart", grace_s=event.grace_s, polite=True)
    return state, (do.AnnounceStop(), *orders)


def _kill(state: GroupState, event: ev.KillRequested, now: float) -> Step:
    del event
    return moves.kill_all(state, now, goal="fail" if state.goal == "fail" else "stop")


def _ignored(state: GroupState, event: ev.Event, now: float) -> Step:
    """The news or the wish comes too late to matter."""
    del event, now
    return state, ()


# ── the rest ─────────────────────────────────────────────────────────────────────────────


def _contacted(state: GroupState, event: ev.StoreContacted, now: float) -> Step:
    del event, now
    return replace(state, shares_group=True), ()


def _helper_exited(state: GroupState, event: ev.HelperExited, now: float) -> Step:
    """Whatever the workers say of it from now on follows from this."""
    failure = structs.replace(event.failure, generation=state.generation)
    alone = state.policy.restart == "worker" and not state.shares_group
    if alone or all(worker.phase == "succeeded" for worker in state.workers):
        return state, (do.Announce(event=ev.Warned(message=failure.message)),)
    if state.phase == "starting" and isinstance(failure.exit, Exited):
        failure = structs.replace(failure, retry=False)  # by itself: it would do so again
    return moves.abort(replace(state, failures=(*state.failures, failure)), now)


def _closed(state: GroupState, event: ev.GenerationClosed, now: float) -> Step:
    del event
    if state.goal == "restart":
        return moves.open_generation(state, state.generation + 1, now)
    ends: dict[str, ev.EndState] = {"succeed": "succeeded", "fail": "failed", "stop": "stopped"}
    phase = ends[state.goal]
    ended = ev.RunEnded(state=phase, restart_count=state.restart_count)
    return replace(state, phase=phase), (do.Announce(event=ended),)


def _time_passed(state: GroupState, event: ev.TimePassed, now: float) -> Step:
    del event
    orders: tuple[do.Command, ...] = ()
    for worker in state.workers:
        if worker.due_s is None or worker.due_s > now:
            continue
        if state.phase != "stopping" and worker.phase in ("pending", "starting"):
            state, more = _start_timed_out(state, worker, now)
            return state, (*orders, *more)
        state, more = _lose_patience(state, worker, now)
        orders = (*orders, *more)
    if state.verdict_due_s is not None and state.verdict_due_s <= now:
        state, more = moves.abort(state, now)
        return state, (*orders, *more)
    return moves.settle(state, now, orders)


def _start_timed_out(state: GroupState, worker: WorkerState, now: float) -> Step:
    failure = Failure(
        rank=worker.rank,
        pid=worker.pid,
        generation=state.generation,
        cause="startup",
        message=(
            f"it did not reach the user's code within {state.policy.start_timeout_s:g} s; "
            "if its imports take that long, pass a larger start_timeout"
        ),
        retry=False,
    )
    if worker.phase == "starting":  # a pending one is taken back by the abort itself
        state = state.with_worker(replace(worker, phase="failed"))
    return moves.abort(replace(state, failures=(*state.failures, failure)), now)


def _lose_patience(state: GroupState, worker: WorkerState, now: float) -> Step:
    """A worker was due to be gone and is not: kill it; where that was done, leave it."""
    rank = worker.rank
    if worker.phase == "pending":  # its start was neither taken back nor confirmed
        lost = replace(worker, phase="stopped", due_s=None)
        return state.with_worker(lost), (do.AbandonWorker(rank=rank),)
    if worker.killed:
        left = replace(worker, alive=False, due_s=None)
        if left.phase in ("starting", "running"):
            left = replace(left, phase="stopped")
        how = (
            f"rank {rank} (pid {worker.pid}) did not end within {UNKILLABLE_S:g} s of SIGKILL: "
            "it is stuck in the kernel (state D) and was left behind"
        )
        return state.with_worker(left), (do.AbandonWorker(rank=rank), _warn(rank, how))
    orders: tuple[do.Command, ...] = (do.KillWorker(rank=rank),)
    if worker.phase == "succeeded":
        how = (
            f"rank {rank} returned, but its process did not end and was killed "
            "(a thread that is no daemon, or an exit handler, held it)"
        )
        orders = (*orders, _warn(rank, how))
    patient = replace(worker, killed=True, due_s=now + UNKILLABLE_S)
    return state.with_worker(patient), orders


_Handler: TypeAlias = Callable[[GroupState, Any, float], Step]

_UP: dict[type[Any], _Handler] = {
    ev.WorkerStarted: _started,
    ev.WorkerEntered: _entered,
    ev.WorkerReturned: _returned,
    ev.WorkerRaised: _raised,
    ev.WorkerExited: _exited,
    ev.WorkerHung: _hung,
    ev.StartFailed: _start_failed,
    ev.StoreContacted: _contacted,
    ev.HelperExited: _helper_exited,
    ev.TimePassed: _time_passed,
    ev.StopRequested: _stop,
    ev.KillRequested: _kill,
    ev.RestartRequested: _restart,
}
_STOPPING: dict[type[Any], _Handler] = {
    ev.WorkerStarted: _started_too_late,
    ev.WorkerEntered: _entered_while_stopping,
    ev.WorkerReturned: _returned_while_stopping,
    ev.WorkerRaised: _raised_while_stopping,
    ev.WorkerExited: _exited_while_stopping,
    ev.WorkerHung: _ignored,
    ev.StartFailed: _start_failed_while_stopping,
    ev.StartCancelled: _start_cancelled,
    ev.StoreContacted: _ignored,
    ev.HelperExited: _ignored,
    ev.TimePassed: _time_passed,
    ev.StopRequested: _stop_instead,
    ev.KillRequested: _kill,
    ev.RestartRequested: _ignored,
}
_CLOSING: dict[type[Any], _Handler] = {
    ev.GenerationClosed: _closed,
    ev.StoreContacted: _ignored,
    ev.HelperExited: _ignored,
    ev.StopRequested: _ignored,
    ev.KillRequested: _ignored,
    ev.RestartRequested: _ignored,
    ev.TimePassed: _ignored,
}
_ENDED: dict[type[Any], _Handler] = {
    ev.StoreContacted: _ignored,
    ev.HelperExited: _ignored,
    ev.StopRequested: _ignored,
    ev.KillRequested: _ignored,
    ev.RestartRequested: _ignored,
    ev.TimePassed: _ignored,
}
_PHASES: dict[GroupPhase, dict[type[Any], _Handler]] = {
    "starting": _UP,
    "running": _UP,
    "stopping": _STOPPING,
    "restarting": {**_CLOSING, ev.StopRequested: _end_instead, ev.KillRequested: _end_instead},
    "ending": _CLOSING,
    "succeeded": _ENDED,
    "failed": _ENDED,
    "stopped": _ENDED,
}

TRANSITIONS: dict[tuple[GroupPhase, type[Any]], _Handler] = {
    (phase, event): handler
    for phase, handlers in _PHASES.items()
    for event, handler in handlers.items()
}
"""What each event means in each phase. A pair that is not here is a bug."""

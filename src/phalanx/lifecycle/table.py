"""The table: which event may come in which phase, and what it means there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from msgspec import structs

from phalanx.lifecycle import moves, workers
from phalanx.lifecycle.moves import Step
from phalanx.lifecycle.state import GroupState
from phalanx.values import commands as do
from phalanx.values import events as ev
from phalanx.values.events import GroupPhase
from phalanx.values.failures import Exited
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
        raise workers.illegal(state, event)
    after, orders = handler(state, event, now)
    story = (*state.story, workers.describe(event))[-_STORY_LENGTH:]
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
            state, more = workers.start_timed_out(state, worker, now)
            return state, (*orders, *more)
        state, more = workers.lose_patience(state, worker, now)
        orders = (*orders, *more)
    if state.verdict_due_s is not None and state.verdict_due_s <= now:
        state, more = moves.abort(state, now)
        return state, (*orders, *more)
    return moves.settle(state, now, orders)


_Handler: TypeAlias = Callable[[GroupState, Any, float], Step]

_UP: dict[type[Any], _Handler] = {
    ev.WorkerStarted: workers.started,
    ev.WorkerEntered: workers.entered,
    ev.WorkerReturned: workers.returned,
    ev.WorkerRaised: workers.raised,
    ev.WorkerExited: workers.exited,
    ev.WorkerHung: workers.hung,
    ev.StartFailed: workers.start_failed,
    ev.StoreContacted: _contacted,
    ev.HelperExited: _helper_exited,
    ev.TimePassed: _time_passed,
    ev.StopRequested: _stop,
    ev.KillRequested: _kill,
    ev.RestartRequested: _restart,
}
_STOPPING: dict[type[Any], _Handler] = {
    ev.WorkerStarted: workers.started_too_late,
    ev.WorkerEntered: workers.entered_while_stopping,
    ev.WorkerReturned: workers.returned_while_stopping,
    ev.WorkerRaised: workers.raised_while_stopping,
    ev.WorkerExited: workers.exited_while_stopping,
    ev.WorkerHung: _ignored,
    ev.StartFailed: workers.start_failed_while_stopping,
    ev.StartCancelled: workers.start_cancelled,
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

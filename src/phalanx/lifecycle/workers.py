"""What news of a worker means: it starts, enters, returns, raises, ends, or does not end.

Each function takes the state, the event and the time, and returns the step: the rows of the
table (`phalanx.lifecycle.table`) name them.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.lifecycle import moves
from phalanx.lifecycle.moves import Step
from phalanx.lifecycle.state import UNKILLABLE_S, GroupState, WorkerPhase, WorkerState
from phalanx.values import commands as do
from phalanx.values import events as ev
from phalanx.values.errors import IllegalTransitionError
from phalanx.values.failures import Exited, Failure, Signaled


def describe(event: ev.Event) -> str:
    """Name an event and its rank, for the story."""
    rank: int | None = getattr(event, "rank", None)
    name = type(event).__name__
    return name if rank is None else f"{name}({rank})"


def illegal(state: GroupState, event: ev.Event, detail: str = "") -> IllegalTransitionError:
    """Return the error for an event that the table has no place for."""
    return IllegalTransitionError(state.phase, describe(event), state.story, detail)


def _worker(state: GroupState, event: ev.Event, *phases: WorkerPhase) -> WorkerState:
    """Return the worker that an event is about, checked to be in one of `phases`."""
    rank: int = getattr(event, "rank", -1)
    if not 0 <= rank < len(state.workers):
        raise illegal(state, event, "no such rank")
    worker = state.workers[rank]
    if worker.phase not in phases:
        raise illegal(state, event, f"rank {rank} is {worker.phase}")
    return worker


def _living(state: GroupState, event: ev.WorkerExited) -> WorkerState:
    """Return the worker that an exit is about, checked to have had a process."""
    worker = _worker(state, event, "starting", "running", "succeeded", "failed", "stopped")
    if not worker.alive:
        raise illegal(state, event, "it has no process")
    return worker


def _warn(rank: int, message: str) -> do.Announce:
    return do.Announce(event=ev.Warned(rank=rank, message=message))


# ── a worker starts, enters, returns ─────────────────────────────────────────────────────


def started(state: GroupState, event: ev.WorkerStarted, now: float) -> Step:
    """A process exists."""
    del now
    worker = _worker(state, event, "pending")
    return state.with_worker(replace(worker, phase="starting", pid=event.pid, alive=True)), ()


def started_too_late(state: GroupState, event: ev.WorkerStarted, now: float) -> Step:
    """A process exists that is not wanted any more."""
    worker = _worker(state, event, "pending")
    worker = replace(worker, phase="stopped", pid=event.pid, alive=True, killed=True)
    return state.with_worker(replace(worker, due_s=now + UNKILLABLE_S)), (
        do.KillWorker(rank=event.rank),
    )


def start_failed(state: GroupState, event: ev.StartFailed, now: float) -> Step:
    """No process could be made."""
    worker = _worker(state, event, "pending")
    state = state.with_worker(replace(worker, phase="failed", due_s=None))
    return moves.fail(state, event.failure, now)


def start_failed_while_stopping(state: GroupState, event: ev.StartFailed, now: float) -> Step:
    """No process could be made, and none is wanted."""
    worker = _worker(state, event, "pending")
    state = state.with_worker(replace(worker, phase="failed", due_s=None))
    return moves.settle(state, now)


def start_cancelled(state: GroupState, event: ev.StartCancelled, now: float) -> Step:
    """A process was not made, since none is wanted."""
    worker = _worker(state, event, "pending")
    return moves.settle(state.with_worker(replace(worker, phase="stopped", due_s=None)), now)


def entered(state: GroupState, event: ev.WorkerEntered, now: float) -> Step:
    """It has reached the user's code."""
    del now
    worker = _worker(state, event, "starting")
    state = state.with_worker(replace(worker, phase="running", due_s=None))
    waiting = any(worker.phase in ("pending", "starting") for worker in state.workers)
    if state.phase == "running" or waiting:
        return state, ()
    ran = ev.GroupRan(generation=state.generation)
    return replace(state, phase="running"), (do.Announce(event=ran),)


def entered_while_stopping(state: GroupState, event: ev.WorkerEntered, now: float) -> Step:
    """It has reached the user's code, and is to leave it."""
    del now
    worker = _worker(state, event, "starting", "failed", "stopped")
    if worker.phase == "starting":
        worker = replace(worker, phase="running")
    return state.with_worker(worker), ()


def returned(state: GroupState, event: ev.WorkerReturned, now: float) -> Step:
    """Its function has returned."""
    worker = _worker(state, event, "running", "failed")
    if worker.phase == "failed":  # its hang was noticed while it was about to say this
        return state, ()
    due_s = now + state.policy.grace_s
    return state.with_worker(replace(worker, phase="succeeded", due_s=due_s)), ()


def returned_while_stopping(state: GroupState, event: ev.WorkerReturned, now: float) -> Step:
    """Its function has returned before it was ended."""
    del now
    worker = _worker(state, event, "running", "failed", "stopped")
    if worker.phase == "running":
        worker = replace(worker, phase="succeeded")
    return state.with_worker(worker), ()


# ── a worker raises, ends ────────────────────────────────────────────────────────────────


def raised(state: GroupState, event: ev.WorkerRaised, now: float) -> Step:
    """Its function has raised."""
    worker = _worker(state, event, "starting", "running", "failed")
    if worker.phase == "failed":  # as above
        return state, ()
    worker = replace(worker, phase="failed", due_s=now + state.policy.grace_s)
    return moves.fail(state.with_worker(worker), event.failure, now)


def raised_while_stopping(state: GroupState, event: ev.WorkerRaised, now: float) -> Step:
    """Its function has raised while it was asked to end: perhaps the cause."""
    del now
    worker = _worker(state, event, "starting", "running", "failed", "stopped")
    if worker.phase == "failed":  # there is a record of it already
        return state, ()
    state = state.with_worker(replace(worker, phase="failed"))
    return replace(state, failures=(*state.failures, event.failure)), ()


def hung(state: GroupState, event: ev.WorkerHung, now: float) -> Step:
    """It showed no sign of life for too long."""
    worker = state.workers[event.rank]
    if worker.phase != "running" or worker.pid != event.failure.pid:
        return state, ()  # it has said something while its stack was looked at
    # It may ignore SIGTERM, or be stopped; and there is nothing that it could still save.
    worker = replace(worker, phase="failed", killed=True, due_s=now + UNKILLABLE_S)
    state, orders = moves.fail(state.with_worker(worker), event.failure, now)
    return state, (do.KillWorker(rank=event.rank), *orders)


def exited(state: GroupState, event: ev.WorkerExited, now: float) -> Step:
    """Its process has ended."""
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


def exited_while_stopping(state: GroupState, event: ev.WorkerExited, now: float) -> Step:
    """Its process has ended, as it was asked to."""
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


# ── a worker does not get on ─────────────────────────────────────────────────────────────


def start_timed_out(state: GroupState, worker: WorkerState, now: float) -> Step:
    """It took too long to reach the user's code."""
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


def lose_patience(state: GroupState, worker: WorkerState, now: float) -> Step:
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

"""``phalanx events``: what happened in a run, for people."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from phalanx.cli.runs import LineReader, decode_event, find_run
from phalanx.system import paths
from phalanx.values import events as ev

if TYPE_CHECKING:
    import argparse

    from phalanx.values.failures import Failure

POLL_S = 0.1
"""How often a file is looked at that is being followed."""


def events(values: argparse.Namespace) -> int:
    """Print a run's events; return the exit code."""
    run = find_run(values.run, "phalanx events")
    reader = LineReader(run.paths.events)
    at_end = not values.follow
    while True:
        at_end = at_end or not paths.is_live(run.paths)  # what it wrote before, we see below
        while lines := reader.read():
            for line in lines.splitlines():
                text = line.decode() if values.json else _readable(line)
                if text:
                    sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        if at_end:
            return 0
        time.sleep(POLL_S)


def _readable(line: bytes) -> str | None:
    event = decode_event(line)
    if event is None:
        return "?             an event that this version of Phalanx does not know (see --json)"
    text = describe(event)
    return text and f"{clock(event.at)}  {text}"


def clock(at: float) -> str:
    """Return a moment as the local time of day."""
    milliseconds = int(at * 1000) % 1000
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{milliseconds:03}"


def describe(event: ev.Event) -> str | None:
    """Return an event as one line; None: it is of no interest to people."""
    match event:
        case ev.TimePassed():
            return None
        case ev.Warned(message=message, rank=rank):
            where = "" if rank is None else f"rank {rank}: "
            return f"warning: {where}{_one_line(message)}"
        case ev.StopRequested(reason=reason, grace_s=grace_s):
            return f"stop wanted ({reason}), at most {grace_s:g} s"
        case ev.KillRequested(reason=reason):
            return f"kill wanted ({reason})"
        case ev.RestartRequested(grace_s=grace_s):
            return f"restart wanted, at most {grace_s:g} s"
        case _:
            return _describe_rank(event) if hasattr(event, "rank") else _describe_group(event)


def _describe_group(event: ev.Event) -> str:  # noqa: PLR0911 - one arm per event
    match event:
        case ev.RunStarted(run_id=run_id, world_size=size, function=function):
            return f"run {run_id} started: {_one_line(function)}, {_count(size, 'rank')}"
        case ev.RunEnded(state=state, restart_count=count):
            return f"run {state}, {_count(count, 'restart')}"
        case ev.GenerationStarted(generation=generation):
            return f"generation {generation} starts"
        case ev.GroupRan(generation=generation):
            return f"generation {generation}: all ranks run"
        case ev.GroupFell(generation=generation, failure=failure, restarting=restarting):
            then = "restarting" if restarting else "ending"
            return f"generation {generation} fell: {_failure(failure)}; {then}"
        case ev.GenerationClosed(generation=generation):
            return f"generation {generation} is gone"
        case ev.HelperExited(failure=failure):
            return _failure(failure)
        case ev.StoreContacted():
            return "the ranks share a process group"
        case _:
            return type(event).__name__


def _describe_rank(event: ev.Event) -> str:  # noqa: PLR0911 - one arm per event
    match event:
        case ev.WorkerStarted(rank=rank, pid=pid):
            return f"rank {rank} started, pid {pid}"
        case ev.WorkerEntered(rank=rank):
            return f"rank {rank} runs"
        case ev.WorkerReturned(rank=rank):
            return f"rank {rank} returned"
        case ev.WorkerRaised(rank=rank, failure=failure):
            return f"rank {rank} raised {_one_line(failure.headline())}"
        case ev.WorkerExited(rank=rank, exit=exit_):
            return f"rank {rank} ended: {exit_}"
        case ev.WorkerHung(rank=rank, failure=failure):
            return f"rank {rank} hangs: {_one_line(failure.headline())}"
        case ev.WorkerReported(rank=rank, metrics=metrics):
            values = ", ".join(f"{name}={value}" for name, value in metrics.items())
            return f"rank {rank} reports {_one_line(values)}"
        case ev.StartFailed(failure=failure):
            return f"can't start {_failure(failure)}"
        case ev.StartCancelled(rank=rank):
            return f"rank {rank}: start taken back"
        case ev.WorkerRestarted(rank=rank, failure=failure):
            return f"rank {rank} is started again: {_one_line(failure.headline())}"
        case _:
            return type(event).__name__


def _failure(failure: Failure) -> str:
    headline = _one_line(failure.headline())
    return headline if failure.rank < 0 else f"rank {failure.rank} ({headline})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _one_line(text: str) -> str:
    return " ".join(text.split())

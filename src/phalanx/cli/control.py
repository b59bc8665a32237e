"""``phalanx stop``, ``kill`` and ``stacks``: a visitor's wishes at the agent of a run."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

from phalanx.cli.runs import KnownRun, find_run
from phalanx.cli.usage import UsageError
from phalanx.system import paths
from phalanx.system.whereabouts import grouped
from phalanx.values.errors import FrameError
from phalanx.wire.control import Answered, KillRank, ShowStacks, Visit, is_own_user
from phalanx.wire.frames import Channel
from phalanx.wire.messages import KillRun, StopRun

if TYPE_CHECKING:
    import argparse

    from phalanx.wire.control import ControlFile, Wish

_PATIENCE_S = 30.0
"""An agent answers at once, unless its machine is on its knees."""


def stop(values: argparse.Namespace) -> int:
    """Stop a run and wait for its end; return the exit code."""
    run = find_run(values.run, "phalanx stop")
    if not run.lives:
        _say(f"run {run.run_id} has ended already")
        return 0
    wish = StopRun(run_id=run.run_id, grace_s=values.grace, reason="phalanx stop")
    problem = ask(run, wish, "phalanx stop").problem
    paths.wait_until_ended(run.paths)
    _say(problem or f"run {run.run_id}: {run_state(run)}")
    return 0


def kill(values: argparse.Namespace) -> int:
    """End a run or one of its ranks; return the exit code."""
    command = "phalanx kill"
    run = _living_run(values.run, command)
    wish: Wish = KillRun(run_id=run.run_id, reason=command)
    if values.rank is not None:
        wish = KillRank(run_id=run.run_id, rank=values.rank)
    _ask(run, wish, command)
    if values.rank is None:
        paths.wait_until_ended(run.paths)
        _say(f"run {run.run_id}: {run_state(run)}")
    return 0


def stacks(values: argparse.Namespace) -> int:
    """Print where the ranks of a run are; return the exit code."""
    command = "phalanx stacks"
    run = _living_run(values.run, command)
    answer = _ask(run, ShowStacks(run_id=run.run_id, rank=values.rank), command)
    if not answer.stacks:
        raise UsageError(
            f"run {run.run_id} has no process at the moment", command=command, exit_code=1
        )
    sys.stdout.write(f"{grouped(answer.stacks)}\n")
    return 0


def _living_run(text: str | None, command: str) -> KnownRun:
    run = find_run(text, command)
    if not run.lives:
        raise UsageError(f"run {run.run_id} has ended already", command=command, exit_code=1)
    return run


def _ask(run: KnownRun, wish: Wish, command: str) -> Answered:
    """Return the answer; a problem is an error."""
    answer = ask(run, wish, command)
    if answer.problem is not None:
        raise UsageError(answer.problem, command=command, exit_code=1)
    return answer


def run_state(run: KnownRun) -> str:
    """Return how a run ended."""
    return KnownRun(paths=run.paths, lives=paths.is_live(run.paths)).status().state


def ask(run: KnownRun, wish: Wish, command: str) -> Answered:
    """Have the agent carry something out; return its answer.

    Raises:
        UsageError: The agent can't be reached.
    """
    control = run.control
    if control is None:
        if not paths.is_live(run.paths):
            return Answered(problem=f"run {run.run_id} has ended")
        raise UsageError(
            f"run {run.run_id} can't be reached: its directory {run.paths.root} has no "
            "control.json. Stop it with Ctrl-C, or by a SIGTERM to its launcher",
            command=command,
            exit_code=1,
        )
    try:
        return _converse(control, wish)
    except (OSError, FrameError) as error:
        if not paths.is_live(run.paths):
            return Answered(problem=f"run {run.run_id} has ended")
        raise UsageError(
            f"the agent of run {run.run_id} (pid {control.agent_pid}) does not answer: {error}. "
            f"Try again, or send SIGTERM to its launcher (pid {control.launcher_pid})",
            command=command,
            exit_code=1,
        ) from error


def _converse(control: ControlFile, wish: Wish) -> Answered:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_PATIENCE_S)
        sock.connect(f"\0{control.address}")
        if not is_own_user(sock):  # its agent is gone, and somebody else took the name
            raise FrameError("another user listens there")
        channel: Channel[Answered] = Channel(sock, Answered)
        channel.send(Visit())
        channel.send(wish)
        received = channel.receive()
    if received is None:
        raise FrameError("it hung up")
    return received[0]


def _say(text: str) -> None:
    print(f"phalanx: {text}", file=sys.stderr)  # noqa: T201

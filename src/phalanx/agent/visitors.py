"""The agent's side of visitors: where it tells them to come, and what they may ask for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from phalanx.system.paths import RunPaths, write_whole
from phalanx.values.errors import RunDirectoryError
from phalanx.wire.control import CONTROL_MODE, Answered, ControlFile, KillRank, ShowStacks, Visit
from phalanx.wire.messages import KillRun, StopRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.agent.connection import Connection
    from phalanx.agent.run import Run
    from phalanx.wire.control import Request


class Visitors:
    """Connections that may ask for something about any run, and that nothing hangs on."""

    def __init__(self, address: str | bytes, launcher_pid: int, runs: Mapping[str, Run]) -> None:
        """Keep what is needed.

        Args:
            address: Of the agent's socket; one with a name in the file system is of no use,
                for that name is gone.
            launcher_pid: The launcher.
            runs: The agent's living runs.
        """
        is_abstract = isinstance(address, bytes) and address.startswith(b"\0")
        self._address = address[1:].decode() if is_abstract else None  # type: ignore[union-attr]
        self._launcher_pid = launcher_pid
        self._runs = runs
        self._connections: set[Connection[Request]] = set()

    # ── the way in ───────────────────────────────────────────────────────────────────────

    def invite(self, run: Run) -> None:
        """Write a run's ``control.json``."""
        if self._address is None:
            return
        control = ControlFile(
            address=self._address, launcher_pid=self._launcher_pid, agent_pid=os.getpid()
        )
        content = msgspec.json.encode(control) + b"\n"
        try:
            write_whole(_control_path(run), content, CONTROL_MODE)
        except RunDirectoryError as error:
            run.feed_warning(f"{error.strerror}; commands as `phalanx stop` won't reach the run")

    def disinvite(self, run: Run) -> None:
        """Remove it again: the run has ended."""
        with contextlib.suppress(OSError):
            _control_path(run).unlink()

    # ── conversations ────────────────────────────────────────────────────────────────────

    def __contains__(self, connection: object) -> bool:
        return connection in self._connections

    def welcome(self, connection: Connection[Request]) -> None:
        """A connection has said that it is a visitor's."""
        self._connections.add(connection)

    def forget(self, connection: Connection[Request]) -> None:
        """It has ended."""
        self._connections.discard(connection)

    def on_message(
        self,
        connection: Connection[Request],
        message: Request,
        hang_up: Callable[[], None],
    ) -> None:
        """Carry out a wish and answer; who wants what only a launcher may is hung up on."""
        match message:
            case Visit():
                pass
            case StopRun() | KillRun() | KillRank():
                connection.send(Answered(problem=self._carry_out(message)))
            case ShowStacks(run_id=run_id, rank=rank):
                self._show_stacks(connection, run_id, rank)
            case _:
                hang_up()

    def _show_stacks(self, connection: Connection[Request], run_id: str, rank: int | None) -> None:
        """Answer later, if the visitor is still there then."""
        run = self._runs.get(run_id)
        problem = _has_ended(run_id) if run is None else None
        if run is not None and rank is not None:
            problem = run.why_no_process(rank)
        if run is None or problem is not None:
            connection.send(Answered(problem=problem))
            return

        def answer(stacks: dict[int, str]) -> None:
            chosen = stacks if rank is None else {rank: stacks[rank]} if rank in stacks else {}
            connection.send(Answered(stacks=chosen))

        run.ask_for_stacks(answer)

    def _carry_out(self, wish: StopRun | KillRun | KillRank) -> str | None:
        """Return what is in the way; None: nothing."""
        run = self._runs.get(wish.run_id)
        if run is None:
            return _has_ended(wish.run_id)
        match wish:
            case StopRun(grace_s=grace_s, reason=reason):
                run.stop(reason, None if grace_s is None else max(0.0, grace_s))
            case KillRun(reason=reason):
                run.kill(reason)
            case KillRank(rank=rank):
                return run.kill_rank(rank)
        return None


def _has_ended(run_id: str) -> str:
    return f"run {run_id} has ended"


def _control_path(run: Run) -> Path:
    return RunPaths(root=Path(run.spec.run_dir)).control

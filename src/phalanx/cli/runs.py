"""Which runs there are, which of them is meant, and how each of them stands."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from phalanx.cli.usage import UsageError
from phalanx.launcher.progress import Progress
from phalanx.system import paths
from phalanx.values import events as ev
from phalanx.values.spec import LaunchSpec
from phalanx.wire.control import read_control

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.system.paths import RunPaths
    from phalanx.wire.control import ControlFile

_CHUNK = 1 << 20
_SHOWN = 5


class LineReader:
    """Reads a file that grows, by whole lines. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        """Start at the beginning."""
        self._path = path
        self._position = 0

    def read(self, *, to_the_end: bool = False) -> bytes:
        """Return some whole lines that came since; with `to_the_end` the rest after the last."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read(_CHUNK)
                while b"\n" not in data and (more := file.read(_CHUNK)):
                    data += more  # a long line
        except OSError:
            return b""
        lines = data[: data.rfind(b"\n") + 1]
        if to_the_end and not lines:
            lines = data
        self._position += len(lines)
        return lines


class Status(Progress):
    """How a run stands, by its events, and since when.

    Attributes:
        generation: The present one.
        started_at: When it began (seconds since the epoch); None: not yet.
        ended_at: When it ended; None: not yet.
    """

    def __init__(self) -> None:
        """Begin before the first event."""
        super().__init__()
        self.generation = 0
        self.started_at: float | None = None
        self.ended_at: float | None = None

    def follow(self, event: ev.Event) -> None:
        """Take in the next event."""
        super().follow(event)
        match event:
            case ev.RunStarted(at=at):
                self.started_at = at
            case ev.GenerationStarted(generation=generation):
                self.generation = generation
            case ev.RunEnded(at=at):
                self.ended_at = at
            case _:
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """A run that has a directory.

    Attributes:
        paths: Its files.
        lives: Whether an agent worked for it when this was made.
    """

    paths: RunPaths
    lives: bool

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self.paths.root.name

    @property
    def control(self) -> ControlFile | None:
        """Where its agent listens."""
        return read_control(self.paths.control)

    def spec(self) -> LaunchSpec | None:
        """Return what was asked for, unless that can't be read."""
        try:
            return msgspec.json.decode(self.paths.spec.read_bytes(), type=LaunchSpec)
        except (OSError, msgspec.MsgspecError):
            return None

    def status(self) -> Status:
        """Return how it stands. A run that ended without a last word was lost."""
        status, reader = Status(), LineReader(self.paths.events)
        while lines := reader.read():
            for event in decode_events(lines):
                status.follow(event)
        if not self.lives:
            status.pids.clear()
            if status.ended_at is None:
                status.state = "lost"  # type: ignore[assignment]  # no phase: nobody lived to say it
        return status


def decode_events(lines: bytes) -> list[ev.Event]:
    """Return the events of whole lines; what this version does not know is left out."""
    events: list[ev.Event] = []
    for line in lines.splitlines():
        event = decode_event(line)
        if event is not None:
            events.append(event)
    return events


_decoder: msgspec.json.Decoder[ev.Event] = msgspec.json.Decoder(ev.Event)


def decode_event(line: bytes) -> ev.Event | None:
    """Return the event of a line, unless it is of a kind that this version does not know."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


def known_runs() -> list[KnownRun]:
    """Return all runs that are kept, the newest first."""
    found = paths.run_directories()
    return [KnownRun(paths=run, lives=paths.is_live(run)) for run in reversed(found)]


def find_run(text: str | None, command: str) -> KnownRun:
    """Return the run that is meant.

    Args:
        text: Its id or a beginning of it; None: the one that lives.
        command: Who asks, as ``phalanx logs``.

    Raises:
        UsageError: None or several fit.
    """
    runs = known_runs()
    living = [run for run in runs if run.lives]
    if text is None:
        return _the_living_one(living, runs, command)
    fitting = [run for run in runs if run.run_id.startswith(text)] if text else []
    exact = [run for run in fitting if run.run_id == text]
    if len(fitting) > 1 and not exact:
        fitting = [run for run in fitting if run.lives] or fitting
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    if fitting:
        raise UsageError(f"{text!r} may be {_names(fitting)}: add some letters", command=command)
    raise UsageError(_unknown(text, runs), command=command)


def _the_living_one(living: list[KnownRun], runs: list[KnownRun], command: str) -> KnownRun:
    if len(living) == 1:
        return living[0]
    if living:
        raise UsageError(f"which run? There live {_names(living)}", command=command)
    if not runs:
        raise UsageError(f"there is no run (looked in {paths.runs_root()})", command=command)
    raise UsageError(
        f"no run lives; the last one was {runs[0].run_id} (`phalanx ps --all` shows all)",
        command=command,
    )


def _unknown(text: str, runs: list[KnownRun]) -> str:
    near = difflib.get_close_matches(text, [run.run_id for run in runs], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "`phalanx ps --all` shows all runs"
    return f"there is no run {os.fsencode(text).decode(errors='replace')!r}; {hint}"


def _names(runs: list[KnownRun]) -> str:
    names = [run.run_id for run in runs[:_SHOWN]]
    more = f" or {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return f"{', '.join(names)}{more}"

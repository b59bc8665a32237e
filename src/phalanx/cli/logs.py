"""``phalanx logs``: what the workers of a run printed to files."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.agent.lines import with_prefix
from phalanx.cli.events import POLL_S
from phalanx.cli.runs import LineReader, Status, decode_events, find_run
from phalanx.cli.usage import UsageError
from phalanx.system import paths
from phalanx.values.outputs import STREAMS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from phalanx.cli.runs import KnownRun
    from phalanx.values.spec import LaunchSpec

_COMMAND = "phalanx logs"
_HINT = "start the run with --log-dir DIR (in Python: log_dir=…) to have files as well"


def logs(values: argparse.Namespace) -> int:
    """Print a run's logs; return the exit code."""
    run = find_run(values.run, _COMMAND)
    spec = run.spec()
    if spec is None:
        raise UsageError(f"{run.paths.spec} can't be read", command=_COMMAND, exit_code=1)
    wanted = _check_ranks(values.rank, spec)
    shown = [rank for rank in wanted if _files(spec, rank)]
    if len(shown) < len(wanted):
        missing = [rank for rank in wanted if rank not in shown]
        print(f"{_COMMAND}: {console_only(missing)}", file=sys.stderr)  # noqa: T201
    if not shown:
        return 1
    printer = _Printer(run, spec, shown)
    printer.go(values.generation, follow=values.follow)
    return 0


def console_only(ranks: Sequence[int]) -> str:
    """Say that these ranks have no files."""
    names = ", ".join(map(str, ranks))
    which = f"rank {names} printed" if len(ranks) == 1 else f"ranks {names} printed"
    return f"{which} to the console only; {_HINT}"


def _check_ranks(ranks: list[int] | None, spec: LaunchSpec) -> list[int]:
    size = spec.world_size
    for rank in ranks or ():
        if rank >= size:
            raise UsageError(f"there is no rank {rank} among {size}", command=_COMMAND)
    return list(range(size)) if ranks is None else sorted(set(ranks))


def _files(spec: LaunchSpec, rank: int) -> list[str]:
    """Return the streams of a rank that go to files."""
    return [stream for stream in STREAMS if spec.outputs.of(rank, stream).goes_to_file]


class _Printer:
    """Prints the log files of one generation, or of one after another as they come."""

    def __init__(self, run: KnownRun, spec: LaunchSpec, ranks: list[int]) -> None:
        self._run = run
        self._spec = spec
        self._ranks = ranks
        self._folder = run.paths.logs if spec.log_dir is None else Path(spec.log_dir)
        self._events = LineReader(run.paths.events)
        self._status = Status()

    def go(self, generation: int | None, *, follow: bool) -> None:
        """Print one generation, by default the latest; or follow from there on."""
        self._look()
        latest = self._status.generation
        current = latest if generation is None else generation
        if current > latest:
            raise UsageError(
                f"there is no generation {current} yet; the latest is {latest}", command=_COMMAND
            )
        while True:
            is_last = self._print(current, follow=follow, stay=generation is not None)
            if is_last:
                return
            current += 1

    def _look(self) -> None:
        while lines := self._events.read():
            for event in decode_events(lines):
                self._status.follow(event)

    def _print(self, generation: int, *, follow: bool, stay: bool) -> bool:
        """Print a generation to its end; return whether that is all there will be."""
        readers = [
            (self._prefix(rank), LineReader(paths.log_file(self._folder, generation, rank, stream)))
            for rank in self._ranks
            for stream in _files(self._spec, rank)
        ]
        while True:
            ended = not follow or not paths.is_live(self._run.paths)
            self._look()
            is_past = self._status.generation > generation
            for prefix, reader in readers:
                while data := reader.read(to_the_end=ended or is_past):
                    sys.stdout.buffer.write(prefixed(data, prefix))
            sys.stdout.buffer.flush()
            if ended or is_past:
                return stay or not follow or not is_past
            time.sleep(POLL_S)

    def _prefix(self, rank: int) -> bytes:
        return b"" if self._spec.world_size == 1 else f"[rank {rank}] ".encode()


def prefixed(data: bytes, prefix: bytes) -> bytes:
    """Return lines, each with the prefix; the last may lack its end."""
    if not data.endswith(b"\n"):
        data += b"\n"
    return with_prefix(data, prefix)

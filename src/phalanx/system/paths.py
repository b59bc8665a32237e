"""Who owns every file name: the run directory and the names in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.values.errors import RunDirectoryError

KEPT_RUNS = 50
"""How many past runs are kept on disk; older ones are pruned when a run starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """The names of one run's files. Making one touches nothing."""

    root: Path

    @property
    def spec(self) -> Path:
        """What was asked for."""
        return self.root / "spec.json"

    @property
    def events(self) -> Path:
        """What happened, one event a line. The agent holds a lock on it while the run lives."""
        return self.root / "events.jsonl"

    @property
    def control(self) -> Path:
        """Where the run's agent listens to commands; there while the run lives."""
        return self.root / "control.json"

    @property
    def logs(self) -> Path:
        """Output of ranks that go neither to the console nor to a `log_dir`."""
        return self.root / "logs"

    def error_files(self, generation: int) -> Path:
        """Folder of torchelastic's error files of a generation."""
        return self.root / "errors" / str(generation)


def log_file(log_dir: Path, generation: int, rank: int, stream: str) -> Path:
    """Name of one rank's log; `stream` is ``out`` or ``err``."""
    return log_dir / str(generation) / f"rank-{rank}.{stream}"


def filtered_file(log_dir: Path, generation: int, stream: str) -> Path:
    """Name of the file with the lines of all ranks that were asked for by their text."""
    return log_dir / str(generation) / f"filtered.{stream}"


def new_run_id() -> str:
    """Return a name for a run that sorts by time and is not taken."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))
    return f"{moment}-{rest // 1000:05x}{secrets.token_hex(1)}"


def runs_root() -> Path:
    """Folder of all runs: ``$XDG_STATE_HOME/phalanx/runs``, or the platform's own place."""
    import platformdirs  # noqa: PLC0415 - only a launch needs it

    return Path(platformdirs.user_state_dir("phalanx", appauthor=False)) / "runs"


def create_run_directory(run_id: str) -> RunPaths:
    """Make a run's directory, readable by its owner only.

    Raises:
        RunDirectoryError: It can't be made or written.
    """
    root = runs_root() / run_id
    try:
        root.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise _cannot_write("the run directory", root, error) from error
    return RunPaths(root=root)


def write_whole(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file so that it is there wholly or not at all.

    Args:
        path: Its name.
        data: Its content.
        mode: Its permissions; None: the usual ones.

    Raises:
        RunDirectoryError: It can't be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.touch(0o666 if mode is None else mode)
        draft.write_bytes(data)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise _cannot_write("the run directory", path, error) from error


def check_log_dir(log_dir: Path) -> None:
    """Make a log directory and see that files can be made in it.

    Raises:
        RunDirectoryError: It can't be made or written.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        probe = log_dir / f".phalanx-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _cannot_write("log_dir", log_dir, error) from error


def _cannot_write(what: str, path: Path, error: OSError) -> RunDirectoryError:
    remedy = "make it writable, or choose another"
    if what == "the run directory":
        remedy = "make it writable, or set XDG_STATE_HOME to a folder that is"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space there, or point it elsewhere (log_dir=…, XDG_STATE_HOME)"
    reason = error.strerror or str(error)
    return RunDirectoryError(error.errno, f"{what} {path} can't be written: {reason}; {remedy}")


def prune_runs(keep: int = KEPT_RUNS) -> None:
    """Remove the oldest runs beyond `keep`, never one that lives."""
    runs = run_directories()
    for run in runs[: max(0, len(runs) - keep)]:
        if not _may_be_starting(run) and not is_live(run):  # in this order: it may start now
            shutil.rmtree(run.root, ignore_errors=True)


def run_directories() -> list[RunPaths]:
    """Return the runs that are kept, the oldest first."""
    try:
        return [RunPaths(root=root) for root in sorted(runs_root().iterdir()) if root.is_dir()]
    except OSError:
        return []


def is_live(paths: RunPaths) -> bool:
    """Whether an agent works for this run."""
    try:
        with paths.events.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def wait_until_ended(paths: RunPaths) -> None:
    """Wait, however long, until no agent works for this run any more."""
    with contextlib.suppress(FileNotFoundError), paths.events.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def _may_be_starting(paths: RunPaths) -> bool:
    """Whether there is no event log yet, and the directory is young."""
    with contextlib.suppress(OSError):
        return not paths.events.exists() and time.time() - paths.root.stat().st_mtime < 3600
    return False

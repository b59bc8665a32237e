"""The event log of a run on disk: one event a line, in the order in which they happened."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phalanx.values.events import Event


class Recorder:
    """Appends events to ``events.jsonl``, and holds a lock on it while the run lives.

    A disk that is full does not end the run: it is said once, and recording stops.
    """

    def __init__(self, path: Path, on_broken: Callable[[str], None]) -> None:
        """Open the log; `on_broken` gets a sentence when it can't be written any more."""
        self._path = path
        self._on_broken = on_broken
        self._fd: int | None = None
        self._is_broken = False
        draft = path.with_name(f".{path.name}")  # who looks whether the run lives locks, too
        try:
            self._fd = os.open(draft, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(path)
        except OSError as error:
            self._break(error)

    def record(self, event: Event) -> None:
        """Append one event."""
        if self._fd is None or self._is_broken:
            return
        line = msgspec.json.encode(_strip(event)) + b"\n"
        try:
            os.write(self._fd, line)
        except OSError as error:
            self._break(error)

    def close(self) -> None:
        """Let go of the file and its lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _break(self, error: OSError) -> None:
        self._is_broken = True  # the lock is kept: the run lives
        self._on_broken(
            f"the event log {self._path} can't be written ({error.strerror}); the run goes on "
            "without it: free some space, or set XDG_STATE_HOME to a folder that has it"
        )


def _strip(event: Event) -> Event:
    """Leave out pickled exceptions: they are for the launcher alone, no log needs them."""
    failure = getattr(event, "failure", None)
    if failure is None or failure.exception is None:
        return event
    slim = msgspec.structs.replace(failure, exception=None)
    return msgspec.structs.replace(event, failure=slim)

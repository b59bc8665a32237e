"""One line at the bottom of a terminal that says how the run stands.

While there is one, all that goes to the terminal passes here, the workers' output too: it is
written where the line is, and the line is drawn anew below.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TextIO, cast

from phalanx.cli.runs import Status
from phalanx.launcher.console import is_dumb, wants_colour

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.values import events as ev

_TICK_S: Final = 1.0
_ERASE: Final = "\r\x1b[K"
_UP: Final = "\x1b[1A\x1b[K"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_USUAL_WIDTH: Final = 80


class StatusLine:
    """The line, and the terminal above it. Safe to use from any thread."""

    def __init__(self, fd: int, num_ranks: int, *, colour: bool) -> None:
        """Draw nothing yet.

        Args:
            fd: The terminal.
            num_ranks: How many workers the run has.
            colour: Whether it may be dim.
        """
        self._fd = fd
        self._num_ranks = num_ranks
        self._colour = colour
        self._status = Status()
        self._began_s = time.monotonic()
        self._lock = threading.RLock()  # a handler's message may interrupt another of its thread
        self._end = "\n"  # of what was written last
        self._shown: str | None = None  # what stands there
        self._away = False
        self._closed = threading.Event()

    def begin(self) -> None:
        """Draw it, and keep its time up to date."""
        self.write("")
        threading.Thread(target=self._tick, name="phalanx-status", daemon=True).start()

    def close(self) -> None:
        """Remove it for good."""
        with self._lock:
            self._closed.set()
            self._put(self._erase())

    def write(self, text: str) -> None:
        """Write above the line."""
        with self._lock:
            erased = self._erase()
            self._end = text[-1:] or self._end
            self._put(erased + text + self._draw())

    def stay_away(self, away: bool) -> None:  # noqa: FBT001 - a callback
        """Be gone while somebody types."""
        with self._lock:
            self._away = away
            if away:
                self._put(self._erase())
            else:  # who typed has ended the line
                self._end = "\n"
                self.write("")

    def follow(self, event: ev.Event) -> None:
        """Take in the run's next event."""
        with self._lock:
            self._status.follow(event)
            self._redraw()

    def text(self) -> str:
        """Return what it says now."""
        status = self._status
        ranks = f"{len(status.pids)} of {self._num_ranks} ranks"
        running = status.state == "running"
        parts = [f"{ranks} running" if running else f"{status.state}, {ranks} alive"]
        if status.restart_count:
            parts.append(f"{status.restart_count} restart{'s' * (status.restart_count > 1)}")
        minutes, seconds = divmod(int(time.monotonic() - self._began_s), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}")
        return ", ".join(parts)

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_S):
            with self._lock:
                self._redraw()

    def _redraw(self) -> None:
        """Bring it up to date, if it is there: else somebody types in its place."""
        line = self._line()
        if self._shown not in (None, line):
            self._shown = line
            self._put(_ERASE + line)

    def _erase(self) -> str:
        if self._shown is None:
            return ""
        self._shown = None
        return _ERASE + _UP if self._end == "\r" else _ERASE

    def _draw(self) -> str:
        """Return the line, unless the cursor is in the middle of another, as after a prompt."""
        if self._closed.is_set() or self._away or self._end not in ("\n", "\r"):
            return ""
        self._shown = self._line()
        return f"\n{self._shown}" if self._end == "\r" else self._shown  # a bar stays above it

    def _line(self) -> str:
        line = self.text()[: self._width() - 1]
        return f"{_DIM}{line}{_PLAIN}" if self._colour else line

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._fd).columns or _USUAL_WIDTH
        except OSError:
            return _USUAL_WIDTH

    def _put(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # a program before us has left the terminal so
                time.sleep(_TICK_S / 100)
            except OSError:  # it is gone: SIGHUP says the rest
                return


class _TerminalStream:
    """Takes the place of `sys.stdout` or `sys.stderr` while there is a status line."""

    def __init__(self, line: StatusLine, original: TextIO) -> None:
        self._line = line
        self._original = original
        self.encoding = original.encoding

    def write(self, text: str) -> int:
        self._line.write(text)
        return len(text)

    def flush(self) -> None:
        """Nothing waits here."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()


@contextmanager
def status_line(num_ranks: int) -> Iterator[StatusLine | None]:
    """Have a status line inside the block, if there is a terminal for it.

    `sys.stdout` and `sys.stderr`, as far as they are that terminal, lead past the line meanwhile.
    """
    if not _has_terminal():
        yield None
        return
    line = StatusLine(sys.stderr.fileno(), num_ranks, colour=wants_colour())
    originals = sys.stdout, sys.stderr
    if _is_same(sys.stdout, sys.stderr):
        sys.stdout.flush()
        sys.stdout = cast("TextIO", _TerminalStream(line, sys.stdout))
    sys.stderr = cast("TextIO", _TerminalStream(line, sys.stderr))
    try:
        line.begin()
        yield line
    finally:
        line.close()
        sys.stdout, sys.stderr = originals


def _has_terminal() -> bool:
    """Whether standard error is a terminal that obeys, and that we are in front of."""
    if is_dumb() or "JPY_PARENT_PID" in os.environ:  # a notebook's `!` is a terminal of one line
        return False
    try:
        fd = sys.stderr.fileno()
        return os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp()
    except (AttributeError, OSError, ValueError):
        return False


def _is_same(one: TextIO, other: TextIO) -> bool:
    try:
        return os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev != 0
    except (AttributeError, OSError, ValueError):
        return False

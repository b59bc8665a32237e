"""Pumps what workers print from their pipes to the console and to files.

A worker's standard output is line-buffered, so each print is a write. Waking up for each
would cost more than the print itself; so after a read the pump leaves a pipe alone for a few
milliseconds, in which lines gather in the kernel. The first line after a quiet time goes out
at once, and a quiet pipe costs nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from phalanx.agent.lines import MAX_LINE, LinePrefixer

if TYPE_CHECKING:
    import asyncio

    from phalanx.agent.consoles import Sink

_CHUNK: Final = 256 * 1024
_GATHER_S: Final = 0.004
_BAR_QUIET_S: Final = 0.1
_TAIL_BYTES: Final = 8 * 1024
_HIGH_WATER: Final = 1 << 20
_LOW_WATER: Final = 256 * 1024


class StreamPump:
    """One pipe of one worker."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        *,
        prefix: bytes,
        terminal: bool,
        console: Sink | None,
        file: FileSink | None,
        matching: MatchingLines | None = None,
    ) -> None:
        """Take over the reading end of a pipe and start to pump."""
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._console = console
        self._file = file
        self._matching = matching
        self._lines = LinePrefixer(prefix, terminal=terminal)
        self._tail = b""
        self._timer: asyncio.TimerHandle | None = None
        self._bar_timer: asyncio.TimerHandle | None = None
        self._listening = False
        self._at_end = False
        self._closed = False
        self._heard_s: float | None = None
        self._held_up = False
        self._listen()

    def drain(self) -> None:
        """Read, now, all that is in the pipe: its writer has ended."""
        while not self._closed and self._read():
            pass

    def show_begun(self) -> None:
        """Write out a line that was begun, as it is."""
        if self._console is not None:
            self._console.write(self._lines.take_begun())

    def tail(self) -> bytes:
        """Return the last bytes that came."""
        return self._tail

    def heard_s(self) -> float | None:
        """Return when something came last (monotonic); None: never.

        That is now while a console that does not keep up holds its writer up.
        """
        return time.monotonic() if self._held_up else self._heard_s

    def close(self) -> None:
        """Write out a line that was not ended, and let go of the pipe."""
        if self._closed:
            return
        self._closed = True
        self._stop_listening()
        for timer in (self._timer, self._bar_timer):
            if timer is not None:
                timer.cancel()
        os.close(self._fd)
        if self._console is not None:
            self._console.write(self._lines.finish())
        if self._file is not None:
            self._file.close()
        if self._matching is not None:
            self._matching.close()

    # ── the loop's side ──────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        if not self._listening and not self._closed:
            self._listening = True
            self._held_up = False
            self._loop.add_reader(self._fd, self._on_readable)

    def _stop_listening(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._fd)

    def _on_readable(self) -> None:
        num_bytes = self._read()
        if not num_bytes:
            if self._at_end:
                self._stop_listening()
            return
        console = self._console
        behind = console is not None and console.pending > _HIGH_WATER
        if num_bytes == _CHUNK and not behind:
            return  # there is more: it has gathered already
        self._stop_listening()
        if console is not None and behind:
            self._held_up = True
            console.when_below(_LOW_WATER, self._listen)
        else:
            self._timer = self._loop.call_later(_GATHER_S, self._listen)

    def _read(self) -> int:
        """Read once; return how many bytes came (0: nothing now, or never again)."""
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self._at_end = True
            return 0
        self._heard_s = time.monotonic()
        if self._file is not None:
            self._file.write(data)
        if self._matching is not None:
            self._matching.feed(data)
        if self._console is not None:
            self._console.write(self._lines.feed(data))
            self._watch_bar()
        self._tail = (
            data[-_TAIL_BYTES:]
            if len(data) >= _TAIL_BYTES
            else ((self._tail + data)[-_TAIL_BYTES:])
        )
        return len(data)

    def _watch_bar(self) -> None:
        """A progress bar's last state is not followed by anything: show it after a moment."""
        if self._bar_timer is not None:
            self._bar_timer.cancel()
            self._bar_timer = None
        if self._lines.has_bar:
            self._bar_timer = self._loop.call_later(_BAR_QUIET_S, self._show_bar)

    def _show_bar(self) -> None:
        self._bar_timer = None
        if self._console is not None:
            self._console.write(self._lines.take_bar())


class FileSink:
    """Appends raw bytes to a file, until that fails."""

    def __init__(self, fd: int, path: str, on_broken: Callable[[str, OSError], None]) -> None:
        """Take over a descriptor that appends; `on_broken` gets the path and what is wrong."""
        self._fd: int | None = fd
        self._path = path
        self._on_broken = on_broken

    def write(self, data: bytes) -> None:
        """Append; drops everything after a failure."""
        view = memoryview(data)
        while self._fd is not None and view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                self.close()
                self._on_broken(self._path, error)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class MatchingLines:
    """Copies the lines of one stream that contain a text to a file that all ranks share."""

    def __init__(self, file: FileSink, texts: Sequence[str], prefix: str) -> None:
        """Take over the file, which appends; each line gets the prefix."""
        self._file = file
        self._texts = [text.encode() for text in texts]
        self._prefix = prefix.encode()
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take bytes in; whole lines are copied, with one write for all of them."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        self._file.write(b"".join(self._copy(line) for line in lines))

    def close(self) -> None:
        """Copy a line that was not ended, and let go of the file."""
        if self._rest:
            self._file.write(self._copy(self._rest))
        self._file.close()

    def _copy(self, line: bytes) -> bytes:
        found = any(text in line for text in self._texts)
        return self._prefix + line + b"\n" if found else b""

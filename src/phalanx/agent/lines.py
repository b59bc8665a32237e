r"""Cuts a stream of bytes into whole units and prefixes them. Pure: no IO.

A unit ends in ``\n``, or in ``\r``, as progress bars do. The usual case, a chunk without
``\r``, is one `bytes.replace`, so its cost does not depend on the number of lines.
"""

from __future__ import annotations

from typing import Final

MAX_LINE: Final = 1 << 20
"""A line longer than this is cut, so that memory stays bounded."""

_ERASE_TO_END: Final = b"\x1b[K"


def with_prefix(lines: bytes, prefix: bytes) -> bytes:
    """Return whole lines, each with the prefix. The last may be the state of a bar."""
    if not prefix:
        return lines
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + lines[-1:]


class LinePrefixer:
    """One stream's state: the unit that has begun and not ended."""

    def __init__(self, prefix: bytes, *, terminal: bool = False) -> None:
        """Put `prefix` before each unit; on a terminal, bars are erased as they are redrawn."""
        self._prefix = prefix
        self._terminal = terminal
        self._rest = b""
        self._shown_bar = False
        self._bar = b""

    @property
    def has_bar(self) -> bool:
        """Whether what has begun is the next state of a progress bar."""
        return self._shown_bar and bool(self._rest)

    def feed(self, data: bytes) -> bytes:
        """Take bytes in; return the units that are whole now."""
        if self._shown_bar or b"\r" in data or b"\r" in self._rest[-1:]:
            return self._feed_with_bars(data)
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            return self._cut_long()
        whole = self._rest + data[:end] if self._rest else data[:end]
        self._rest = data[end:]
        return with_prefix(whole, self._prefix)

    def take_bar(self) -> bytes:
        """Return the bar's state as far as it came, as if it had ended."""
        bar, self._rest = self._rest, b""
        self._bar = bar or self._bar
        return self._unit(bar, b"\r") if bar else b""

    def take_begun(self) -> bytes:
        """Return what has begun, without an end."""
        rest, self._rest = self._rest, b""
        return self._unit(rest, b"") if rest else b""

    def finish(self) -> bytes:
        """Return what has begun; nothing more will come."""
        rest, self._rest = self._rest, b""
        return self._unit(rest.rstrip(b"\r"), b"\n") if rest else b""

    def _feed_with_bars(self, data: bytes) -> bytes:
        text = (self._rest + data).replace(b"\r\n", b"\n")
        out: list[bytes] = []
        start = 0
        for position in _ends(text):
            end = text[position : position + 1]
            if end == b"\r" and position == len(text) - 1:
                break  # it may be the first half of \r\n
            unit = text[start:position]
            if not unit and end == b"\n" and self._shown_bar and self._terminal:
                unit = self._bar  # its last state stays, though others have drawn over it
            if unit or end == b"\n":
                out.append(self._unit(unit, end))
            self._shown_bar, self._bar = end == b"\r", unit
            start = position + 1
        self._rest = text[start:]
        return b"".join(out) + self._cut_long()

    def _unit(self, text: bytes, end: bytes) -> bytes:
        erase = _ERASE_TO_END if self._terminal and (end == b"\r" or self._shown_bar) else b""
        return self._prefix + text + erase + end

    def _cut_long(self) -> bytes:
        if len(self._rest) <= MAX_LINE:
            return b""
        out: list[bytes] = []
        while len(self._rest) > MAX_LINE:
            out.append(self._unit(self._rest[:MAX_LINE], b"\n"))
            self._rest = self._rest[MAX_LINE:]
        return b"".join(out)


def _ends(text: bytes) -> list[int]:
    """Return the positions of all unit ends."""
    ends: list[int] = []
    position = -1
    while True:
        newline, bar = text.find(b"\n", position + 1), text.find(b"\r", position + 1)
        if newline < 0 and bar < 0:
            return ends
        position = min(found for found in (newline, bar) if found >= 0)
        ends.append(position)

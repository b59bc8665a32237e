"""Where the workers' output goes: wherever this process' `sys.stdout` and `sys.stderr` go.

A stream that is plainly a file descriptor (a terminal, a pipe, a file) is handed to the
agent, which writes to it directly. Any other object (a notebook cell, a captured test) gets
the text here, and the agent is told how much was taken, so that nothing piles up.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import IO, TYPE_CHECKING, Any, Literal

from phalanx.wire.messages import ConsoleSpec, ConsoleTaken

if TYPE_CHECKING:
    from collections.abc import Callable

Stream = Literal["out", "err"]


def descriptor_of(stream: Any) -> int | None:  # noqa: ANN401 - sys.stdout may be anything
    """Return the descriptor behind a text stream, or None when writing there needs Python.

    A `fileno()` alone proves nothing: a notebook's stream has one, and it leads to the
    terminal that the server was started in.
    """
    if not isinstance(stream, io.TextIOWrapper) or stream.closed:
        return None
    raw: Any = stream.buffer
    raw = getattr(raw, "raw", raw)
    try:
        return raw.fileno() if isinstance(raw, io.FileIO) else None
    except (OSError, ValueError):
        return None


class Console:
    """This process' two streams, as they were when the run was started."""

    def __init__(self, run_id: str, send: Callable[[ConsoleTaken], None]) -> None:
        """Take the streams; `send` tells the agent what was taken."""
        self._run_id = run_id
        self._send = send
        self._streams: dict[Stream, Any] = {"out": sys.stdout, "err": sys.stderr}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"out": decoder("replace"), "err": decoder("replace")}

    def describe(self) -> tuple[ConsoleSpec, list[int]]:
        """Return what the agent must know, and duplicates of the descriptors for it."""
        fds: dict[Stream, int] = {}
        for name, stream in self._streams.items():
            _flush(stream)  # what was printed before the launch comes before what follows it
            fd = descriptor_of(stream)
            if fd is not None:
                fds[name] = os.dup(fd)
        out, err = fds.get("out"), fds.get("err")
        spec = ConsoleSpec(
            out="relay" if out is None else "descriptor",
            err="relay" if err is None else "descriptor",
            out_is_terminal=_is_terminal(self._streams["out"]),
            err_is_terminal=_is_terminal(self._streams["err"]),
            colour=wants_colour(),
        )
        return spec, [fd for fd in (out, err) if fd is not None]

    def write(self, stream: Stream, data: bytes) -> None:
        """Write output of the workers to the stream object, and say that it was taken."""
        text = self._decoders[stream].decode(data)
        try:
            self._streams[stream].write(text)
            self._streams[stream].flush()
        except (AttributeError, OSError, ValueError):  # closed, replaced, or None
            fallback: IO[str] | None = sys.__stdout__ if stream == "out" else sys.__stderr__
            self._streams[stream] = fallback
        self._send(ConsoleTaken(run_id=self._run_id, stream=stream, num_bytes=len(data)))


def _flush(stream: Any) -> None:  # noqa: ANN401 - see above
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return


def _is_terminal(stream: Any) -> bool:  # noqa: ANN401 - see above
    """Whether it is a terminal that obeys."""
    try:
        return bool(stream.isatty()) and not is_dumb()
    except (AttributeError, OSError, ValueError):
        return False


def is_dumb() -> bool:
    """Whether the terminal, if there is one, knows no control sequences."""
    return os.environ.get("TERM") == "dumb"


def wants_colour() -> bool:
    """https://no-color.org, and terminals that can't."""
    return not os.environ.get("NO_COLOR") and not is_dumb()

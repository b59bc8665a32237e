"""Standard input that is a terminal: one rank at a time reads, and others are quiet meanwhile.

A worker prints into a pipe, so Python would neither show a prompt at once nor edit the line. So
whoever reads asks the agent for its turn, has the terminal itself as standard output while it
reads, and says when it is done.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.values.spec import WorkerSpec
    from phalanx.worker.link import AgentLink

_input = builtins.input


class _Typed(io.TextIOWrapper):
    """`sys.stdin`, which waits for its turn before it reads."""

    turns: _Turns

    def readline(self, *size: int | None) -> str:  # type: ignore[override]
        with self.turns.turn():
            return super().readline(*size)  # type: ignore[arg-type]

    def read(self, *size: int | None) -> str:
        with self.turns.turn():
            return super().read(*size)


class _Turns:
    def __init__(self, link: AgentLink, worker: WorkerSpec) -> None:
        self._link = link
        self._prefix = f"[rank {worker.rank}] " if worker.world_size > 1 else ""
        self._owner_pid = os.getpid()
        self._lock = threading.RLock()
        self._depth = 0
        raw = io.FileIO(0, closefd=False)
        usual = sys.stdin
        self.stdin = _Typed(io.BufferedReader(raw), encoding=usual.encoding, errors=usual.errors)
        self.stdin.turns = self

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Be the one that reads, inside the block."""
        if os.getpid() != self._owner_pid:  # a fork of the worker can't ask
            yield
            return
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    _flush()
                    self._link.ask_turn()
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._link.end_turn()

    def input(self, prompt: object = "", /) -> str:
        """Read a line as `input` does at a terminal."""
        if os.getpid() != self._owner_pid or not _is_terminal(sys.stdin):
            return _input(prompt)
        theirs = sys.stdin
        with self.turn(), _terminal_as_output():
            sys.stdin = self.stdin  # some debuggers open the terminal anew, without editing
            try:
                return _input(f"{self._prefix}{prompt}")
            finally:
                sys.stdin = theirs


def read_from_terminal(link: AgentLink, worker: WorkerSpec) -> None:
    """Have `input` and `sys.stdin` wait for their turn, if standard input is a terminal."""
    if sys.stdin is None or not os.isatty(0):
        return
    turns = _Turns(link, worker)
    sys.stdin = sys.__stdin__ = turns.stdin  # type: ignore[misc]
    builtins.input = turns.input


def _is_terminal(stream: Any) -> bool:  # noqa: ANN401 - sys.stdin may be anything
    """Whether a stream is the terminal that is standard input."""
    try:
        return bool(os.fstat(stream.fileno()).st_rdev == os.fstat(0).st_rdev)
    except (AttributeError, OSError, ValueError):
        return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


@contextlib.contextmanager
def _terminal_as_output() -> Iterator[None]:
    """Readline writes to descriptor 1, and Python without readline a prompt to 2."""
    saved = [os.dup(fd) for fd in (1, 2)]
    terminal = os.open("/dev/fd/0", os.O_RDWR | os.O_NOCTTY)
    try:
        for fd in (1, 2):
            os.dup2(terminal, fd)
        yield
    finally:
        _flush()
        for fd, old in zip((1, 2), saved, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(terminal)

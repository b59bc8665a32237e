"""Destinations of console output: descriptors that the launcher passed, or the launcher.

None of them ever blocks the agent's loop. What a destination does not take in time waits
here, `pending` says how much, and whoever feeds it pauses; so a slow console slows the
workers' prints, and memory does not grow.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from phalanx.system import kernel

if TYPE_CHECKING:
    import asyncio

_SAFE_WRITE = select.PIPE_BUF
_MAX_TAKE = 1 << 20


class Sink(Protocol):
    """A destination of console output."""

    @property
    def pending(self) -> int:
        """Bytes that wait."""

    def write(self, data: bytes) -> None:
        """Take output (whole units only); never blocks."""

    def when_below(self, num_bytes: int, then: Callable[[], None]) -> None:
        """Call back once, when at most so many bytes wait (at once if that is so now)."""

    def give_up(self) -> None:
        """Drop what waits."""


class _Waiters:
    """Those who wait for a sink to drain."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def add(self, pending: int, num_bytes: int, then: Callable[[], None]) -> None:
        if pending <= num_bytes:
            then()
        else:
            self._waiting.append((num_bytes, then))

    def check(self, pending: int) -> None:
        if not self._waiting:
            return
        ready = [then for limit, then in self._waiting if pending <= limit]
        self._waiting = [(limit, then) for limit, then in self._waiting if pending > limit]
        for then in ready:
            then()


class DescriptorSink:
    """Writes to a descriptor that the launcher passed: its own standard output or error.

    O_NONBLOCK belongs to the open file, which the launcher shares, so it must not be set
    there. A pipe or a terminal is opened anew through ``/proc``, which gives a description
    of our own; where that fails, writes of at most PIPE_BUF bytes after a poll don't block
    either. A regular file never blocks, and its offset must stay shared.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fd: int, on_broken: Callable[[OSError], None]
    ) -> None:
        """Take over a descriptor; `on_broken` is told why it can't be written any more."""
        self._loop = loop
        self._on_broken = on_broken
        self._queue: deque[memoryview] = deque()
        self._waiters = _Waiters()
        self._broken = False
        self._waiting = False
        self._held = False
        self.pending = 0
        self._fd, self._write_some = _open_without_blocking(fd)

    def write(self, data: bytes) -> None:
        """Take output."""
        if self._broken or not data:
            return
        self._queue.append(memoryview(data))
        self.pending += len(data)
        if not self._waiting and not self._held:
            self._flush()

    def when_below(self, num_bytes: int, then: Callable[[], None]) -> None:
        """See `Sink`."""
        self._waiters.add(self.pending, num_bytes, then)

    def hold(self) -> None:
        """Keep what comes until `go_on`."""
        self._held = True

    def go_on(self) -> None:
        """Write what was kept."""
        self._held = False
        if not self._waiting and not self._broken:
            self._flush()

    def give_up(self) -> None:
        """See `Sink`."""
        self._forget()

    def close(self) -> None:
        """Let go of the descriptor."""
        self._forget()
        os.close(self._fd)

    def _flush(self) -> None:
        while self._queue:
            data = self._queue[0]
            try:
                written = self._write_some(self._fd, data)
            except BlockingIOError:
                if not self._waiting:
                    self._waiting = True
                    self._loop.add_writer(self._fd, self._flush)
                return
            except OSError as error:
                self._break(error)
                return
            self.pending -= written
            if written == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = data[written:]
            self._waiters.check(self.pending)
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._fd)

    def _break(self, error: OSError) -> None:
        self._broken = True
        self._forget()
        self._on_broken(error)

    def _forget(self) -> None:
        self._queue.clear()
        self.pending = 0
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._fd)
        self._waiters.check(0)


def _open_without_blocking(fd: int) -> tuple[int, Callable[[int, memoryview], int]]:
    """Return a descriptor and a way to write to it that raises BlockingIOError instead."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd, os.write
    if stat.S_ISSOCK(mode):
        return fd, _send_some
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return fd, _write_a_little
    os.close(fd)
    if stat.S_ISFIFO(mode):
        kernel.widen_pipe(own)  # fewer, larger writes, and fewer switches to the reader
    return own, os.write


def _send_some(fd: int, data: memoryview) -> int:
    sock = socket.socket(fileno=fd)
    try:
        return sock.send(data, socket.MSG_DONTWAIT)
    finally:
        sock.detach()


def _write_a_little(fd: int, data: memoryview) -> int:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(fd, data[:_SAFE_WRITE])


class RelaySink:
    """Sends output to the launcher, which writes it to a Python object and acknowledges."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        """Use `send` for chunks."""
        self._send = send
        self._waiters = _Waiters()
        self._held: list[bytes] | None = None
        self.pending = 0

    def write(self, data: bytes) -> None:
        """Take output."""
        self.pending += len(data)
        if self._held is not None:
            self._held.append(data)
        else:
            self._pass_on(data)

    def hold(self) -> None:
        """Keep what comes until `go_on`."""
        self._held = [] if self._held is None else self._held

    def go_on(self) -> None:
        """Send what was kept."""
        held, self._held = self._held or [], None
        for data in held:
            self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        for start in range(0, len(data), _MAX_TAKE):
            self._send(data[start : start + _MAX_TAKE])

    def taken(self, num_bytes: int) -> None:
        """The launcher has written this much."""
        self.pending = max(0, self.pending - num_bytes)
        self._waiters.check(self.pending)

    def when_below(self, num_bytes: int, then: Callable[[], None]) -> None:
        """See `Sink`."""
        self._waiters.add(self.pending, num_bytes, then)

    def give_up(self) -> None:
        """See `Sink`."""
        self.pending = 0
        self._waiters.check(0)


class Consoles:
    """The descriptor sinks of an agent: one for each open file, however often it is passed.

    Standard output and error of a launcher, and of several runs, are often one terminal or
    pipe: two writers there would tear each other's lines apart when it is full.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Know none yet."""
        self._loop = loop
        self._sinks: dict[tuple[int, int], tuple[DescriptorSink, int]] = {}

    def borrow(self, fd: int, on_broken: Callable[[OSError], None]) -> DescriptorSink:
        """Return the sink for a descriptor, which is owned from here on."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        if key in self._sinks:
            sink, users = self._sinks[key]
            os.close(fd)
        else:
            sink, users = DescriptorSink(self._loop, fd, on_broken), 0
        self._sinks[key] = (sink, users + 1)
        return sink

    def give_back(self, sink: DescriptorSink) -> None:
        """The run needs it no more; the last one closes it."""
        for key, (known, users) in list(self._sinks.items()):
            if known is sink and users > 1:
                self._sinks[key] = (sink, users - 1)
            elif known is sink:
                del self._sinks[key]
                with contextlib.suppress(OSError):
                    sink.close()

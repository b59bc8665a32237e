"""A conversation on the agent's event loop.

asyncio's transports drop passed descriptors, so this uses readiness callbacks and
recvmsg/sendmsg itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from phalanx.values.errors import FrameError
from phalanx.wire.frames import FrameReader, encode, receive_some, send_some

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    import msgspec

M = TypeVar("M")


class Connection(Generic[M]):
    """Sends and receives messages without ever blocking the loop. Owns its socket.

    What the other end does not take in time waits in memory: whoever sends much looks at
    `pending` first.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        incoming: Any,  # noqa: ANN401 - a union of Struct types
        *,
        on_message: Callable[[M, list[int]], None],
        on_close: Callable[[FrameError | None], None],
    ) -> None:
        """Start to listen.

        Args:
            loop: The agent's loop.
            sock: A connected stream socket.
            incoming: Union of the messages to expect.
            on_message: Gets each message, and its descriptors to own.
            on_close: Called once when the other end is gone or talks nonsense; not called
                by `close`.
        """
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._reader: FrameReader[M] = FrameReader(incoming)
        self._on_message = on_message
        self._on_close = on_close
        self._outbox: deque[tuple[memoryview, list[int]]] = deque()
        self.pending = 0
        self.closed = False
        loop.add_reader(sock, self._on_readable)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message; its descriptors are owned from here on. Silent when closed."""
        if self.closed:
            _close_all(fds)
            return
        frame = memoryview(encode(message, len(fds)))
        self._outbox.append((frame, list(fds)))
        self.pending += len(frame)
        if len(self._outbox) == 1:
            self._flush()

    def drain(self) -> None:
        """Take in, now, all that the other end had sent (it may be dead already)."""
        while not self.closed and self._receive():
            pass

    def close(self) -> None:
        """Close the socket; what was not sent is lost."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._reader.close()
        for _, fds in self._outbox:
            _close_all(fds)
        self._outbox.clear()
        self.pending = 0

    def _on_readable(self) -> None:
        self._receive()

    def _receive(self) -> bool:
        """Receive once; False when there was nothing, or nothing more will come."""
        try:
            data, fds = receive_some(self._sock)
        except BlockingIOError:
            return False
        except OSError:
            data, fds = b"", []
        if not data:
            self._lose(None)
            return False
        self._reader.feed(data, fds)
        try:
            for message, own_fds in self._reader.messages():
                self._on_message(message, own_fds)
                if self.closed:
                    return False
        except FrameError as error:
            self._lose(error)
            return False
        return True

    def _lose(self, error: FrameError | None) -> None:
        self.close()
        self._on_close(error)

    def _flush(self) -> None:
        while self._outbox:
            frame, fds = self._outbox[0]
            try:
                sent = send_some(self._sock, frame, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError:  # the reader sees the end, once it has read what came before it
                self._outbox.popleft()
                self.pending -= len(frame)
                _close_all(fds)
                continue
            _close_all(fds)
            self.pending -= sent
            if sent == len(frame):
                self._outbox.popleft()
            else:
                self._outbox[0] = (frame[sent:], [])
        self._loop.remove_writer(self._sock)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)

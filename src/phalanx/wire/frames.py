"""Frames: messages over a byte stream, with file descriptors beside them.

A frame is a header (body length, number of descriptors: two little-endian unsigned 32-bit
integers) and a msgpack body. Nothing is interpreted before a whole frame is there, and
nothing is ever unpickled here.

Descriptors (SCM_RIGHTS) travel with the first byte of their frame. The kernel never merges
the data of two sends that carry descriptors, and hands descriptors out in order, so a queue
of received descriptors and the counts in the headers are enough to match them up.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from phalanx.values.errors import FrameError

_HEADER = struct.Struct("<II")
MAX_FRAME = 64 * 1024 * 1024
"""Largest body, in bytes. What is larger travels in a file whose descriptor is passed."""
MAX_FDS = 16
"""Most descriptors with one frame."""
INLINE_LIMIT = 64 * 1024
"""Values up to this many bytes travel in the message, larger ones in a file."""

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct, num_fds: int = 0) -> bytes:
    """Return the frame of a message."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise FrameError(
            f"{type(message).__name__} has {len(body):,} bytes; at most {MAX_FRAME:,} travel in "
            "one message"
        )
    return _HEADER.pack(len(body), num_fds) + body


class FrameReader(Generic[M]):
    """Turns received bytes and descriptors into messages; does no IO itself.

    It owns the descriptors that were received and not handed out yet: `close` them.
    """

    def __init__(self, message_type: Any) -> None:  # noqa: ANN401 - a union of Struct types
        """Expect messages of this union."""
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Take in what one receive brought."""
        self._buffer += data
        self._fds.extend(fds)

    def messages(self) -> Iterator[tuple[M, list[int]]]:
        """Yield each complete message with its descriptors, which are the caller's from then.

        Raises:
            FrameError: The bytes are no frame of this conversation. The connection is of no
                use any more.
        """
        while len(self._buffer) >= _HEADER.size:
            length, num_fds = _HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME or num_fds > MAX_FDS:
                raise FrameError(f"a frame of {length:,} bytes with {num_fds} descriptors")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            if len(self._fds) < num_fds:
                raise FrameError(f"{num_fds} descriptors announced, {len(self._fds)} received")
            with memoryview(self._buffer) as view:
                body = bytes(view[_HEADER.size : end])
            del self._buffer[:end]
            try:
                message = self._decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise FrameError(f"not a message of this conversation: {error}") from error
            yield message, [self._fds.popleft() for _ in range(num_fds)]

    def close(self) -> None:
        """Close descriptors that nobody took."""
        while self._fds:
            os.close(self._fds.popleft())


def send_some(sock: socket.socket, data: bytes | memoryview, fds: Sequence[int]) -> int:
    """Send the start of a frame, with its descriptors; return how many bytes went out."""
    if not fds:
        return sock.send(data)
    rights = array.array("i", fds)
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive_some(sock: socket.socket, size: int = 65_536) -> tuple[bytes, list[int]]:
    """Receive what there is; empty bytes mean the other end is gone.

    A larger `size` costs even where little comes: malloc maps and unmaps such a buffer.
    """
    space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(size, space, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


class Channel(Generic[M]):
    """A blocking conversation over a stream socket, which it owns.

    One thread may receive and another send; sends from several threads need a lock.
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:  # noqa: ANN401 - a union
        """Take over a connected socket; `incoming` is the union of messages to expect."""
        self.sock = sock
        self._reader: FrameReader[M] = FrameReader(incoming)
        self._ready: deque[tuple[M, list[int]]] = deque()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message; blocks until the kernel has taken all of it.

        Raises:
            OSError: The other end is gone.
        """
        frame = memoryview(encode(message, len(fds)))
        sent = send_some(self.sock, frame, fds)
        if sent < len(frame):
            self.sock.sendall(frame[sent:])

    def receive(self) -> tuple[M, list[int]] | None:
        """Return the next message with its descriptors, or None when the other end is gone.

        Blocks. The descriptors are the caller's.

        Raises:
            FrameError: What came is no frame of this conversation.
        """
        while not self._ready:
            try:
                data, fds = receive_some(self.sock)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._reader.feed(data, fds)
            self._ready.extend(self._reader.messages())
        return self._ready.popleft()

    def has_more(self) -> bool:
        """Whether a message is there already that `receive` would return at once."""
        return bool(self._ready)

    def close(self) -> None:
        """Close the socket and what was received and not taken."""
        for _, fds in self._ready:
            for fd in fds:
                os.close(fd)
        self._ready.clear()
        self._reader.close()
        with contextlib.suppress(OSError):
            self.sock.close()

"""One line to the store: a question, then its answer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from phalanx.tensors.store.messages import (
    Commit,
    Done,
    GiveBack,
    Put,
    Refused,
    Reserve,
    Reserved,
    StoreReply,
    StoreRequest,
)
from phalanx.values.errors import (
    FrameError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreTimeoutError,
)
from phalanx.wire import frames

if TYPE_CHECKING:
    import socket

_ERRORS: dict[str, type[StoreError]] = {
    "full": StoreFullError,
    "timeout": StoreTimeoutError,
    "misuse": StoreError,
}


class Conversation:
    """A socket to the store. For one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        """Own the socket."""
        self._channel: frames.Channel[StoreReply] = frames.Channel(sock, StoreReply)
        self._ahead: tuple[int, Reserved, int] | None = None

    def reserve(self, num_bytes: int, mapped: tuple[int, ...]) -> tuple[Reserved, int]:
        """Return a segment to write into, and its descriptor, which is the caller's."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            size, reserved, fd = ahead
            if size == num_bytes:
                return reserved, fd
            os.close(fd)
            self.ask(GiveBack(segment=reserved.segment))
        answer, fds = self.ask(Reserve(num_bytes=num_bytes, mapped=mapped))
        assert isinstance(answer, Reserved)  # noqa: S101 - what the server answers
        return answer, fds[0]

    def put(self, request: Put | Commit) -> None:
        """Put a value; keep the segment that the server hands out for the next one."""
        answer, fds = self.ask(request)
        if isinstance(answer, Done) and answer.another is not None:
            self._ahead = (request.num_bytes, answer.another, fds[0])

    def ask(self, request: StoreRequest) -> tuple[StoreReply, list[int]]:
        """Return the answer and its descriptors, which are the caller's.

        Raises:
            StoreError: It was refused: why, and what to do.
        """
        try:
            self._channel.send(request)
            answer = self._channel.receive()
        except (OSError, FrameError):
            answer = None
        if answer is None:
            raise StoreClosedError(
                "the tensor store is gone: the context was closed, or the agent has ended"
            )
        if isinstance(answer[0], Refused):
            raise _ERRORS[answer[0].why](answer[0].message)
        return answer

    def close(self) -> None:
        """Hang up; whatever was held is let go."""
        self._channel.close()
        if self._ahead is not None:
            os.close(self._ahead[2])
            self._ahead = None

"""A run's tensor store as the agent keeps it: the table, and the sockets of its clients."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.agent.connection import Connection
from phalanx.system import kernel
from phalanx.tensors.store.messages import StoreReply, StoreRequest
from phalanx.tensors.store.server import TensorStore

if TYPE_CHECKING:
    from collections.abc import Sequence

_DEFAULT_PART = 2
"""Without a limit given, the store may have this part of the memory there is (1/2)."""


class RunTensors:
    """Outlives its run: the launcher reads results until it closes the context."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        world_size: int,
        limit: int | None,
        who_is_alive: Callable[[], str],
    ) -> None:
        """Begin empty; `limit` is in bytes, None: half of the memory there is."""
        self._loop = loop
        self._clients: set[_Client] = set()
        self.store = TensorStore(
            world_size,
            kernel.memory_limit() // _DEFAULT_PART if limit is None else limit,
            loop.call_later,
            who_is_alive,
        )

    def connect(self, fd: int, name: str, pid: int) -> None:
        """Converse with a client over this end of its socket."""
        sock = socket.socket(fileno=fd)
        self._clients.add(_Client(self._loop, sock, self.store, name, pid, self._clients.discard))

    def close(self) -> None:
        """Hang up on everybody, and let go of the memory."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.store.close()


class _Client:
    """One conversation with the store."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        store: TensorStore,
        name: str,
        pid: int,
        on_gone: Callable[[_Client], None],
    ) -> None:
        self.name = name
        self.process: object = (name, pid)
        self._store = store
        self._on_gone = on_gone
        self._connection: Connection[StoreRequest] = Connection(
            loop,
            sock,
            StoreRequest,
            on_message=self._on_request,
            on_close=lambda _: self._on_close(),
        )

    def reply(self, reply: StoreReply, fds: Sequence[int] = ()) -> None:
        """See `StoreClient`."""
        self._connection.send(reply, fds)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _on_request(self, request: StoreRequest, fds: list[int]) -> None:
        for fd in fds:  # no request brings any
            os.close(fd)
        self._store.handle(self, request)

    def _on_close(self) -> None:
        self._store.forget(self)
        self._on_gone(self)

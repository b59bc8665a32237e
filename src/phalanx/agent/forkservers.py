"""The agent's fork servers: started, kept warm, replaced, ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.agent.forkserver import BEREAVED_POLL_S, ForkServer
from phalanx.agent.spawn import spawn_fork_server
from phalanx.system import kernel
from phalanx.wire.messages import (
    ForkServerKey,
)
from phalanx.worker.forkserver.orphans import Orphanage

if TYPE_CHECKING:
    import asyncio

    from phalanx.values.spec import ProcessImage

_REAP_POLL_S = 0.05
_GOODBYE_S = 3.0

HEAVY_PRELOAD = ("torch._dynamo", "torch.optim")
"""What the first optimizer of a process imports (1 s): a successor gets it in the background."""


@dataclass(slots=True)
class ForkServers:
    """All fork servers of an agent, by what they can serve."""

    loop: asyncio.AbstractEventLoop
    _servers: dict[ForkServerKey, ForkServer] = field(default_factory=dict)
    _retired: list[ForkServer] = field(default_factory=list)
    _succeeded: set[ForkServerKey] = field(default_factory=set)
    _tickets: itertools.count[int] = field(default_factory=itertools.count)
    _orphanage: Orphanage = field(default_factory=Orphanage)

    def new_ticket(self) -> int:
        """Return a number for a process that no other has."""
        return next(self._tickets)

    def take_over(self, key: ForkServerKey, pid: int, sock: socket.socket) -> None:
        """Register a server that was started early."""
        self._register(key, pid, sock)

    def get(self, key: ForkServerKey, image: ProcessImage) -> ForkServer:
        """Return the server for a key, started if there is none."""
        server = self._servers.get(key)
        if server is not None:
            return server
        pid, sock = spawn_fork_server(
            key.executable, key.flags, key.preload, image.path_of_preload, image.environment
        )
        return self._register(key, pid, sock)

    def improve(self, key: ForkServerKey) -> None:
        """Have the server replaced, in the background, by one that has imported more.

        `torch._dynamo` takes a second to import, during which a server could neither fork
        nor report. So a fork of the server does that, and takes its place when it is done.
        """
        server = self._servers.get(key)
        if server is None or not server.ready or server.unfit or key in self._succeeded:
            return
        if "torch" not in key.preload:
            return
        self._succeeded.add(key)
        ours, theirs = socket.socketpair()
        server.make_successor(HEAVY_PRELOAD, theirs)
        successor = ForkServer(self.loop, None, ours, self._on_gone)
        self._retired.append(successor)  # it serves nobody yet
        successor.when_ready(lambda: self._succeed(key, successor))

    def _succeed(self, key: ForkServerKey, successor: ForkServer) -> None:
        self._retired.remove(successor)
        if successor.unfit:
            successor.close()
            return
        old = self._servers.get(key)
        self._servers[key] = successor
        if old is not None:
            self._retired.append(old)
        self.close_retired()

    def close_retired(self) -> None:
        """Let servers go that were replaced and whose last process has ended."""
        for server in [server for server in self._retired if server.ready and server.idle]:
            self._retired.remove(server)
            server.close()
            self._reap_soon(server.pid)

    def _reap_soon(self, pid: int | None) -> None:
        """Collect a server that was let go; a successor's is its predecessor's to collect."""
        with contextlib.suppress(ChildProcessError):
            if pid is not None and kernel.peek_exit(pid) is None:
                self.loop.call_later(_REAP_POLL_S, self._reap_soon, pid)
            elif pid is not None:
                kernel.reap(pid)

    def sweep_bereaved(self, tag: str) -> bool:
        """Kill what came to the agent itself because a fork server died; True when clean."""
        servers = (*self._servers.values(), *self._retired)
        known = {server.pid for server in servers if server.pid is not None}
        return not self._orphanage.kill(tag, known, ())

    def note_worker(self, pid: int, tag: str) -> None:
        """Remember whose session a pid leads, for `sweep_bereaved`."""
        self._orphanage.note_worker(pid, tag)

    def end(self) -> None:
        """End all servers, and see that nothing of theirs stays. Blocks, for a bounded time.

        A server that serves sweeps up after its workers when its socket closes; one that is
        still importing has made nothing, and is killed.
        """
        servers = (*self._servers.values(), *self._retired)
        importing = {server.pid for server in servers if not server.ready}
        serving = {server.pid for server in servers if server.ready}
        for server in servers:
            server.close()
        until_s = time.monotonic() + _GOODBYE_S
        while mine := kernel.child_pids():
            patient = time.monotonic() < until_s
            for pid in mine:  # servers, and what came here because one of them died
                if pid in importing or pid not in serving or not patient:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    if kernel.peek_exit(pid) is not None:
                        kernel.reap(pid)
            if time.monotonic() > until_s + 1.0:
                return
            time.sleep(BEREAVED_POLL_S)

    def _register(self, key: ForkServerKey, pid: int, sock: socket.socket) -> ForkServer:
        server = ForkServer(self.loop, pid, sock, self._on_gone)
        self._servers[key] = server
        return server

    def _on_gone(self, server: ForkServer) -> None:
        for key, known in list(self._servers.items()):
            if known is server:
                del self._servers[key]
                self._succeeded.discard(key)
        if server in self._retired:
            self._retired.remove(server)

"""The server's loop: orders come in, processes are made, watched and reported.

Everything happens in one thread, in the order in which it comes. `serve` returns in two
kinds of process: in the server, when the agent is gone, with None; in a child that was just
forked, with the job that the child is to do, so that the job runs on a clean stack.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.system import kernel
from phalanx.wire.forking import (
    ChildExited,
    ChildFailed,
    ChildMade,
    ForkServerOrder,
    ForkServerReport,
    MakeStoreHost,
    MakeSuccessor,
    MakeWorker,
    SignalChild,
    Swept,
)
from phalanx.wire.frames import Channel
from phalanx.worker.forkserver.orphans import Orphanage

if TYPE_CHECKING:
    from collections.abc import Sequence

_SWEEP_PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a forked child is to be, and the descriptors that came with it."""

    order: MakeWorker | MakeStoreHost | MakeSuccessor
    fds: list[int]
    server_pid: int
    agent_pidfd: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    ticket: int
    pid: int
    pidfd: int | None
    tag: str


class ForkServer:
    """Makes and watches processes for one agent."""

    def __init__(self, channel: Channel[ForkServerOrder], agent_pidfd: int | None) -> None:
        """Serve the agent at the other end of `channel`, which is owned from now on."""
        self._channel = channel
        self._agent_pidfd = agent_pidfd
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._successors: set[int] = set()
        self._orphanage = Orphanage()
        self._sweeps: dict[str, float] = {}
        self._in_child = False

    def serve(self) -> Job | None:
        """Work until the agent is gone (None), or be a new child with a job."""
        self._selector.register(self._channel.sock, selectors.EVENT_READ, "agent")
        if self._agent_pidfd is not None:
            self._selector.register(self._agent_pidfd, selectors.EVENT_READ, "agent-pidfd")
        if not kernel.HAS_PIDFD:
            self._watch_sigchld()
        while True:
            # One order a turn, so that a child's end is never kept waiting by many forks.
            waiting = self._channel.has_more()
            keys = {key.data for key, _ in self._selector.select(self._timeout_s(waiting))}
            for pid in [key for key in keys if isinstance(key, int)]:
                self._look_at(self._children[pid])
            if "wakeup" in keys:
                self._drain_wakeups()
            self._go_on_sweeping()
            if "agent-pidfd" in keys:
                break
            if waiting or "agent" in keys:
                received = self._channel.receive()
                if received is None:
                    break
                job = self._obey(*received)
                if job is not None:
                    return job
        self._end_everything()
        return None

    def _timeout_s(self, waiting: bool) -> float | None:  # noqa: FBT001 - private
        if waiting:
            return 0.0
        return 0.002 if self._sweeps else None  # nothing tells when an orphan is gone

    # ── orders ───────────────────────────────────────────────────────────────────────────

    def _obey(self, order: ForkServerOrder, fds: list[int]) -> Job | None:
        if isinstance(order, MakeWorker | MakeStoreHost | MakeSuccessor):
            try:
                return self._fork(order, fds)
            finally:
                if not self._in_child:
                    for fd in fds:
                        os.close(fd)
        if isinstance(order, SignalChild):
            for child in self._children.values():
                if child.ticket == order.ticket:
                    os.kill(child.pid, order.signum)
        else:
            self._sweeps[order.tag] = time.monotonic() + _SWEEP_PATIENCE_S
            self._go_on_sweeping()
        return None

    def _fork(
        self, order: MakeWorker | MakeStoreHost | MakeSuccessor, fds: list[int]
    ) -> Job | None:
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            if not isinstance(order, MakeSuccessor):
                message = f"fork failed: {error.strerror}"
                self._tell(ChildFailed(ticket=order.ticket, message=message))
            return None
        if pid == 0:
            self._in_child = True
            self._selector.close()
            return Job(order=order, fds=fds, server_pid=server_pid, agent_pidfd=self._agent_pidfd)
        if isinstance(order, MakeSuccessor):
            self._successors.add(pid)
            return None
        self._adopt(order, pid)
        return None

    def _adopt(self, order: MakeWorker | MakeStoreHost, pid: int) -> None:
        tag = order.worker.tag if isinstance(order, MakeWorker) else order.tag
        pidfd = kernel.open_pidfd(pid)
        self._children[pid] = _Child(ticket=order.ticket, pid=pid, pidfd=pidfd, tag=tag)
        self._orphanage.note_worker(pid, tag)
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, pid)
        made = ChildMade(ticket=order.ticket, pid=pid)
        self._tell(made, [] if pidfd is None else [pidfd])

    def _tell(self, report: ForkServerReport, fds: Sequence[int] = ()) -> None:
        with suppress(OSError):  # if the agent is gone, the next turn of the loop sees it
            self._channel.send(report, fds)

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def _look_at(self, child: _Child) -> None:
        """Report a child that ended: first see to what it left, then tell, then reap."""
        exit_ = kernel.peek_exit(child.pid)
        if exit_ is None:
            return
        del self._children[child.pid]
        if child.pidfd is not None:
            self._selector.unregister(child.pidfd)
            os.close(child.pidfd)
        self._kill_orphans(child.tag, also_known=child.pid)
        self._tell(ChildExited(ticket=child.ticket, exit=exit_))
        kernel.reap(child.pid)

    def _kill_orphans(self, tag: str, also_known: int | None = None) -> list[int]:
        known = {*self._children, *self._successors}
        if also_known is not None:
            known.add(also_known)
        living = [child.tag for child in self._children.values()]
        return self._orphanage.kill(tag, known, living)

    def _go_on_sweeping(self) -> None:
        for tag, until in list(self._sweeps.items()):
            left = self._kill_orphans(tag)
            if not left or time.monotonic() > until:
                del self._sweeps[tag]
                self._orphanage.forget(tag)
                self._tell(Swept(tag=tag, left=len(left)))

    def _end_everything(self) -> None:
        """The agent is gone: nothing of what was made here may stay."""
        until = time.monotonic() + _SWEEP_PATIENCE_S
        while time.monotonic() < until:
            mine = set(kernel.child_pids() or self._children) - self._successors
            if not mine:
                return
            for pid in mine:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    if kernel.peek_exit(pid) is not None:
                        kernel.reap(pid)
                        self._children.pop(pid, None)
            time.sleep(0.002)

    # ── without pidfds ───────────────────────────────────────────────────────────────────

    def _watch_sigchld(self) -> None:
        """Have SIGCHLD wake the selector (the handler itself does nothing)."""
        self._wakeup, writer = socket.socketpair()
        for sock in (self._wakeup, writer):
            sock.setblocking(False)
        self._wakeup_writer = writer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, "wakeup")

    def _drain_wakeups(self) -> None:
        with suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        for child in list(self._children.values()):
            self._look_at(child)

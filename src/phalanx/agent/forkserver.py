"""One fork server, as the agent sees it: asked for processes, heard, survived."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from phalanx.agent.connection import Connection
from phalanx.agent.records import record_of_helper
from phalanx.system import kernel
from phalanx.system.whereabouts import STOPPED
from phalanx.values.failures import Exit, Failure, Signaled
from phalanx.wire.forking import (
    ChildExited,
    ChildFailed,
    ChildMade,
    ForkServerReport,
    MakeStoreHost,
    MakeSuccessor,
    MakeWorker,
    PreloadFailed,
    ServerReady,
    ServerStarted,
    SignalChild,
    Sweep,
    Swept,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from phalanx.values.errors import FrameError

_BEREAVED_PATIENCE_S = 1.0
BEREAVED_POLL_S = 0.002
_ANSWER_POLL_S = 1.0
_ANSWER_S = 10.0
"""A fork server that owes an answer for so long is given up; one that is stopped, at once."""


class ProcessOwner(Protocol):
    """Whoever asked for a process hears what becomes of it."""

    def on_made(self, pid: int, pidfd: int | None) -> None:
        """The process exists; the pidfd is the owner's."""

    def on_not_made(self, failure: NotMade) -> None:
        """There is no process, and there will be none."""

    def on_exited(self, exit_: Exit) -> None:
        """The process ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMade:
    """Why a process could not be made."""

    message: str
    type_name: str | None = None
    traceback: str | None = None


@dataclass(slots=True)
class _Process:
    owner: ProcessOwner
    pid: int | None = None


MakeOrder: TypeAlias = MakeWorker | MakeStoreHost


class ForkServer:
    """One fork server, as the agent sees it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pid: int | None,
        sock: socket.socket,
        on_gone: Callable[[ForkServer], None],
    ) -> None:
        """Talk to a server that was just started (pid None: forked by another server)."""
        self._loop = loop
        self.pid = pid
        self._on_gone = on_gone
        self._connection: Connection[ForkServerReport] = Connection(
            loop, sock, ForkServerReport, on_message=self._on_report, on_close=self._on_close
        )
        self.ready = False
        self.gone = False
        self.unfit: str | None = None
        self._failed: NotMade | None = None
        self._waiting: dict[int, tuple[MakeOrder, list[int]]] = {}
        self._processes: dict[int, _Process] = {}
        self._sweeps: dict[str, list[Callable[[], None]]] = {}
        self._when_ready: list[Callable[[], None]] = []
        self._dependents: list[Callable[[Failure], None]] = []
        self._how_it_ended = ""

    @property
    def idle(self) -> bool:
        """Whether no process of it is alive or being made, and nothing is being swept."""
        return not self._processes and not self._waiting and not self._sweeps

    def make(self, order: MakeOrder, fds: Sequence[int], owner: ProcessOwner) -> None:
        """Have a process made; the descriptors are owned from here on.

        While the server is still importing the order waits here, where it can be cancelled.
        """
        if self.gone or self._failed is not None:
            _close_all(fds)
            failure = self._failed or NotMade(message="the fork server ended")
            self._loop.call_soon(owner.on_not_made, failure)
            return
        self._processes[order.ticket] = _Process(owner)
        self._waiting[order.ticket] = (order, list(fds))
        if self.ready:
            self._send_waiting()

    def cancel(self, ticket: int) -> bool:
        """Take an order back; False when it was sent already."""
        if ticket not in self._waiting:
            return False
        _, fds = self._waiting.pop(ticket)
        _close_all(fds)
        del self._processes[ticket]
        return True

    def signal(self, ticket: int, signum: int) -> None:
        """Signal a process through its parent (where there are no pidfds)."""
        self._connection.send(SignalChild(ticket=ticket, signum=signum))

    def sweep(self, tag: str, then: Callable[[], None]) -> None:
        """Kill what the workers with this tag prefix left behind, then call back."""
        if self.gone:
            self._loop.call_soon(then)
            return
        self._sweeps.setdefault(tag, []).append(then)
        self._connection.send(Sweep(tag=tag))
        self.insist(lambda: tag in self._sweeps)

    def make_successor(self, preload: Sequence[str], sock: socket.socket) -> None:
        """Have it fork a server that imports more; `sock` is that one's end, owned from now."""
        self._connection.send(MakeSuccessor(preload=tuple(preload)), [sock.detach()])

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call back once the preload is done."""
        if self.ready:
            then()
        else:
            self._when_ready.append(then)

    def when_lost(self, then: Callable[[Failure], None]) -> None:
        """Call back if it ends, nobody having asked it to, before its processes' ends are told."""
        self._dependents.append(then)

    def insist(self, owes: Callable[[], bool]) -> None:
        """Give the server up if it does not answer: all that it has made ends with it.

        Args:
            owes: Whether there is still no answer.
        """
        self._loop.call_later(_ANSWER_POLL_S, self._ask_again, owes, self._loop.time() + _ANSWER_S)

    def _ask_again(self, owes: Callable[[], bool], until_s: float) -> None:
        if self.gone or not owes():
            return
        stopped = self.pid is not None and kernel.process_state(self.pid) == STOPPED
        if stopped or self._loop.time() > until_s:
            what = "was stopped (SIGSTOP)" if stopped else f"did not answer for {_ANSWER_S:g} s"
            self._kill(f"{what}, so nothing was heard of the workers any more, and was killed")
        else:
            self._loop.call_later(_ANSWER_POLL_S, self._ask_again, owes, until_s)

    def spare(self, then: Callable[[Failure], None]) -> None:
        """Its end is of no interest to these any more."""
        if then in self._dependents:
            self._dependents.remove(then)

    def close(self) -> None:
        """Let it end: it does when its socket closes."""
        self._connection.close()
        self.gone = True

    # ── what it says ─────────────────────────────────────────────────────────────────────

    def _on_report(self, report: ForkServerReport, fds: list[int]) -> None:
        if isinstance(report, ServerStarted):
            self.pid = report.pid
        elif isinstance(report, ServerReady):
            self.ready, self.unfit = True, report.unfit
            self._send_waiting()
            for then in self._when_ready:
                then()
            self._when_ready.clear()
        elif isinstance(report, PreloadFailed):
            self._fail(
                NotMade(
                    message=(
                        f"preloading {report.module!r} failed: {report.type_name}: "
                        f"{report.message}; correct preload=…, or leave the module out of it"
                    ),
                    traceback=report.traceback,
                )
            )
        elif isinstance(report, Swept):
            for then in self._sweeps.pop(report.tag, ()):
                then()
        else:
            self._on_child_report(report, fds)

    def _on_child_report(
        self, report: ChildMade | ChildFailed | ChildExited, fds: list[int]
    ) -> None:
        process = self._processes[report.ticket]
        if isinstance(report, ChildMade):
            process.pid = report.pid
            if fds:
                self._watch(report.ticket, os.dup(fds[0]))
            process.owner.on_made(report.pid, fds[0] if fds else None)
            return
        del self._processes[report.ticket]
        if isinstance(report, ChildFailed):
            process.owner.on_not_made(NotMade(message=report.message))
        else:
            process.owner.on_exited(report.exit)

    def _watch(self, ticket: int, pidfd: int) -> None:
        """When a process ends, see that the server says so."""

        def on_end() -> None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            self.insist(lambda: ticket in self._processes)

        self._loop.add_reader(pidfd, on_end)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for order, fds in waiting.values():
            fresh = self.unfit is not None
            if fresh and not order.fresh_interpreter:
                order = msgspec.structs.replace(order, fresh_interpreter=True)  # noqa: PLW2901
            self._connection.send(order, fds)

    def _fail(self, failure: NotMade) -> None:
        """It will make nothing more: tell all who wait."""
        self._failed = failure
        for _, fds in self._waiting.values():
            _close_all(fds)
        self._waiting.clear()
        unmade = [(t, p) for t, p in self._processes.items() if p.pid is None]
        for ticket, process in unmade:
            del self._processes[ticket]
            process.owner.on_not_made(failure)

    # ── its end ──────────────────────────────────────────────────────────────────────────

    def _on_close(self, error: FrameError | None) -> None:
        self.gone = True
        self._on_gone(self)
        if error is not None:
            self._kill(f"wrote what is no message ({error}) and was killed")
        self._learn_end(self._loop.time() + _BEREAVED_PATIENCE_S)

    def _kill(self, why: str) -> None:
        self._how_it_ended = why
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # our own child, not reaped yet

    def _learn_end(self, until_s: float) -> None:
        """Learn how it ended, a moment after its socket closed, and tell who depends on it."""
        exit_: Exit | None = None
        pid = self.pid
        if pid is not None:
            waits = self._loop.time() < until_s
            try:
                exit_ = kernel.peek_exit(pid)
            except ChildProcessError:  # a successor, whose parent lives: only that one is told
                waits = waits and kernel.process_state(pid) not in ("", "Z")
            if exit_ is None and waits:
                self._loop.call_later(BEREAVED_POLL_S, self._learn_end, until_s)
                return
        if self._failed is None:
            record = record_of_helper("The fork server", pid, exit_, how=self._how_it_ended)
            for then in tuple(self._dependents):
                then(record)
            self._fail(NotMade(message=record.message))
        self._bury(self._loop.time() + _BEREAVED_PATIENCE_S)

    def _bury(self, until_s: float) -> None:
        """Reap it and its children.

        They die with it (PR_SET_PDEATHSIG) and have become this process' own, as it is the
        next subreaper. Nothing tells when, so this is one of the few places that poll.
        """
        late = self._loop.time() > until_s
        for ticket, process in list(self._processes.items()):
            exit_: Exit | None = None
            with contextlib.suppress(ChildProcessError):  # not inherited yet
                exit_ = kernel.peek_exit(process.pid or 0)
            if exit_ is None and not late:
                continue
            del self._processes[ticket]
            if exit_ is not None and process.pid is not None:
                kernel.reap(process.pid)
            process.owner.on_exited(exit_ or Signaled(signal.SIGKILL, "SIGKILL"))
        if self.pid is not None:
            kernel.reap(self.pid)
        if self._processes:
            self._loop.call_later(BEREAVED_POLL_S, self._bury, until_s)
            return
        for callbacks in self._sweeps.values():
            for then in callbacks:
                then()
        self._sweeps.clear()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)

"""One worker's process, as the agent holds it: its socket, its streams, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from phalanx.agent.connection import Connection
from phalanx.system import kernel
from phalanx.system.whereabouts import QUESTION
from phalanx.wire.forking import MakeWorker
from phalanx.wire.messages import InputLine, WorkerMessage

if TYPE_CHECKING:
    import asyncio

    from phalanx.agent.forkserver import ForkServer, NotMade
    from phalanx.system.page import ControlPage
    from phalanx.values.errors import FrameError
    from phalanx.values.failures import Exit
    from phalanx.values.spec import ProcessImage, WorkerSpec

_MAX_NATIVE_STACK = 64 * 1024
_FATAL = "Fatal Python error"
"""How faulthandler begins when a signal ends the process; before it there may be answers."""


class WorkerOwner(Protocol):
    """Hears what a worker does."""

    def on_worker_made(self, worker: WorkerProcess) -> None:
        """The process exists."""

    def on_worker_not_made(self, worker: WorkerProcess, failure: NotMade) -> None:
        """There is no process, and there will be none."""

    def on_worker_message(
        self, worker: WorkerProcess, message: WorkerMessage, fds: list[int]
    ) -> None:
        """The worker said something; the descriptors are the owner's."""

    def on_worker_exited(self, worker: WorkerProcess, exit_: Exit) -> None:
        """The process ended, and everything that it had said was heard before."""


class WorkerProcess:
    """Asks a fork server for a worker and follows it to its end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        server: ForkServer,
        spec: WorkerSpec,
        owner: WorkerOwner,
        ticket: int,
    ) -> None:
        """Keep what is needed; `start` makes the process."""
        self._loop = loop
        self._server = server
        self._owner = owner
        self._ticket = ticket
        self._pidfd: int | None = None
        self._native_fd: int | None = None
        self._connection: Connection[WorkerMessage] | None = None
        self._abandoned = False
        self._early: list[tuple[WorkerMessage, list[int]]] = []
        self.spec = spec
        self.rank = spec.rank
        self.pid: int | None = None
        self.has_failed = False

    def start(
        self,
        image: ProcessImage,
        environment: dict[str, str],
        *,
        fresh_interpreter: bool,
        out: int,
        err: int,
        page: int,
        payload: int,
        stdin: int | None = None,
    ) -> None:
        """Order the process; `out` and `err` are owned from here on, the others borrowed."""
        ours, theirs = socket.socketpair()
        self._connection = Connection(
            self._loop,
            ours,
            WorkerMessage,
            on_message=self._on_message,
            on_close=self._on_connection_closed,
        )
        self._native_fd = kernel.open_anonymous_file("phalanx-native-stack")
        order = MakeWorker(
            ticket=self._ticket,
            worker=self.spec,
            image=image,
            environment=environment,
            fresh_interpreter=fresh_interpreter,
            has_stdin=stdin is not None,
        )
        files = [os.dup(page), os.dup(payload), os.dup(self._native_fd)]
        if stdin is not None:
            files.append(os.dup(stdin))
        self._server.make(order, [theirs.detach(), out, err, *files], self)

    def cancel(self) -> bool:
        """Take the order back; False when the process may exist already."""
        if not self._server.cancel(self._ticket):
            return False
        self._release()
        return True

    def signal(self, signum: int) -> None:
        """Send a signal to this process and to no other, ever."""
        if self._pidfd is not None:
            kernel.signal_pidfd(self._pidfd, signum)
        elif self.pid is not None:
            self._server.signal(self._ticket, signum)

    @property
    def exists(self) -> bool:
        """Whether there is a process, as far as has been heard."""
        return self.pid is not None and self._connection is not None

    def catches(self, signum: int) -> bool:
        """Whether the user's code catches a signal."""
        return self.pid is not None and kernel.catches_signal(self.pid, signum)

    def answer(self, text: str) -> None:
        """Give the debugger the line that it asked for."""
        if self._connection is not None:
            self._connection.send(InputLine(run_id=self.spec.run_id, rank=self.rank, text=text))

    def abandon(self) -> None:
        """Stop following it."""
        self._abandoned = True
        self._release()

    def native_stack(self) -> str | None:
        """Return what faulthandler wrote, if a fatal signal made it write."""
        if self._native_fd is None:
            return None
        _, fatal, rest = self._written(0).rpartition(_FATAL)
        return f"{fatal}{rest}" if fatal else None

    def ask_for_stack(self, page: ControlPage) -> int | None:
        """Have it write where it is, and return from which byte on it will; None: it can't.

        A process that has not said that it answers is sent nothing.
        """
        pid, _, inode = page.stack_file(self.rank)
        fd = self._native_fd
        if fd is None or pid != self.pid or os.fstat(fd).st_ino != inode:
            return None
        if self.stack_size() > _MAX_NATIVE_STACK // 2:  # earlier answers; the offset is shared
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        start = self.stack_size()
        self.signal(QUESTION)
        return start

    def stack_size(self) -> int:
        """Return how many bytes it has written there."""
        return 0 if self._native_fd is None else os.fstat(self._native_fd).st_size

    def stack_text(self, start: int) -> str:
        """Return what it has written from a byte on."""
        return "" if self._native_fd is None else self._written(start)

    def _written(self, start: int) -> str:
        assert self._native_fd is not None  # noqa: S101 - the callers look
        text = os.pread(self._native_fd, _MAX_NATIVE_STACK, start)
        return text.decode("utf-8", "backslashreplace")

    # ── the fork server says ─────────────────────────────────────────────────────────────

    def on_made(self, pid: int, pidfd: int | None) -> None:
        """See `ProcessOwner`."""
        self.pid, self._pidfd = pid, pidfd
        if self._abandoned:
            self.signal(signal.SIGKILL)
            return
        self._owner.on_worker_made(self)
        early, self._early = self._early, []
        for message, fds in early:
            self._owner.on_worker_message(self, message, fds)

    def on_not_made(self, failure: NotMade) -> None:
        """See `ProcessOwner`."""
        self._release()
        if not self._abandoned:
            self._owner.on_worker_not_made(self, failure)

    def on_exited(self, exit_: Exit) -> None:
        """See `ProcessOwner`."""
        if self._abandoned:
            self._release()
            return
        if self._connection is not None:
            self._connection.drain()
        self._owner.on_worker_exited(self, exit_)
        self._release()

    # ── the worker says ──────────────────────────────────────────────────────────────────

    def _on_message(self, message: WorkerMessage, fds: list[int]) -> None:
        if self.pid is None:  # it was quicker than the fork server's word that it exists
            self._early.append((message, fds))
        else:
            self._owner.on_worker_message(self, message, fds)

    def _on_connection_closed(self, error: FrameError | None) -> None:
        """Its end is told by the fork server; only nonsense on the line needs an answer."""
        if error is not None:
            self.signal(signal.SIGKILL)

    def _release(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for fd in (self._pidfd, self._native_fd):
            if fd is not None:
                os.close(fd)
        self._pidfd = self._native_fd = None


def forget_error_file(path: str) -> None:
    """Make the file's folder, and remove a file that an earlier process left."""
    with contextlib.suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).unlink(missing_ok=True)

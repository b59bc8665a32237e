"""The launcher's line to its agent: one agent per launcher process, started on first use.

Two threads serve it. One sends, so that a signal handler (which may only enqueue) and the
user's thread never block on a socket; one receives and hands out.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from phalanx.system import interpreter, kernel
from phalanx.values.errors import FrameError
from phalanx.values.failures import Exited
from phalanx.wire.frames import Channel
from phalanx.wire.messages import AgentMessage, Hello

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.values.failures import Exit
    from phalanx.values.spec import ProcessImage
    from phalanx.wire.messages import ForkServerKey, Message

_BACKLOG = 16
_GOODBYE_S = 5.0
_LAST_BREATH_S = 0.5


class Mailbox(Protocol):
    """A run's end of the line."""

    def on_message(self, message: AgentMessage, fds: list[int]) -> None:
        """Something came for this run; the descriptors are its own. Must not block long."""

    def on_agent_lost(self) -> None:
        """Nothing more will come."""


class AgentLink:
    """A running agent, and the conversation with it."""

    def __init__(self, key: ForkServerKey, image: ProcessImage) -> None:
        """Start an agent, with a fork server already on its way."""
        self._owner_pid = os.getpid()
        self._mailboxes: dict[str, Mailbox] = {}
        self._lock = threading.Lock()
        self._lost = False
        self.how_agent_ended = "ended unexpectedly"
        self._outbox: queue.SimpleQueue[tuple[Message, list[int]] | None] = queue.SimpleQueue()
        kernel.fill_standard_fds()  # the agent gets its own 0 to 2, and the listener by number
        with _listen() as listener:
            self.agent_pid = _spawn_agent(listener, key, image)
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(listener.getsockname())
            _remove_name(listener)
        self._channel: Channel[AgentMessage] = Channel(sock, AgentMessage)
        self.send(Hello())
        threading.Thread(target=self._send_all, name="phalanx-send", daemon=True).start()
        self._receiver = threading.Thread(
            target=self._receive_all, name="phalanx-receive", daemon=True
        )
        self._receiver.start()

    @property
    def usable(self) -> bool:
        """Whether there is an agent, and it is this process' own (not that of its parent)."""
        return not self._lost and os.getpid() == self._owner_pid

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message some time soon; its descriptors are owned from here on.

        Only enqueues: safe in a signal handler.
        """
        if self._lost:
            for fd in fds:
                os.close(fd)
        else:
            self._outbox.put((message, list(fds)))

    def subscribe(self, run_id: str, mailbox: Mailbox) -> None:
        """Have what is for a run given to its mailbox."""
        with self._lock:
            lost = self._lost
            self._mailboxes[run_id] = mailbox
        if lost:
            mailbox.on_agent_lost()

    def unsubscribe(self, run_id: str) -> None:
        """The run has ended."""
        with self._lock:
            self._mailboxes.pop(run_id, None)

    def close(self) -> None:
        """Hang up, and wait (bounded) until the agent and its fork servers are gone."""
        if not self.usable:
            return
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_RDWR)
        self._receiver.join(_GOODBYE_S)
        self.kill_agent()

    def kill_agent(self) -> None:
        """End an agent that does not answer (it is stopped): its fork servers end the rest."""
        if os.getpid() == self._owner_pid and self._receiver.is_alive():  # which reaps it
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.agent_pid, signal.SIGKILL)
            self._receiver.join(_GOODBYE_S)

    # ── threads ──────────────────────────────────────────────────────────────────────────

    def _send_all(self) -> None:
        while (item := self._outbox.get()) is not None:
            message, fds = item
            with contextlib.suppress(OSError):  # the receiving thread sees the end
                self._channel.send(message, fds)
            for fd in fds:
                os.close(fd)
        self._channel.close()  # the receiving thread has ended, and said so

    def _receive_all(self) -> None:
        with contextlib.suppress(OSError, FrameError):
            while (received := self._channel.receive()) is not None:
                self._deliver(*received)
        with self._lock:
            self._lost = True
            mailboxes = list(self._mailboxes.values())
        self._outbox.put(None)
        if mailboxes:
            self._learn_end()
        for mailbox in mailboxes:
            mailbox.on_agent_lost()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.agent_pid, 0)  # it ends with the conversation

    def _learn_end(self) -> None:
        """It ends a moment after the conversation: learn how, and leave it to be reaped."""
        until_s = time.monotonic() + _LAST_BREATH_S
        exit_: Exit | None = None
        with contextlib.suppress(ChildProcessError):  # somebody in this process reaps all children
            while (exit_ := kernel.peek_exit(self.agent_pid)) is None:
                if time.monotonic() > until_s:
                    return
                time.sleep(0.002)
        if exit_ is not None:
            verb = "left with" if isinstance(exit_, Exited) else "was ended by"
            self.how_agent_ended = f"{verb} {exit_}"

    def _deliver(self, message: AgentMessage, fds: list[int]) -> None:
        """Hand a message over; a thread that waits for the next one must not keep its mailbox."""
        with self._lock:
            mailbox = self._mailboxes.get(message.run_id)
        if mailbox is not None:
            mailbox.on_message(message, fds)


def _listen() -> socket.socket:
    """Make the agent's socket here, so that connecting needs no waiting for the agent.

    An abstract one leaves nothing behind; elsewhere it lies in a folder of its own.
    """
    listener = socket.socket(socket.AF_UNIX)
    name = f"phalanx-{os.getpid()}-{secrets.token_hex(8)}"
    if kernel.HAS_ABSTRACT_SOCKETS:
        listener.bind(f"\0{name}")
    else:
        folder = tempfile.mkdtemp(prefix="phalanx-", dir=os.environ.get("XDG_RUNTIME_DIR"))
        listener.bind(f"{folder}/agent")
    listener.listen(_BACKLOG)
    return listener


def _remove_name(listener: socket.socket) -> None:
    """Once connected, a name in the file system is of no more use."""
    name = listener.getsockname()
    if isinstance(name, str) and name:
        os.unlink(name)  # noqa: PTH108
        os.rmdir(os.path.dirname(name))  # noqa: PTH106, PTH120


def _spawn_agent(listener: socket.socket, key: ForkServerKey, image: ProcessImage) -> int:
    listener.set_inheritable(True)
    command = interpreter.command(
        image.executable,
        image.flags,
        "phalanx.agent.__main__",
        str(listener.fileno()),
        str(os.getpid()),
        msgspec.json.encode(key).decode(),
        msgspec.json.encode(image.path_of_preload).decode(),
    )
    null = os.devnull
    return os.posix_spawn(
        image.executable,
        command,
        image.environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, null, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
        ],
    )


_link: AgentLink | None = None
_link_lock = threading.Lock()


def agent_link(key: ForkServerKey, image: ProcessImage) -> tuple[AgentLink, bool]:
    """Return this process' agent, and whether it was started just now with this key."""
    global _link  # noqa: PLW0603 - one agent per process, also after a fork
    with _link_lock:
        if _link is not None and _link.usable:
            return _link, False
        _link = AgentLink(key, image)
        return _link, True


def current_link() -> AgentLink | None:
    """Return this process' agent, if it has one."""
    return _link if _link is not None and _link.usable else None

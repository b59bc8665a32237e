"""A worker's line to its agent."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

from phalanx.wire.frames import Channel
from phalanx.wire.messages import DebuggerInput, InputLine, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.wire.messages import Entered, Message, Raised, Returned


class AgentLink:
    """Sends messages to the agent, from any thread, also from a forked child."""

    def __init__(self, fd: int) -> None:
        """Take over the worker's end of its socket."""
        self._channel: Channel[InputLine] = Channel(socket.socket(fileno=fd), InputLine)
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        os.register_at_fork(after_in_child=self._renew_lock)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._channel.sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message; blocks only while the agent is behind.

        If the agent is gone this process is about to be killed, so that is no error here.
        """
        with self._lock:
            try:
                self._channel.send(message, fds)
            except OSError:
                return

    def report(self, message: Entered | Returned | Raised, fds: Sequence[int] = ()) -> None:
        """Tell how far the worker itself got; a child that it forked has nothing to say there."""
        if os.getpid() == self._owner_pid:
            self.send(message, fds)

    def ask(self, prompt: str) -> str:
        """Return a line from the launcher's standard input; empty at its end. Blocks."""
        self.send(DebuggerInput(prompt=prompt))
        answer = self._channel.receive()
        return "" if answer is None else answer[0].text

    def ask_turn(self) -> None:
        """Wait until this worker may read from the terminal."""
        self.send(Turn(begins=True))
        self._channel.receive()

    def end_turn(self) -> None:
        """Others may read."""
        self.send(Turn(begins=False))

    def _renew_lock(self) -> None:
        """A thread of the parent may have held it at the fork."""
        self._lock = threading.Lock()

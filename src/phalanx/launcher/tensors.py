"""The launcher's way to the tensor store of one run."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from phalanx.values.errors import StoreClosedError
from phalanx.wire.messages import CloseStore, OpenStore

if TYPE_CHECKING:
    from phalanx.launcher.link import AgentLink


class StoreAccess:
    """Opens conversations with a run's store, until it is released. Knows no context.

    So a context that nobody refers to any more is collected at once, and its store with it.
    """

    def __init__(self, run_id: str, link: AgentLink) -> None:
        """Keep the way; nothing is opened."""
        self._run_id = run_id
        self._link = link
        self._owner_pid = os.getpid()
        self._released = False

    def open(self) -> socket.socket:
        """Return a socket for one conversation.

        Raises:
            StoreClosedError: It was released, the agent has ended, or this is a fork.
        """
        if os.getpid() != self._owner_pid:
            raise StoreClosedError(
                "this is a fork of the launcher, which has no line to the agent: use the tensor "
                "store in the launcher itself, or in the workers"
            )
        if self._released or not self._link.usable:
            raise StoreClosedError(
                f"the tensors of run {self._run_id} are gone: the context was closed, or the "
                "agent has ended. Read them before close(), or inside the with block"
            )
        ours, theirs = socket.socketpair()
        message = OpenStore(run_id=self._run_id, pid=os.getpid())
        self._link.send(message, [theirs.detach()])
        return ours

    def release(self) -> None:
        """Have the agent let go of the store's memory; harmless when it has ended."""
        self._released = True
        if self._link.usable:
            self._link.send(CloseStore(run_id=self._run_id))

"""A rank's part of a group, without what torch knows of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.tensors.sync.shm.exchange import Exchange
from phalanx.tensors.sync.shm.mailbox import Mailboxes
from phalanx.tensors.sync.shm.movements import Movements
from phalanx.tensors.sync.shm.reductions import Reductions
from phalanx.tensors.sync.shm.segment import Handshake
from phalanx.tensors.sync.shm.work import Lane
from phalanx.values.errors import GroupError

if TYPE_CHECKING:
    from torch.distributed import Store


class Member:
    """Owns the segment, the peers' pidfds and the threads; can outlive torch's group object."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        segment = Handshake(store, rank, size, timeout_s).join()
        self.timeout_s = timeout_s
        self.pid = os.getpid()
        self.exchange = Exchange(segment, rank, size, timeout_s)
        self.reductions = Reductions(self.exchange)
        self.movements = Movements(self.exchange)
        self.mailboxes = Mailboxes(self.exchange)
        self.lane = Lane("phalanx-collectives")
        self.error: GroupError | None = None
        self.closed = False
        self.movements.barrier(timeout_s)  # all hold all by their pidfds

    def attempt(self, task: Callable[[], None]) -> None:
        """Do a collective; if it fails half-way, the group is of no more use to anybody."""
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error
        before = self.exchange.num_inputs
        try:
            task()
        except BaseException as error:
            if isinstance(error, GroupError) or self.exchange.num_inputs != before:
                self.exchange.fail()
                if isinstance(error, GroupError):
                    self.error = error
                else:
                    self.error = GroupError(f"an operation failed: {error!r}")
            raise

    def check(self) -> None:
        """Raise if nothing can be asked of this member."""
        if self.closed:
            raise GroupError("this process group was destroyed")
        if os.getpid() != self.pid:
            raise GroupError("a forked process can't use the process group of its parent")

    def close(self) -> None:
        """Leave the group; safe to call twice, and in a fork of the process."""
        if self.closed or os.getpid() != self.pid:
            return
        self.closed = True
        self.exchange.closing = True
        self.lane.stop()
        self.mailboxes.close()
        self.exchange.close()
        del (
            self.exchange,
            self.reductions,
            self.movements,
            self.mailboxes,
        )  # the memory

"""Segments that clients have been handed to write into, and have not put yet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.system import kernel
from phalanx.tensors.store.messages import Put, Reserved
from phalanx.tensors.store.segments import PoolFullError

if TYPE_CHECKING:
    from phalanx.tensors.store.entries import StoreClient
    from phalanx.tensors.store.segments import Segment, SegmentPool

_AHEAD_PART = 16
"""Segments that are handed out before they are asked for are at most this part of the limit."""


class MisuseError(Exception):
    """A client asked for what can't be; the text goes to it."""


class Reservations:
    """Who has which segment of the pool to write into."""

    def __init__(self, pool: SegmentPool) -> None:
        """Begin with none.

        Args:
            pool: Where segments come from, and go back to.
        """
        self._pool = pool
        self._held: dict[StoreClient, dict[int, Segment]] = {}

    def hand_out(
        self, client: StoreClient, num_bytes: int, mapped: Sequence[int] = ()
    ) -> tuple[Reserved, int]:
        """Reserve a segment for a client; return what it is told, and a descriptor for it.

        Args:
            client: Who will write.
            num_bytes: How much.
            mapped: Numbers of the segments that it has mapped; it is told which are gone.

        Raises:
            PoolFullError: The limit is reached.
            OSError: The machine has no memory, or no descriptor.
        """
        segment = self._pool.take(num_bytes, client.process)
        try:
            fd = os.dup(segment.fd)
        except OSError:
            self._pool.give_back(segment)
            raise
        self._held.setdefault(client, {})[segment.number] = segment
        fresh, segment.fresh = segment.fresh, False
        gone = tuple(number for number in mapped if not self._pool.exists(number))
        reserved = Reserved(
            segment=segment.number,
            num_bytes=segment.num_bytes,
            fresh=fresh,
            keep=kernel.HAS_LEASES,
            gone=gone,
        )
        return reserved, fd

    def hand_out_another(
        self, client: StoreClient, request: Put
    ) -> tuple[Reserved | None, list[int]]:
        """Reserve the next segment ahead, as long as that takes room from nobody."""
        if not request.another or request.segment is None:
            return None, []
        ahead = sum(each.num_bytes for held in self._held.values() for each in held.values())
        if ahead + request.num_bytes <= self._pool.limit // _AHEAD_PART:
            with contextlib.suppress(PoolFullError, OSError):
                reserved, fd = self.hand_out(client, request.num_bytes)
                return reserved, [fd]
        return None, []

    def take(self, client: StoreClient, number: int | None) -> Segment:
        """Return a segment that a client had been handed: it has put it, or gives it back.

        Raises:
            MisuseError: It had not.
        """
        segment = self._held.get(client, {}).pop(-1 if number is None else number, None)
        if segment is None:
            raise MisuseError(f"segment {number} is not reserved by this client")
        return segment

    def forget(self, client: StoreClient) -> None:
        """What a client that is gone wrote and did not put is free."""
        for segment in self._held.pop(client, {}).values():
            self._pool.give_back(segment)

    def clear(self) -> None:
        """Forget all: the pool is about to close."""
        self._held.clear()

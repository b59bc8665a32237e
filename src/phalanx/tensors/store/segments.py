"""The memory of a tensor store: shared segments, who may write one, and when again.

A segment is an anonymous file. Its owner is the agent, so it lives whoever crashes, and
nothing of it is left when the agent goes. A writer gets the file itself and may keep it
mapped; readers get a reopening, which they map privately.

Pages of a private mapping that were not touched yet show later writes to the file. So a
segment is written again only when nobody reads it any more, and that is not reckoned but
asked of the kernel (`kernel.nobody_reads`): forks and crashes of readers are counted right.
Until then it is *retired*, and after that *free*, to be handed out again with its pages:
writing into pages that exist is several times as fast as into new ones.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from dataclasses import dataclass, field

from phalanx.system import kernel

_PAGE = 4096
_STEPS_PER_DOUBLING = 8
_NUM_PROBES = 8
"""Most retired segments that one operation asks the kernel about, while there is room."""
_KEPT_PART = 4
"""At most this part of the limit stays in free segments (1/4)."""


@dataclass(slots=True, eq=False)
class Segment:
    """A piece of shared memory.

    Attributes:
        number: Its name.
        fd: The file. Its owner is the `SegmentPool`.
        num_bytes: Its length.
        fresh: Nobody has written into it yet, so it has no pages.
        last_writer: Who wrote last, and so has it mapped probably.
    """

    number: int
    fd: int
    num_bytes: int
    fresh: bool = True
    last_writer: object = None


class PoolFullError(Exception):
    """There is no room; the arguments are the bytes asked for, and a sentence about the rest."""


@dataclass(eq=False)
class SegmentPool:
    """Hands out segments and takes them back, within a limit.

    Attributes:
        limit: Bytes that values and segments may have in all.
        max_segments: How many there may be: each needs a descriptor.
        inline_bytes: Bytes of values that have no segment: they count, too.
    """

    limit: int
    inline_bytes: int = 0
    max_segments: int = 1 << 30
    _segment_bytes: int = 0
    _pooled_bytes: int = 0
    _free_bytes: int = 0
    _free: dict[int, deque[Segment]] = field(default_factory=dict)
    _retired: deque[Segment] = field(default_factory=deque)
    _existing: dict[int, Segment] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def num_bytes(self) -> int:
        """Bytes that values and segments have now."""
        return self._segment_bytes + self.inline_bytes

    def exists(self, number: int) -> bool:
        """Whether a segment is still in use or in the pool."""
        return number in self._existing

    def take(self, num_bytes: int, writer: object) -> Segment:
        """Return a segment for `writer` that nobody else reads or writes.

        Raises:
            PoolFullError: It would exceed the limit.
            OSError: The system has no memory file to give.
        """
        sizes = (_rounded(num_bytes), _in_pages(num_bytes))
        segment = self._take_free(sizes, writer)
        if segment is None:
            self._reclaim(_NUM_PROBES)
            segment = self._take_free(sizes, writer)
        if segment is None:
            segment = self._make(self._fitted(*sizes))
        segment.last_writer = writer
        self._trim()
        return segment

    def give_back(self, segment: Segment) -> None:
        """Take back what was taken and has had no reader."""
        self._pooled_bytes += segment.num_bytes
        self._set_free(segment)
        self._trim()

    def retire(self, segment: Segment) -> None:
        """Take back what held a value: there may be readers."""
        segment.fresh = False
        if not kernel.HAS_LEASES:  # nobody can tell when the last reader goes
            self._drop(segment)  # the pages stay until then
            return
        self._pooled_bytes += segment.num_bytes
        self._retired.append(segment)
        self._trim()

    def make_room(self, num_bytes: int) -> None:
        """Let pooled segments go until that many more bytes are within the limit.

        Raises:
            PoolFullError: They are not.
        """
        if self.num_bytes + num_bytes > self.limit:
            self._reclaim(len(self._retired))
        while self.num_bytes + num_bytes > self.limit and self._drop_a_free_one():
            pass
        if self.num_bytes + num_bytes > self.limit:
            raise PoolFullError(num_bytes, self._balance())

    def close(self) -> None:
        """Let go of everything; whoever has something mapped keeps it."""
        for segment in self._existing.values():
            os.close(segment.fd)
        self._existing.clear()
        self._free.clear()
        self._retired.clear()
        self._segment_bytes = self._pooled_bytes = self._free_bytes = self.inline_bytes = 0

    # ── inside ───────────────────────────────────────────────────────────────────────────

    def _take_free(self, sizes: tuple[int, ...], writer: object) -> Segment | None:
        size = next((size for size in sizes if size in self._free), 0)
        fitting = self._free.pop(size, None)
        if not fitting:
            return None
        recent = itertools.islice(reversed(fitting), _NUM_PROBES)
        chosen = next((s for s in recent if s.last_writer == writer), fitting[-1])
        fitting.remove(chosen)
        if fitting:
            self._free[size] = fitting  # last in order: the most recently used size
        self._pooled_bytes -= size
        self._free_bytes -= size
        return chosen

    def _set_free(self, segment: Segment) -> None:
        self._free.setdefault(segment.num_bytes, deque()).append(segment)
        self._free_bytes += segment.num_bytes

    def _fitted(self, size: int, least: int) -> int:
        """Make room for a whole class of sizes, or at least for what is needed."""
        try:
            self.make_room(size)
        except PoolFullError:
            self.make_room(least)
            return least
        return size

    def _make(self, size: int) -> Segment:
        if len(self._existing) >= self.max_segments:
            self._reclaim(len(self._retired))
            if not self._drop_a_free_one():
                raise PoolFullError(
                    size,
                    f"it has {len(self._existing):,} large values, or replaced ones that somebody "
                    "still reads, and each needs one of the agent's file descriptors (`ulimit -n`; "
                    "half of them may go here)",
                )
        fd = kernel.open_anonymous_file("phalanx-tensors")
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            raise
        segment = Segment(number=next(self._numbers), fd=fd, num_bytes=size)
        self._existing[segment.number] = segment
        self._segment_bytes += size
        return segment

    def _reclaim(self, num_probes: int) -> None:
        """Free retired segments that have no reader left, the longest retired first."""
        for _ in range(min(num_probes, len(self._retired))):
            segment = self._retired.popleft()
            if kernel.nobody_reads(segment.fd):
                self._set_free(segment)
            else:
                self._retired.append(segment)

    def _trim(self) -> None:
        """Return memory to the system that is beyond what the pool keeps."""
        keep = self.limit // _KEPT_PART
        if self._pooled_bytes > keep:
            self._reclaim(_NUM_PROBES)
        while self._free_bytes > keep and self._drop_a_free_one():
            pass

    def _drop_a_free_one(self) -> bool:
        """Drop one of the size that was not used for the longest time."""
        for size, segments in self._free.items():
            segment = segments.popleft()
            if not segments:
                del self._free[size]
            self._pooled_bytes -= size
            self._free_bytes -= size
            os.ftruncate(segment.fd, 0)  # frees the pages, also those that a writer has mapped
            self._drop(segment)
            return True
        return False

    def _drop(self, segment: Segment) -> None:
        del self._existing[segment.number]
        self._segment_bytes -= segment.num_bytes
        os.close(segment.fd)

    def _balance(self) -> str:
        return (
            f"the limit is {self.limit:,} bytes, values have "
            f"{self.num_bytes - self._pooled_bytes:,}, and replaced or deleted values that "
            f"somebody still reads {self._pooled_bytes:,}"
        )


def _rounded(num_bytes: int) -> int:
    """Round up to one of eight sizes per doubling, so that segments fit again."""
    step = max(_PAGE, (1 << (num_bytes - 1).bit_length()) // 2 // _STEPS_PER_DOUBLING)
    return -(-num_bytes // step) * step


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE

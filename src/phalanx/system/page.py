"""The control page: what agent and workers tell each other without a system call.

One small shared file per run, mapped by the agent and by every worker. The agent writes the
head ("stop wanted", "this generation is aborted, by rank r"); each worker writes its own
line (step, progress, whether it polls for a stop). Reading a wish costs a memory read, so a
worker needs no listening thread.

Layout: 64-byte lines of eight unsigned 64-bit words. Line 0 is the head, line ``1 + rank``
belongs to a rank. Every word is aligned and has one writer, so a plain store is atomic on
the machines that Phalanx runs on; no order between two words is relied on.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

_LINE_WORDS: Final = 8
_LINE_BYTES: Final = _LINE_WORDS * 8

# words of the head
_STOP_WANTED: Final = 0
_ABORTED_BY: Final = 1  # rank + 1, 0 while nobody did

# words of a rank's line
_POLLS_STOP: Final = 0
_STEP: Final = 1
_PROGRESS_NS: Final = 2
_SYNCHRONIZE_CALLS: Final = 3
_PID: Final = 4
_STACK_FD: Final = 5
_STACK_INODE: Final = 6
_SIGNS: Final = 7


class ControlPage:
    """A mapping of a run's control page. Cheap to read, safe to use from any thread."""

    def __init__(self, fd: int, world_size: int) -> None:
        """Map the page; the descriptor stays the caller's."""
        self._map = mmap.mmap(fd, page_size(world_size))
        self._words = memoryview(self._map).cast("Q")

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._map.close()

    # ── the agent writes, workers read ───────────────────────────────────────────────────

    @property
    def stop_wanted(self) -> bool:
        """Whether the workers were asked to finish."""
        return self._words[_STOP_WANTED] != 0

    @property
    def aborted_by(self) -> int | None:
        """The rank whose failure ended this generation, or None."""
        word: int = self._words[_ABORTED_BY]
        return word - 1 if word else None

    def ask_to_stop(self) -> None:
        """Ask all workers to finish."""
        self._words[_STOP_WANTED] = 1

    def abort(self, rank: int) -> None:
        """Say that the generation can't go on because of `rank` (-1: of no single rank)."""
        self._words[_ABORTED_BY] = max(rank, 0) + 1

    def clear(self) -> None:
        """Begin a generation: no wishes, no progress."""
        self._map[:] = bytes(len(self._map))

    def clear_line(self, rank: int) -> None:
        """Begin a rank anew: what the process before it wrote does not count."""
        start = self._line(rank) * 8
        self._map[start : start + _LINE_BYTES] = bytes(_LINE_BYTES)

    # ── a worker writes, the agent reads ─────────────────────────────────────────────────

    def note_polling(self, rank: int) -> None:
        """The worker looks for a stop by itself."""
        self._words[self._line(rank) + _POLLS_STOP] = 1

    def polls_stop(self, rank: int) -> bool:
        """Whether the worker has ever looked for a stop."""
        return self._words[self._line(rank) + _POLLS_STOP] != 0

    def note_progress(self, rank: int, monotonic_ns: int, step: int | None = None) -> None:
        """The worker got on: a sign of life; `step` is the user's own count."""
        line = self._line(rank)
        if step is not None:
            self._words[line + _STEP] = step
        self._words[line + _PROGRESS_NS] = monotonic_ns
        self._words[line + _SIGNS] += 1  # threads may lose one to each other: a count will do

    def progress(self, rank: int) -> tuple[int, int]:
        """Return a rank's last step and when it was (monotonic ns; 0: never)."""
        line = self._line(rank)
        return self._words[line + _STEP], self._words[line + _PROGRESS_NS]

    def num_signs(self, rank: int) -> int:
        """Return how often a rank noted that it got on."""
        count: int = self._words[self._line(rank) + _SIGNS]
        return count

    def note_synchronize(self, rank: int, calls: int) -> None:
        """The worker has come to that many `synchronize()` calls."""
        self._words[self._line(rank) + _SYNCHRONIZE_CALLS] = calls

    def synchronize_calls(self, rank: int) -> int:
        """Return how many `synchronize()` calls a rank has come to."""
        calls: int = self._words[self._line(rank) + _SYNCHRONIZE_CALLS]
        return calls

    def note_stack_file(self, rank: int, pid: int, fd: int, inode: int) -> None:
        """The worker tells its stack in this file of its own when it is asked."""
        line = self._line(rank)
        self._words[line + _STACK_FD] = fd
        self._words[line + _STACK_INODE] = inode
        self._words[line + _PID] = pid

    def stack_file(self, rank: int) -> tuple[int, int, int]:
        """Return a rank's pid (0: not yet), and its stack file's descriptor there and inode."""
        line = self._line(rank)
        words = self._words
        return words[line + _PID], words[line + _STACK_FD], words[line + _STACK_INODE]

    @staticmethod
    def _line(rank: int) -> int:
        return (1 + rank) * _LINE_WORDS


def page_size(world_size: int) -> int:
    """Return the size of the page in bytes, for that many ranks."""
    return (1 + world_size) * _LINE_BYTES


def prepare(fd: int, world_size: int) -> None:
    """Give a new file the page's size, all zero."""
    os.ftruncate(fd, page_size(world_size))

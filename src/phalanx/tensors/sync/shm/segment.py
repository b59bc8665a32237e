"""The memory that the ranks of one group share: its layout, and how they come to share it.

Rank 0 makes a file without a name (memfd), says in the group's store where it is
(``/proc/<pid>/fd/<n>``), and closes it once everybody has mapped it. From then on only the
mappings hold it: whoever is killed, nothing is left behind. Pages come into being when they
are first written, so a group costs what it uses, and never more than `Layout.num_bytes`.

Layout: a page with a nonce, `LINE_BYTES` of words per rank, then per rank `NUM_SLOTS` input
slots and as many output slots, then the mailboxes of all pairs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from phalanx.system import kernel
from phalanx.values.errors import GroupUnsupportedError

if TYPE_CHECKING:
    from torch.distributed import Store

NUM_SLOTS: Final = 4
LINE_BYTES: Final = 256
MAX_PIECE: Final = 128 << 10
"""Bytes that are copied or reduced at a time: few enough to stay in a core's L2 cache."""
_MAX_INPUT: Final = 1 << 20
_MAILBOX_CHUNK: Final = 64 << 10
NUM_CHUNKS: Final = 4
MAILBOX_HEADER: Final = 256
_PAGE: Final = 4096
_NONCE_BYTES: Final = 16
_FAILED_KEY: Final = "failed"
_POLL_S: Final = 0.002

GLOO = 'use the "gloo" backend instead: init_process_group("gloo")'

# The words of a rank's line, as indices of 8-byte words.
IN_COUNT: Final = 0
OUT_COUNT: Final = 1
STATE: Final = 2
PID: Final = 3
CALLS: Final = 8
BELL: Final = 16

JOINED: Final = 1
LEFT: Final = 2
FAILED: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things are in a segment for `size` ranks. All values are bytes."""

    size: int

    @property
    def piece_bytes(self) -> int:
        """What one rank sends to one other in a round."""
        return max(_PAGE, min(MAX_PIECE, _MAX_INPUT // self.size // _PAGE * _PAGE))

    @property
    def input_bytes(self) -> int:
        """One input slot: a piece for each rank."""
        return max(self.piece_bytes * self.size, 2 * MAX_PIECE)

    @property
    def rank_bytes(self) -> int:
        """All slots of a rank."""
        return NUM_SLOTS * (self.input_bytes + self.piece_bytes)

    @property
    def chunk_bytes(self) -> int:
        """One chunk of a mailbox."""
        return _MAILBOX_CHUNK if self.size <= 16 else _PAGE

    @property
    def mailbox_bytes(self) -> int:
        """The mailbox of one pair, for one direction."""
        return NUM_CHUNKS * self.chunk_bytes + _PAGE

    def line(self, rank: int) -> int:
        """Offset of a rank's words."""
        return _PAGE + rank * LINE_BYTES

    def slots(self, rank: int) -> int:
        """Offset of a rank's input slots; its output slots follow."""
        head = _PAGE + self.size * LINE_BYTES
        return -(-head // _PAGE) * _PAGE + rank * self.rank_bytes

    def mailbox(self, source: int, destination: int) -> int:
        """Offset of the mailbox from one rank to another."""
        return self.slots(self.size) + (source * self.size + destination) * self.mailbox_bytes

    @property
    def num_bytes(self) -> int:
        """The whole segment."""
        return self.mailbox(self.size, 0)


class Segment:
    """A mapped segment. Its memory goes when it, and the last view of `bytes`, are gone.

    Attributes:
        layout: Where things are.
        words: All of it as unsigned 8-byte words.
        bytes: All of it as a tensor (uint8, ``[num_bytes]``).
        address: Where it is mapped in this process.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        """Map the file; the descriptor stays the caller's."""
        # Unlike Python's mmap, this keeps no descriptor.
        storage = torch.UntypedStorage.from_file(
            f"/proc/self/fd/{fd}", shared=True, nbytes=layout.num_bytes
        )
        self.layout = layout
        self.bytes = torch.tensor([], dtype=torch.uint8).set_(storage)
        self.address = storage.data_ptr()
        whole = (ctypes.c_char * layout.num_bytes).from_address(self.address)
        self.words = memoryview(whole).cast("B").cast("Q")


class Handshake:
    """Brings the ranks of a group to one segment.

    Every rank of the group makes one and calls `join`. Its store may hold what an earlier
    group of the same name left there: each attempt counts itself and has keys of its own.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        """Keep who joins whom."""
        self._store = store
        self._rank = rank
        self._size = size
        self._until = time.monotonic() + timeout_s
        self._attempt = 0

    def join(self) -> Segment:
        """Return the group's segment; blocks until every rank has mapped it.

        Raises:
            GroupUnsupportedError: The ranks can't share memory. All of them raise it.
            TimeoutError: A rank did not come in time; the error names it.
        """
        self._attempt = self._store.add(f"attempts/{self._rank}", 1)
        layout = Layout(size=self._size)
        try:
            with contextlib.ExitStack() as stack:
                segment = (
                    self._make(layout, stack) if self._rank == 0 else self._find(layout, stack)
                )
                segment.words[layout.line(self._rank) // 8 + PID] = os.getpid()
                segment.words[layout.line(self._rank) // 8 + STATE] = JOINED
                self._wait_for_all(segment)  # rank 0 keeps the file open until then
        except GroupUnsupportedError as error:
            self._store.set(self._key(_FAILED_KEY), str(error))
            raise
        return segment

    def _key(self, name: str) -> str:
        return f"{name}/{self._attempt}"

    def _make(self, layout: Layout, stack: contextlib.ExitStack) -> Segment:
        fd = kernel.open_anonymous_file("phalanx-group")
        stack.callback(os.close, fd)
        os.ftruncate(fd, layout.num_bytes)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        os.pwrite(fd, nonce, 0)
        place = f"{_machine()} {os.getpid()} {fd} {nonce.hex()}"
        self._store.set(self._key("segment"), place)
        return Segment(fd, layout)

    def _find(self, layout: Layout, stack: contextlib.ExitStack) -> Segment:
        self._wait_until(lambda: self._store.check([self._key("segment")]), lambda: [0])
        machine, pid, number, nonce = self._store.get(self._key("segment")).decode().split(" ")
        if machine != _machine():
            raise GroupUnsupportedError(
                f"rank {self._rank} is not on the machine (or not in the container) of rank 0, "
                f"so they can't share memory; {GLOO}"
            )
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise GroupUnsupportedError(
                f"rank {self._rank} may not open the memory of rank 0 (pid {pid}): "
                f"{error.strerror}; run both as the same user, or {GLOO}"
            ) from error
        stack.callback(os.close, fd)
        if os.pread(fd, _NONCE_BYTES, 0).hex() != nonce:
            raise GroupUnsupportedError(
                f"what rank 0 (pid {pid}) announced as its memory is something else; {GLOO}"
            )
        return Segment(fd, layout)

    def _wait_for_all(self, segment: Segment) -> None:
        def missing() -> list[int]:
            words, layout = segment.words, segment.layout
            return [
                rank for rank in range(self._size) if words[layout.line(rank) // 8 + STATE] == 0
            ]

        self._wait_until(lambda: not missing(), missing)

    def _wait_until(self, condition: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        while not condition():
            if self._store.check([self._key(_FAILED_KEY)]):
                raise GroupUnsupportedError(self._store.get(self._key(_FAILED_KEY)).decode())
            if time.monotonic() > self._until:
                ranks = ", ".join(map(str, missing()))
                raise TimeoutError(f"the group's shared memory was not joined by rank {ranks}")
            time.sleep(_POLL_S)


def _machine() -> str:
    """Name this boot of this kernel, and the pid namespace in which pids mean something."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116 - not a file

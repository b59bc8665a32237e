"""One rank's place in a group: publishing what it wrote, and waiting for what peers wrote.

**Counters.** Each rank has two that only it writes: how many *inputs* it has published, and
how many *outputs*. Each collective publishes the same number of both on every rank, so all
ranks know, without asking, which count stands for which round.

**Slots.** Input number ``m`` lies in slot ``m % NUM_SLOTS``. The rule that makes this safe:
before a rank publishes input ``m`` it has read its peers' inputs up to ``m - 2``. So whoever
sees a peer's input ``m - 2`` knows that the peer has read everything up to ``m - 4``, and may
write over it. Outputs follow suit: output ``k`` of a collective is written after the peers'
inputs ``k`` came, which they publish after reading outputs up to ``k - 3``. Ranks may thus be
two rounds apart, and there is no barrier, neither within a collective nor between two.

**Calls.** With its first input a rank leaves a description of its call, two words, in one of
two places by turns; every rank compares them when the first inputs have come. A collective is
over only after that, so nobody is more than one ahead.

**Waits** spin for some 100 µs if each rank of this machine can have a core of its own, yielding
now and then in case two ranks share one after all; else they sleep at once. A
sleeper looks up every 50 ms: has a peer died that still owes something to this collective,
left the group, or failed? Is it too late?
"""

from __future__ import annotations

import os
import select
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.tensors.sync.shm import futex
from phalanx.tensors.sync.shm.segment import (
    BELL,
    CALLS,
    FAILED,
    GLOO,
    IN_COUNT,
    JOINED,
    LEFT,
    NUM_SLOTS,
    OUT_COUNT,
    PID,
    STATE,
    Segment,
)
from phalanx.values.errors import (
    CallMismatchError,
    GroupTimeoutError,
    GroupUnsupportedError,
    PeerLostError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

_BURST: Final = 100
"""Looks at a word before yielding the core, perhaps to the peer: 5 µs."""
_NUM_BURSTS: Final = 20
_SLICE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank calls: equal on all ranks, or nothing is moved.

    Attributes:
        name: As users know it, ``all_reduce``; one of `NAMES`.
        dtype: Name of the dtype as torch has it, or "" where bytes are all that matters.
        reduction: Name of the reduce operation, or "".
        root: Rank in the group that sends or receives; 0 where there is none.
        count: Number of elements, or of bytes.
    """

    name: str
    dtype: str = ""
    reduction: str = ""
    root: int = 0
    count: int = 0

    def pack(self) -> tuple[int, int]:
        """Return it as two words."""
        first = (
            NAMES.index(self.name)
            | REDUCTIONS.index(self.reduction) << 8
            | DTYPES.index(self.dtype) << 16
            | self.root << 32
        )
        return first, self.count

    @staticmethod
    def unpack(first: int, count: int) -> Call:
        """Return what `pack` was given."""
        return Call(
            name=NAMES[first & 0xFF],
            reduction=REDUCTIONS[first >> 8 & 0xFF],
            dtype=DTYPES[first >> 16 & 0xFFFF],
            root=first >> 32,
            count=count,
        )

    def __str__(self) -> str:
        """As a person says it."""
        unit = "elements" if self.dtype else "bytes"
        parts = [self.reduction, f"{self.count:,} {unit}" if self.count else "", self.dtype]
        if self.name in _WITH_ROOT:
            parts.append(f"root {self.root}")
        told = ", ".join(part for part in parts if part)
        return f"{self.name}({told})"


NAMES: Final = (
    "nothing",
    "all_reduce",
    "all_gather",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
REDUCTIONS: Final = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
DTYPES: Final = (
    "",
    "bfloat16",
    "bool",
    "complex128",
    "complex32",
    "complex64",
    "float16",
    "float32",
    "float64",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
)
_WITH_ROOT: Final = ("broadcast", "gather", "reduce", "scatter")


class Exchange:
    """Publishes and waits, for one thread at a time.

    Attributes:
        rank: This rank in the group.
        size: Number of ranks.
        segment: The shared memory.
        num_inputs: Inputs that this rank has published.
        num_outputs: Outputs that it has published.
    """

    def __init__(self, segment: Segment, rank: int, size: int, timeout_s: float) -> None:
        """Hold each peer by its pidfd. Blocks until every rank does.

        Raises:
            PeerLostError: A peer died meanwhile.
            GroupUnsupportedError: The kernel gives no pidfd.
        """
        self.rank = rank
        self.size = size
        self.segment = segment
        self.num_inputs = 0
        self.num_outputs = 0
        self.timeout_s = timeout_s
        self.closing = False
        self._peers = tuple(peer for peer in range(size) if peer != rank)
        lines = [segment.layout.line(peer) // 8 for peer in range(size)]
        self._lines = lines
        self._words = segment.words
        self._in_words = tuple(lines[peer] + IN_COUNT for peer in self._peers)
        self._out_words = tuple(lines[peer] + OUT_COUNT for peer in self._peers)
        self._own_in = lines[rank] + IN_COUNT
        self._own_out = lines[rank] + OUT_COUNT
        self._in_address = segment.address + 8 * self._own_in
        self._out_address = segment.address + 8 * self._own_out
        num_local = max(size, int(os.environ.get("LOCAL_WORLD_SIZE") or 0))
        self._num_bursts = _NUM_BURSTS if num_local <= len(os.sched_getaffinity(0)) else 0
        self._call = (0, 0)
        self._num_calls = 0
        self._last_input = 0
        self._last_output = 0
        self._until = 0.0
        self._pidfds: dict[int, int] = {}
        self._poll = select.poll()
        self._poll_lock = threading.Lock()
        self._hold_peers()

    def _hold_peers(self) -> None:
        for peer in self._peers:
            pid = self._pid(peer)
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                raise PeerLostError(f"{self.who(peer)} died while the group was made") from None
            except OSError as error:
                raise GroupUnsupportedError(
                    f"{self.who(peer)} can't be watched ({error.strerror}); {GLOO}"
                ) from error
            self._pidfds[pidfd] = peer
            self._poll.register(pidfd, select.POLLIN)

    # ── places ───────────────────────────────────────────────────────────────────────────

    def input_offset(self, rank: int, number: int) -> int:
        """Return where a rank's input of this number lies, in bytes from the segment's start."""
        layout = self.segment.layout
        return layout.slots(rank) + number % NUM_SLOTS * layout.input_bytes

    def output_offset(self, rank: int, number: int) -> int:
        """Return where a rank's output of this number lies."""
        layout = self.segment.layout
        start = layout.slots(rank) + NUM_SLOTS * layout.input_bytes
        return start + number % NUM_SLOTS * layout.piece_bytes

    def who(self, rank: int) -> str:
        """Name a rank for an error."""
        return f"rank {rank} (pid {self._pid(rank)})"

    def _pid(self, rank: int) -> int:
        return self._words[self._lines[rank] + PID]

    # ── a collective ─────────────────────────────────────────────────────────────────────

    def begin(
        self, call: tuple[int, int], num_inputs: int, num_outputs: int, timeout_s: float
    ) -> None:
        """Start a collective that publishes these numbers of inputs and outputs."""
        line = self._lines[self.rank] + CALLS + 2 * (self._num_calls & 1)
        self._words[line] = call[0]
        self._words[line + 1] = call[1]
        self._call = call
        self._last_input = self.num_inputs + num_inputs
        self._last_output = self.num_outputs + num_outputs
        self._until = time.monotonic() + timeout_s

    def publish_input(self) -> None:
        """Say that the next input is complete."""
        self.num_inputs += 1
        self._words[self._own_in] = self.num_inputs
        futex.wake_all(self._in_address)

    def publish_output(self) -> None:
        """Say that the next output is complete."""
        self.num_outputs += 1
        self._words[self._own_out] = self.num_outputs
        futex.wake_all(self._out_address)

    def await_inputs(self, number: int) -> None:
        """Wait until every peer has published its input of this number (0 is the first).

        Raises:
            PeerLostError: A peer died, left or failed before that.
            GroupTimeoutError: It took longer than the timeout.
        """
        words = self._words
        for index in self._in_words:
            if words[index] <= number:
                self._await(index, number)

    def await_outputs(self, number: int) -> None:
        """Wait until every peer has published its output of this number; errors as above."""
        words = self._words
        for index in self._out_words:
            if words[index] <= number:
                self._await(index, number)

    def compare_calls(self) -> None:
        """Check that all ranks called the same; the first inputs must have come.

        Raises:
            CallMismatchError: They did not.
        """
        words = self._words
        place = CALLS + 2 * (self._num_calls & 1)
        self._num_calls += 1
        own = self._call
        for peer in self._peers:
            line = self._lines[peer] + place
            if words[line] != own[0] or words[line + 1] != own[1]:
                theirs = Call.unpack(words[line], words[line + 1])
                raise CallMismatchError(
                    f"rank {peer} called {theirs} where rank {self.rank} called "
                    f"{Call.unpack(*own)}; every rank of a group must call the same collectives "
                    "in the same order, with the same shapes and dtypes"
                )

    # ── waiting ──────────────────────────────────────────────────────────────────────────

    def _await(self, index: int, number: int) -> None:
        words = self._words
        for _ in range(self._num_bursts):
            for _ in range(_BURST):
                if words[index] > number:
                    return
            os.sched_yield()
        address = self.segment.address + 8 * index
        while (seen := words[index]) <= number:
            futex.wait(address, seen, _SLICE_S)
            if words[index] <= number:
                self._look_up(index, number)

    def _look_up(self, index: int, number: int) -> None:
        """Raise if waiting on is no use."""
        doing = Call.unpack(*self._call)
        if self.closing:
            raise PeerLostError(f"this rank's group was destroyed during {doing}")
        self.check_peers(str(doing), self._owing())
        if time.monotonic() > self._until:
            column = IN_COUNT if (index in self._in_words) else OUT_COUNT
            late = [p for p in self._peers if self._words[self._lines[p] + column] <= number]
            raise GroupTimeoutError(
                f"{doing} timed out: "
                + ", ".join(self.who(peer) for peer in late)
                + " did not come. Look at what they do (a hang, other collectives?), or "
                "give the group a longer timeout"
            )

    def _owing(self) -> list[int]:
        """Return the peers that have not published all of this collective."""
        words = self._words
        return [
            peer
            for peer in self._peers
            if words[self._lines[peer] + IN_COUNT] < self._last_input
            or words[self._lines[peer] + OUT_COUNT] < self._last_output
        ]

    def check_peers(self, doing: str, owing: Iterable[int]) -> None:
        """Raise if one of these peers will never come.

        Args:
            doing: What this rank waits in.
            owing: The peers that matter.

        Raises:
            PeerLostError: One has died, left the group, or failed in it.
        """
        with self._poll_lock:  # two threads may wait, for a collective and for a message
            died = {self._pidfds[fd] for fd, _ in self._poll.poll(0)}
        waiting = f"while rank {self.rank} waited for it in {doing}"
        lost: dict[int, str] = {}
        for peer in owing:
            state = self._words[self._lines[peer] + STATE]
            if state == JOINED and peer in died:
                raise PeerLostError(f"{self.who(peer)} died {waiting}; see its own error")
            if state == LEFT:
                lost[peer] = (
                    f"left the group (destroy_process_group, or an error before it) {waiting}"
                )
            elif state == FAILED:
                lost[peer] = f"failed in this group {waiting}; see its own error"
        # Who died or left is nearer to the cause than who failed because of that.
        for peer, what in sorted(lost.items(), key=lambda item: item[1].startswith("failed")):
            raise PeerLostError(f"{self.who(peer)} {what}")

    # ── the doorbell ─────────────────────────────────────────────────────────────────────

    def read_bell(self) -> int:
        """Return the doorbell's value: read it, look for work, then `await_bell` with it."""
        return self._words[self._lines[self.rank] + BELL]

    def await_bell(self, seen: int) -> None:
        """Sleep until someone rings after `seen` was read, or for 50 ms."""
        address = self.segment.address + 8 * (self._lines[self.rank] + BELL)
        futex.wait(address, seen, _SLICE_S)

    def ring(self, rank: int) -> None:
        """Ring a rank's doorbell."""
        futex.ring(self.segment.address + 8 * (self._lines[rank] + BELL))

    # ── the end ──────────────────────────────────────────────────────────────────────────

    def fail(self) -> None:
        """Tell the peers that this rank takes no further part."""
        self._leave(FAILED)

    def close(self) -> None:
        """Leave the group and let go of the peers. Safe to call twice."""
        self._leave(LEFT)
        pidfds, self._pidfds = self._pidfds, {}
        for pidfd in pidfds:
            self._poll.unregister(pidfd)
            os.close(pidfd)

    def _leave(self, state: int) -> None:
        index = self._lines[self.rank] + STATE
        if self._words[index] == JOINED:
            self._words[index] = state
            futex.wake_all(self._in_address)
            futex.wake_all(self._out_address)
            for peer in self._peers:
                self.ring(peer)

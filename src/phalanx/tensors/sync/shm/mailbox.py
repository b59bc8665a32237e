"""Messages between two ranks of a group: send and receive, in any order, without deadlock.

Each ordered pair has a ring of chunks. The sender counts what it put in, the receiver what it
took out. A message that nobody has asked for yet is moved out of the ring into memory of the
receiver's own, so a sender never blocks a later message, and two ranks that both send first
do not block each other. All of a rank's open messages are moved on together, by whoever is
there: the caller, a waiter, or a thread that is started when something stays open.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch

from phalanx.tensors.sync.shm.rounds import dense, empty_like, fill
from phalanx.tensors.sync.shm.segment import MAILBOX_HEADER, NUM_CHUNKS
from phalanx.tensors.sync.shm.work import PendingWork
from phalanx.values.errors import CallMismatchError, GroupError, GroupTimeoutError, PeerLostError

if TYPE_CHECKING:
    from phalanx.tensors.sync.shm.exchange import Exchange

# Words of a mailbox: the two counters in cache lines of their own, then three per chunk.
_PUT: Final = 0
_TAKEN: Final = 8
_CHUNKS: Final = 16
_WORDS_PER_CHUNK: Final = 3
_JOIN_S: Final = 5.0
_TAG_MASK: Final = 2**64 - 1


class MessageWork(PendingWork):
    """A message on its way: who waits for it moves all messages on meanwhile."""

    def __init__(self, tensors: list[torch.Tensor], mailboxes: Mailboxes) -> None:
        """Keep the tensors for the future's value."""
        super().__init__(tensors)
        self._mailboxes = mailboxes

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the message was sent or has come; errors as in `PendingWork`."""
        seconds = timeout.total_seconds()
        self._mailboxes.move_until(self, time.monotonic() + seconds if seconds > 0 else None)
        return super().wait(timeout)


@dataclass(slots=True, kw_only=True)
class _Send:
    work: MessageWork
    peer: int
    tag: int
    tensor: torch.Tensor
    until: float
    done: int = 0


@dataclass(slots=True, kw_only=True)
class _Receive:
    work: MessageWork
    peer: int | None
    tag: int
    tensor: torch.Tensor
    target: torch.Tensor
    until: float
    arrival: _Arrival | None = None


@dataclass(slots=True, kw_only=True)
class _Arrival:
    peer: int
    tag: int
    total: int
    memory: torch.Tensor
    done: int = 0
    receive: _Receive | None = None


@dataclass(slots=True)
class _Box:
    """One direction of a pair, as this rank sees it."""

    words: int
    address: int
    queue: deque[_Send] = field(default_factory=deque)
    arrival: _Arrival | None = None


class Mailboxes:
    """A rank's messages to and from its peers. Usable from any thread."""

    def __init__(self, exchange: Exchange) -> None:
        """Find the mailboxes in the group's segment."""
        self._exchange = exchange
        self._words = exchange.segment.words
        self._chunk_bytes = exchange.segment.layout.chunk_bytes
        self._out = {p: self._box(exchange.rank, p) for p in range(exchange.size)}
        self._in = {p: self._box(p, exchange.rank) for p in range(exchange.size)}
        self._receives: list[_Receive] = []
        self._arrived: list[_Arrival] = []
        self._lock = threading.RLock()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._closing = False

    def _box(self, source: int, destination: int) -> _Box:
        offset = self._exchange.segment.layout.mailbox(source, destination)
        return _Box(words=offset // 8, address=self._exchange.segment.address + offset)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout_s: float) -> MessageWork:
        """Send a tensor; it may be changed once the work is over, which may be at once."""
        work = MessageWork([tensor], self)
        until = time.monotonic() + timeout_s
        entry = _Send(work=work, peer=peer, tag=tag, tensor=dense(tensor), until=until)
        with self._lock:
            self._out[peer].queue.append(entry)
            self._move()
            self._leave_to_thread(work)
        return work

    def receive(
        self, tensor: torch.Tensor, peer: int | None, tag: int, timeout_s: float
    ) -> MessageWork:
        """Receive a tensor of the same size from a peer, or (None) from whoever sends first."""
        work = MessageWork([tensor], self)
        entry = _Receive(
            work=work,
            peer=peer,
            tag=tag,
            tensor=tensor,
            target=empty_like(tensor),
            until=time.monotonic() + timeout_s,
        )
        with self._lock:
            self._receives.append(entry)
            self._claim(entry)
            self._move()
            self._leave_to_thread(work)
        return work

    def move_until(self, work: MessageWork, until: float | None) -> None:
        """Move all messages on until one is over, or it is too late."""
        while not work.is_completed() and (until is None or time.monotonic() < until):
            bell = self._exchange.read_bell()
            with self._lock:
                moved = self._move()
            if not moved and not work.is_completed():
                self._exchange.await_bell(bell)
                self._look_up()

    def close(self) -> None:
        """End the thread; what is still open fails."""
        self._closing = True
        self._wanted.set()
        self._exchange.ring(self._exchange.rank)
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
        with self._lock:
            for entry in self._open():
                self._give_up(entry, PeerLostError("this rank's group was destroyed"))

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _leave_to_thread(self, work: MessageWork) -> None:
        if work.is_completed():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phalanx-messages", daemon=True)
            self._thread.start()
        self._wanted.set()

    def _run(self) -> None:
        while not self._closing:
            self._wanted.wait()
            bell = self._exchange.read_bell()
            with self._lock:
                moved = self._move()
                if not self._open():
                    self._wanted.clear()
                    continue
            if not moved:
                self._exchange.await_bell(bell)
                self._look_up()

    def _open(self) -> list[_Send | _Receive]:
        return [*self._receives, *(entry for box in self._out.values() for entry in box.queue)]

    def _look_up(self) -> None:
        """Fail the messages whose peer will not come, or that took too long."""
        with self._lock:
            for entry in self._open():
                name = "send" if isinstance(entry, _Send) else "recv"
                peers = [p for p in self._out if p != self._exchange.rank]
                whom = peers if entry.peer is None else [entry.peer]
                error = self._why_not(name, whom, entry.until)
                if error is not None:
                    self._give_up(entry, error)

    def _why_not(self, name: str, peers: list[int], until: float) -> GroupError | None:
        lost: list[GroupError] = []
        for peer in peers:
            try:
                self._exchange.check_peers(name, [peer])
            except PeerLostError as error:
                lost.append(error)
        if lost and len(lost) == len(peers):
            self._move()  # what it sent before it went
            return lost[0]
        if time.monotonic() > until:
            who = ", ".join(self._exchange.who(peer) for peer in peers)
            return GroupTimeoutError(f"{name} timed out: {who} did not come")
        return None

    def _give_up(self, entry: _Send | _Receive, error: GroupError) -> None:
        if entry.work.is_completed():
            return
        if isinstance(entry, _Send):
            self._out[entry.peer].queue.remove(entry)
        else:
            self._receives.remove(entry)
            if entry.arrival is not None:
                entry.arrival.receive = None
                entry.arrival = None
        entry.work.finish(error)

    # ── moving ───────────────────────────────────────────────────────────────────────────

    def _move(self) -> bool:
        """Move on what can be moved; return whether anything was."""
        moved = False
        for peer, box in self._in.items():
            while self._words[box.words + _PUT] > self._words[box.words + _TAKEN]:
                self._take(peer, box)
                moved = True
        for peer, box in self._out.items():
            while box.queue and (
                self._words[box.words + _PUT] - self._words[box.words + _TAKEN] < NUM_CHUNKS
            ):
                self._put(peer, box)
                moved = True
        return moved

    def _put(self, peer: int, box: _Box) -> None:
        entry = box.queue[0]
        number = self._words[box.words + _PUT]
        length = min(self._chunk_bytes, entry.tensor.nbytes - entry.done)
        head = box.words + _CHUNKS + number % NUM_CHUNKS * _WORDS_PER_CHUNK
        self._words[head] = entry.tag & _TAG_MASK
        self._words[head + 1] = entry.tensor.nbytes
        self._words[head + 2] = length
        place = box.address + MAILBOX_HEADER + number % NUM_CHUNKS * self._chunk_bytes
        ctypes.memmove(place, entry.tensor.data_ptr() + entry.done, length)
        self._words[box.words + _PUT] = number + 1
        self._exchange.ring(peer)
        entry.done += length
        if entry.done == entry.tensor.nbytes:
            box.queue.popleft()
            entry.work.finish()

    def _take(self, peer: int, box: _Box) -> None:
        number = self._words[box.words + _TAKEN]
        head = box.words + _CHUNKS + number % NUM_CHUNKS * _WORDS_PER_CHUNK
        tag, total, length = (self._words[head + i] for i in range(_WORDS_PER_CHUNK))
        arrival = box.arrival
        if arrival is None:
            arrival = box.arrival = self._begin_arrival(peer, tag, total)
        place = box.address + MAILBOX_HEADER + number % NUM_CHUNKS * self._chunk_bytes
        ctypes.memmove(arrival.memory.data_ptr() + arrival.done, place, length)
        self._words[box.words + _TAKEN] = number + 1
        self._exchange.ring(peer)
        arrival.done += length
        if arrival.done == total:
            box.arrival = None
            if arrival.receive is None:
                self._arrived.append(arrival)
            else:
                self._complete(arrival, arrival.receive)

    def _begin_arrival(self, peer: int, tag: int, total: int) -> _Arrival:
        """Put the message right where it is wanted, if it is."""
        for entry in self._receives:
            if entry.arrival is None and _fits(entry, peer, tag):
                wanted = entry.target if entry.target.nbytes == total else None
                memory = torch.empty(total, dtype=torch.uint8) if wanted is None else wanted
                arrival = _Arrival(peer=peer, tag=tag, total=total, memory=memory)
                arrival.receive, entry.arrival = entry, arrival
                return arrival
        memory = torch.empty(total, dtype=torch.uint8)
        return _Arrival(peer=peer, tag=tag, total=total, memory=memory)

    def _claim(self, entry: _Receive) -> None:
        """Match a new receive with the oldest message that has come, or is coming, for it."""
        for arrival in self._arrived:
            if _fits(entry, arrival.peer, arrival.tag):
                self._arrived.remove(arrival)
                self._complete(arrival, entry)
                return
        for peer, box in self._in.items():
            arrival_ = box.arrival
            if (
                arrival_ is not None
                and arrival_.receive is None
                and _fits(entry, peer, arrival_.tag)
            ):
                arrival_.receive, entry.arrival = entry, arrival_
                return

    def _complete(self, arrival: _Arrival, entry: _Receive) -> None:
        self._receives.remove(entry)
        entry.arrival = arrival.receive = None  # no cycle: it would keep the memory
        entry.work.source = arrival.peer
        if arrival.total != entry.target.nbytes:
            entry.work.finish(
                CallMismatchError(
                    f"rank {arrival.peer} sent {arrival.total:,} bytes where rank "
                    f"{self._exchange.rank} receives {entry.target.nbytes:,}; make shape and "
                    "dtype of both agree"
                )
            )
            return
        if arrival.memory is not entry.target:
            ctypes.memmove(entry.target.data_ptr(), arrival.memory.data_ptr(), arrival.total)
        if entry.target is not entry.tensor:
            fill(entry.tensor, entry.target)
        entry.work.finish()


def _fits(entry: _Receive, peer: int, tag: int) -> bool:
    return entry.peer in (None, peer) and entry.tag & _TAG_MASK == tag

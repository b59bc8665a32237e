"""The tensor store's table: who asks for what, who waits, who holds a key.

Lives in the agent, one per run, in its event loop; does no IO but through the descriptors
that it hands to `StoreClient.reply`. A value is bytes and a description; what they mean only
clients know.

Every change of a key goes through `_when_free`: while somebody holds the key (`Hold`, between
reading a value and putting what was made of it), others wait in line. Reading never waits for
a holder: it sees the old value until there is a new one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.system import kernel
from phalanx.tensors.store import refusals
from phalanx.tensors.store.entries import Entry, StoreClient, Value, Waiting
from phalanx.tensors.store.messages import (
    Commit,
    Delete,
    Done,
    Found,
    Get,
    GetCommitted,
    GiveBack,
    Has,
    Hold,
    Keys,
    LetGo,
    ListKeys,
    Put,
    Refused,
    Reserve,
    StoreRequest,
)
from phalanx.tensors.store.reservations import MisuseError, Reservations
from phalanx.tensors.store.segments import PoolFullError, SegmentPool
from phalanx.tensors.store.versions import Versions

if TYPE_CHECKING:
    from phalanx.tensors.store.entries import Timer


class TensorStore:
    """The values of one run."""

    def __init__(
        self,
        world_size: int,
        limit: int,
        call_later: Callable[[float, Callable[[], None]], Timer],
        who_is_alive: Callable[[], str],
    ) -> None:
        """Begin empty.

        Args:
            world_size: Number of ranks whose parts make a version whole.
            limit: Bytes that it may hold.
            call_later: Has a function called after so many seconds.
            who_is_alive: Says, for a person, who could still put something.
        """
        self._world_size = world_size
        # Descriptors must be left for readers, and for starting workers again.
        self._pool = SegmentPool(limit, max_segments=kernel.max_descriptors() // 2)
        self._call_later = call_later
        self._who_is_alive = who_is_alive
        self._entries: dict[str, Entry] = {}
        self._reserved = Reservations(self._pool)
        self._run_has_ended = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are in use, the pool's included."""
        return self._pool.num_bytes

    def handle(self, client: StoreClient, request: StoreRequest) -> None:
        """Do what a client asks, and answer it, now or when it is time."""
        try:
            self._handle(client, request)
        except MisuseError as error:
            client.reply(Refused(why="misuse", message=str(error)))

    def _handle(self, client: StoreClient, request: StoreRequest) -> None:
        match request:  # one arm per request
            case Reserve():
                self._reserve(client, request)
            case GiveBack(segment=number):
                self._pool.give_back(self._reserved.take(client, number))
                client.reply(Done())
            case Put():
                self._put(client, request)
            case Commit():
                self._commit(client, request)
            case Get(key=key, timeout_s=timeout_s):
                self._when_there(client, key, timeout_s, lambda: self._show(client, key))
            case GetCommitted():
                self._get_committed(client, request)
            case Hold():
                self._hold(client, request)
            case LetGo(key=key):
                client.reply(Done())
                self._let_go(self._entry(key), client)
            case Delete(key=key, timeout_s=timeout_s):
                self._when_free(client, key, timeout_s, lambda: self._delete(client, key))
            case Has(key=key):
                entry = self._entries.get(key)
                client.reply(Done(existed=entry is not None and entry.exists))
            case ListKeys():
                names = (key for key, entry in self._entries.items() if entry.exists)
                client.reply(Keys(names=tuple(sorted(names))))

    def forget(self, client: StoreClient) -> None:
        """A conversation has ended: what it held is free, what it wrote and did not put is gone."""
        self._reserved.forget(client)
        for key, entry in list(self._entries.items()):
            for waiting in [each for each in entry.waiting() if each.client is client]:
                self._stop_waiting(entry, waiting)
            if entry.holder is client:
                self._let_go(entry, client)
            self._tidy(key, entry)

    def begin_generation(self) -> None:
        """Versions that the fallen generation has not made whole can't become so."""
        for key, entry in list(self._entries.items()):
            if entry.versions is not None:
                self._drop(entry.versions.begin_generation())
                if entry.versions.newest_whole is None:
                    entry.versions = None
            self._tidy(key, entry)

    def end_run(self) -> None:
        """No worker will put anything any more: nobody needs to wait for one."""
        self._run_has_ended = True
        for key, entry in list(self._entries.items()):
            for waiting in list(entry.for_value):
                self._stop_waiting(entry, waiting)
                self._refuse_late(waiting.client, key)
            self._tidy(key, entry)

    def close(self) -> None:
        """Let go of all memory; readers keep what they have mapped."""
        for entry in self._entries.values():
            for waiting in entry.waiting():
                if waiting.timer is not None:
                    waiting.timer.cancel()
        self._entries.clear()
        self._reserved.clear()
        self._pool.close()

    # ── putting ──────────────────────────────────────────────────────────────────────────

    def _reserve(self, client: StoreClient, request: Reserve) -> None:
        try:
            reserved, fd = self._reserved.hand_out(client, request.num_bytes, request.mapped)
        except PoolFullError as error:
            client.reply(refusals.full(error))
        except OSError as error:
            client.reply(refusals.no_memory_file(request.num_bytes, error))
        else:
            client.reply(reserved, [fd])

    def _put(self, client: StoreClient, request: Put) -> None:
        def put() -> None:
            entry = self._entry(request.key)
            value = self._accept(client, request, replaced=entry.value)
            if value is None:
                return
            replaced, entry.value = entry.value, value
            self._drop([] if replaced is None else [replaced])
            another, fds = self._reserved.hand_out_another(client, request)
            client.reply(Done(existed=replaced is not None, another=another), fds)
            waiting, entry.for_value = entry.for_value, []
            for each in waiting:
                each.stop_timer()
                each.go_on()

        if request.holding:
            put()
            self._let_go(self._entry(request.key), client)
        else:
            self._when_free(client, request.key, request.timeout_s, put)

    def _commit(self, client: StoreClient, request: Commit) -> None:
        entry = self._entry(request.key)
        if entry.versions is None:
            entry.versions = Versions(world_size=self._world_size)
        versions = entry.versions
        if not versions.takes(request.version):
            raise MisuseError(
                f"version {request.version} of {request.key!r} is not newer than version "
                f"{versions.newest_whole}, which all ranks have committed: go on from that one "
                "(get_committed_tensors), or delete the key to begin anew"
            )
        value = self._accept(client, request)
        if value is not None:
            self._drop(versions.commit(request.version, request.rank, value))
            client.reply(Done())

    def _accept(
        self, client: StoreClient, request: Put | Commit, replaced: Value | None = None
    ) -> Value | None:
        """Make a value of what a client brought; if it does not fit, say so and return None."""
        value = Value(
            layout=request.layout, num_bytes=request.num_bytes, data=request.data, segment=None
        )
        leaving = 0 if replaced is None else replaced.inline_bytes
        try:
            self._pool.make_room(max(0, value.inline_bytes - leaving))
        except PoolFullError as error:
            client.reply(refusals.full(error))
            return None
        if request.data is None:
            value.segment = self._reserved.take(client, request.segment)
        self._pool.inline_bytes += value.inline_bytes
        return value

    def _delete(self, client: StoreClient, key: str) -> None:
        entry = self._entry(key)
        existed = entry.exists
        self._drop([] if entry.value is None else [entry.value])
        self._drop([] if entry.versions is None else entry.versions.clear())
        entry.value = entry.versions = None
        client.reply(Done(existed=existed))
        self._tidy(key, entry)

    def _drop(self, values: list[Value]) -> None:
        for value in values:
            self._pool.inline_bytes -= value.inline_bytes
            if value.segment is not None:
                self._pool.retire(value.segment)

    # ── getting ──────────────────────────────────────────────────────────────────────────

    def _show(self, client: StoreClient, key: str) -> None:
        value = self._entry(key).value
        assert value is not None  # noqa: S101 - see _when_there
        _reply_with(client, value)

    def _get_committed(self, client: StoreClient, request: GetCommitted) -> None:
        entry = self._entries.get(request.key)
        found = None if entry is None or entry.versions is None else entry.versions
        part = None if found is None else found.get(request.rank)
        if part is None:
            client.reply(Done(existed=False))
        else:
            _reply_with(client, part[1], part[0])

    # ── holding ──────────────────────────────────────────────────────────────────────────

    def _hold(self, client: StoreClient, request: Hold) -> None:
        key = request.key

        def hold() -> None:
            entry = self._entry(key)
            if entry.value is None and not request.may_be_missing:
                # Let others put it meanwhile, and get in line again when it has come.
                self._when_there(client, key, request.timeout_s, wait_in_line)
                return
            entry.holder = client
            if entry.value is None:
                client.reply(Done(existed=False))
            else:
                _reply_with(client, entry.value)

        def wait_in_line() -> None:
            self._when_free(client, key, request.timeout_s, hold)

        wait_in_line()

    def _let_go(self, entry: Entry, client: StoreClient) -> None:
        """Let those in line go on, until one of them holds the key."""
        if entry.holder is client:
            entry.holder = None
        while entry.in_line and entry.holder is None:
            waiting = entry.in_line.popleft()
            waiting.stop_timer()
            waiting.go_on()

    # ── waiting ──────────────────────────────────────────────────────────────────────────

    def _when_free(
        self, client: StoreClient, key: str, timeout_s: float | None, go_on: Callable[[], None]
    ) -> None:
        """Go on once nobody holds the key, in the order of coming."""
        entry = self._entry(key)
        if entry.holder is None:
            go_on()
            return
        holder = entry.holder

        def give_up() -> None:
            self._stop_waiting(entry, waiting)
            client.reply(refusals.still_held(key, timeout_s, holder.name))

        waiting = Waiting(client=client, go_on=go_on)
        if timeout_s is not None:
            waiting.timer = self._call_later(timeout_s, give_up)
        entry.in_line.append(waiting)

    def _when_there(
        self, client: StoreClient, key: str, timeout_s: float | None, go_on: Callable[[], None]
    ) -> None:
        """Go on once the key has a value."""
        entry = self._entry(key)
        if entry.value is not None:
            go_on()
            return
        if timeout_s == 0 or self._run_has_ended:
            self._tidy(key, entry)
            self._refuse_late(client, key, timeout_s)
            return

        def give_up() -> None:
            self._stop_waiting(entry, waiting)
            self._tidy(key, entry)
            self._refuse_late(client, key, timeout_s)

        waiting = Waiting(client=client, go_on=go_on)
        if timeout_s is not None:
            waiting.timer = self._call_later(timeout_s, give_up)
        entry.for_value.append(waiting)

    def _stop_waiting(self, entry: Entry, waiting: Waiting) -> None:
        waiting.stop_timer()
        for line in (entry.in_line, entry.for_value):
            if waiting in line:
                line.remove(waiting)

    def _refuse_late(self, client: StoreClient, key: str, timeout_s: float | None = None) -> None:
        if self._run_has_ended:
            timeout_s = None  # it was not waited for
        there = sorted(name for name, entry in self._entries.items() if entry.value is not None)
        client.reply(refusals.nobody_put(key, timeout_s, there, self._who_is_alive()))

    # ── the table ────────────────────────────────────────────────────────────────────────

    def _entry(self, key: str) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry()
        return entry

    def _tidy(self, key: str, entry: Entry) -> None:
        if not entry.needed:
            self._entries.pop(key, None)


def _reply_with(client: StoreClient, value: Value, version: int = 0) -> None:
    found = Found(layout=value.layout, num_bytes=value.num_bytes, data=value.data, version=version)
    if value.segment is None:
        client.reply(found)
        return
    try:
        fd = kernel.reopen(value.segment.fd, os.O_RDONLY)
    except OSError as error:
        client.reply(refusals.no_memory_file(value.num_bytes, error))
    else:
        client.reply(found, [fd])

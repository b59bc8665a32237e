"""The store's table, with clients on paper and a clock that stands still."""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phalanx.tensors.store import messages as m
from phalanx.tensors.store.server import TensorStore

LIMIT = 10 << 20


class Timers:
    """Has functions called when a test says that time has passed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pending: list[tuple[float, object, list[bool]]] = []

    def call_later(self, delay: float, function):
        alive = [True]
        self.pending.append((self.now + delay, function, alive))

        class Handle:
            def cancel(self) -> None:
                alive[0] = False

        return Handle()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = [each for each in self.pending if each[0] <= self.now and each[2][0]]
        self.pending = [each for each in self.pending if each not in due and each[2][0]]
        for _, function, _ in sorted(due, key=lambda each: each[0]):
            function()


class Client:
    def __init__(self, name: str = "rank 0") -> None:
        self.name = name
        self.process = name
        self.replies: list[m.StoreReply] = []
        self.fds: list[int] = []

    def reply(self, reply, fds=()) -> None:
        self.replies.append(reply)
        self.fds.extend(fds)

    def take(self) -> m.StoreReply | None:
        return self.replies.pop(0) if self.replies else None

    def hang_up(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


@pytest.fixture
def timers():
    return Timers()


@pytest.fixture
def store(timers):
    store = TensorStore(2, LIMIT, timers.call_later, lambda: "alive: rank(s) 0 of 2")
    yield store
    store.close()


@pytest.fixture
def clients():
    clients = [Client("rank 0"), Client("rank 1"), Client("the launcher")]
    yield clients
    for client in clients:
        client.hang_up()


def put(key: str, data: bytes = b"x", **fields) -> m.Put:
    return m.Put(key=key, layout=b"L", num_bytes=len(data), data=data, **fields)


def ask(store, client, request):
    store.handle(client, request)
    return client.take()


def test_what_was_put_last_is_found(store, clients):
    a, b, _ = clients
    assert ask(store, a, put("k", b"one")) == m.Done(existed=False)
    assert ask(store, b, put("k", b"two")) == m.Done(existed=True)
    assert ask(store, a, m.Get(key="k")).data == b"two"


def test_get_waits_for_the_key(store, clients):
    a, b, _ = clients
    assert ask(store, a, m.Get(key="k", timeout_s=5)) is None
    ask(store, b, put("k", b"here"))
    assert a.take().data == b"here"


def test_get_gives_up_and_names_near_keys_and_who_is_alive(store, clients, timers):
    a, b, _ = clients
    ask(store, b, put("weights"))
    ask(store, a, m.Get(key="weigths", timeout_s=5))
    timers.pass_time(5)
    refused = a.take()
    assert refused.why == "timeout"
    for part in ("'weigths'", "within 5 s", "'weights'", "alive: rank(s) 0 of 2"):
        assert part in refused.message
    ask(store, b, put("weigths"))
    assert a.take() is None


def test_get_without_patience(store, clients):
    assert ask(store, clients[0], m.Get(key="k", timeout_s=0)).why == "timeout"


def test_after_the_run_nobody_waits(store, clients):
    a, _, launcher = clients
    ask(store, launcher, m.Get(key="k", timeout_s=100))
    ask(store, a, put("other"))
    store.end_run()
    assert launcher.take().why == "timeout"
    assert ask(store, launcher, m.Get(key="k", timeout_s=100)).why == "timeout"
    assert ask(store, launcher, m.Get(key="other")).data == b"x"


def test_updates_of_a_key_follow_each_other(store, clients):
    a, b, c = clients
    ask(store, a, put("k", b"0"))
    assert ask(store, a, m.Hold(key="k")).data == b"0"
    assert ask(store, b, m.Hold(key="k")) is None
    assert ask(store, c, put("k", b"9")) is None
    assert ask(store, c, m.Get(key="k")).data == b"0", "readers don't wait"
    ask(store, a, put("k", b"1", holding=True))
    assert b.take().data == b"1"
    assert c.take() is None
    ask(store, b, m.LetGo(key="k"))
    assert c.take() == m.Done(existed=True)
    assert ask(store, a, m.Get(key="k")).data == b"9"


def test_a_holder_that_dies_leaves_the_old_value_and_frees_the_key(store, clients):
    a, b, _ = clients
    ask(store, a, put("k", b"old"))
    ask(store, a, m.Hold(key="k"))
    ask(store, b, m.Hold(key="k"))
    store.forget(a)
    assert b.take().data == b"old"


def test_one_in_line_that_dies_is_passed_over(store, clients):
    a, b, c = clients
    ask(store, a, put("k"))
    ask(store, a, m.Hold(key="k"))
    ask(store, b, m.Hold(key="k"))
    ask(store, c, m.Hold(key="k"))
    store.forget(b)
    ask(store, a, m.LetGo(key="k"))
    assert isinstance(c.take(), m.Found)


def test_holding_a_key_that_is_not_there(store, clients):
    a, b, _ = clients
    assert ask(store, a, m.Hold(key="k")) is None, "an update needs a value"
    assert ask(store, b, m.Hold(key="k", may_be_missing=True)) == m.Done(existed=False)
    ask(store, b, put("k", b"1", holding=True))
    assert a.take().data == b"1"


def test_a_key_that_is_not_let_go_in_time(store, clients, timers):
    a, b, _ = clients
    ask(store, a, put("k"))
    ask(store, a, m.Hold(key="k"))
    ask(store, b, put("k", timeout_s=3))
    timers.pass_time(3)
    refused = b.take()
    assert refused.why == "timeout"
    assert "rank 0 is in update_tensor" in refused.message
    assert ask(store, a, m.LetGo(key="k")) == m.Done()


def test_deleting(store, clients):
    a = clients[0]
    ask(store, a, put("k"))
    ask(store, a, m.Commit(key="k", version=1, rank=0, layout=b"", num_bytes=1, data=b"x"))
    assert ask(store, a, m.ListKeys()).names == ("k",)
    assert ask(store, a, m.Delete(key="k")) == m.Done(existed=True)
    assert ask(store, a, m.Delete(key="k")) == m.Done(existed=False)
    assert ask(store, a, m.Has(key="k")) == m.Done(existed=False)
    assert store.num_bytes == 0


def test_a_full_store_says_so_and_loses_nothing(store, clients):
    a, b, _ = clients
    ask(store, a, put("old", b"kept"))
    refused = ask(store, a, m.Reserve(num_bytes=LIMIT + 1))
    assert refused.why == "full"
    assert f"{LIMIT:,}" in refused.message
    big = bytes(LIMIT // 2)
    ask(store, a, put("big", big))
    assert ask(store, a, put("more", big)).why == "full"
    assert ask(store, a, put("big", bytes(LIMIT // 2 + 5))) == m.Done(existed=True)
    assert ask(store, b, m.Get(key="old")).data == b"kept"


def test_segments_travel_from_writer_to_reader(store, clients):
    a, b, _ = clients
    reserved = ask(store, a, m.Reserve(num_bytes=100_000))
    os.pwrite(a.fds[0], b"y" * 100_000, 0)
    segment = reserved.segment
    ask(store, a, m.Put(key="k", layout=b"L", num_bytes=100_000, segment=segment))
    found = ask(store, b, m.Get(key="k"))
    assert found.data is None
    assert os.pread(b.fds[0], 100_000, 0) == b"y" * 100_000
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(b.fds[0], b"z", 0)


def test_a_segment_is_written_again_only_when_nobody_reads_it(store, clients):
    a, b, _ = clients
    segments = []
    for _ in range(3):
        reserved = ask(store, a, m.Reserve(num_bytes=1 << 20))
        segments.append(reserved.segment)
        put_it = m.Put(key="k", layout=b"", num_bytes=1 << 20, segment=reserved.segment)
        ask(store, a, put_it)
        if len(segments) == 1:
            ask(store, b, m.Get(key="k"))  # and keeps the descriptor
    assert len(set(segments)) == 3
    b.hang_up()
    again = ask(store, a, m.Reserve(num_bytes=1 << 20))
    assert again.segment in segments[:2]
    assert not again.fresh


def test_what_a_dead_writer_had_reserved_is_free(store, clients):
    a, b, _ = clients
    for _ in range(20):
        assert isinstance(ask(store, a, m.Reserve(num_bytes=LIMIT // 2)), m.Reserved)
        store.forget(a)
    assert isinstance(ask(store, b, m.Reserve(num_bytes=LIMIT // 2)), m.Reserved)


def test_foreign_segments_are_refused(store, clients):
    a, b, _ = clients
    reserved = ask(store, a, m.Reserve(num_bytes=100_000))
    put_it = m.Put(key="k", layout=b"", num_bytes=100_000, segment=reserved.segment)
    assert ask(store, b, put_it).why == "misuse"
    assert ask(store, b, m.GiveBack(segment=reserved.segment)).why == "misuse"
    assert ask(store, a, put_it) == m.Done(existed=False)


def test_memory_goes_back_to_the_system(store, clients):
    a = clients[0]
    for number in range(8):
        reserved = ask(store, a, m.Reserve(num_bytes=1 << 20))
        put_it = m.Put(key=str(number), layout=b"", num_bytes=1, segment=reserved.segment)
        ask(store, a, put_it)
    for number in range(8):
        ask(store, a, m.Delete(key=str(number)))
    assert store.num_bytes <= LIMIT // 4
    mapped = tuple(range(8))
    reserved = ask(store, a, m.Reserve(num_bytes=1 << 20, mapped=mapped))
    assert len(reserved.gone) >= 5


# ── versions ─────────────────────────────────────────────────────────────────────────────


def commit(store, client, version: int, rank: int, data: bytes):
    request = m.Commit(
        key="state", version=version, rank=rank, layout=b"", num_bytes=len(data), data=data
    )
    return ask(store, client, request)


def newest(store, client, rank: int = 0):
    reply = ask(store, client, m.GetCommitted(key="state", rank=rank))
    return (reply.version, reply.data) if isinstance(reply, m.Found) else None


def test_a_version_is_whole_when_all_ranks_have_committed_it(store, clients):
    a, b, _ = clients
    assert newest(store, a) is None
    commit(store, a, 10, 0, b"a10")
    assert newest(store, a) is None
    assert ask(store, a, m.Has(key="state")) == m.Done(existed=False)
    commit(store, b, 10, 1, b"b10")
    commit(store, a, 20, 0, b"a20")
    assert newest(store, a, 0) == (10, b"a10")
    assert newest(store, b, 1) == (10, b"b10")
    commit(store, b, 20, 1, b"b20")
    assert newest(store, b, 1) == (20, b"b20")


def test_a_version_never_mixes_generations(store, clients):
    a, b, _ = clients
    commit(store, a, 10, 0, b"a10")
    commit(store, b, 10, 1, b"b10")
    commit(store, a, 20, 0, b"of the fallen generation")
    store.begin_generation()
    commit(store, b, 20, 1, b"b20")
    assert newest(store, a) == (10, b"a10")
    commit(store, a, 20, 0, b"a20")
    assert newest(store, a) == (20, b"a20")


def test_an_old_version_is_refused(store, clients):
    a, b, _ = clients
    commit(store, a, 10, 0, b"a10")
    commit(store, b, 10, 1, b"b10")
    refused = commit(store, a, 10, 0, b"again")
    assert refused.why == "misuse"
    assert "version 10" in refused.message
    ask(store, a, m.Delete(key="state"))
    assert commit(store, a, 1, 0, b"anew") == m.Done()


def test_old_versions_take_no_memory(store, clients):
    a, b, _ = clients
    for version in range(200):
        commit(store, a, version, 0, bytes(100_000))
        commit(store, b, version, 1, bytes(100_000))
    assert store.num_bytes < 500_000


# ── any order of things ──────────────────────────────────────────────────────────────────


class StoreMachine(RuleBasedStateMachine):
    """Three clients that do one thing after another, against a plain dict."""

    keys = st.sampled_from(["a", "b", "c"])
    who = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.timers = Timers()
        self.store = TensorStore(2, LIMIT, self.timers.call_later, lambda: "nobody")
        self.clients = [Client(f"rank {n}") for n in range(3)]
        self.model: dict[str, bytes] = {}
        self.holders: dict[str, int] = {}
        self.counter = 0

    def idle(self, who: int) -> bool:
        return who not in self.holders.values()

    def fresh_value(self) -> bytes:
        self.counter += 1
        return str(self.counter).encode()

    def ask(self, who: int, request):
        return ask(self.store, self.clients[who], request)

    @rule(key=keys, who=who, large=st.booleans())
    def put(self, key, who, large):
        if not self.idle(who) or key in self.holders:
            return
        value = self.fresh_value()
        if large:
            reserved = self.ask(who, m.Reserve(num_bytes=100_000))
            os.pwrite(self.clients[who].fds[-1], value, 0)
            os.close(self.clients[who].fds.pop())
            request = m.Put(key=key, layout=b"", num_bytes=len(value), segment=reserved.segment)
            reply = self.ask(who, request)
        else:
            reply = self.ask(who, put(key, value))
        assert reply == m.Done(existed=key in self.model)
        self.model[key] = value

    @rule(key=keys, who=who)
    def get(self, key, who):
        reply = self.ask(who, m.Get(key=key, timeout_s=0))
        if key not in self.model:
            assert reply.why == "timeout"
            return
        if reply.data is None:
            fd = self.clients[who].fds.pop()
            data = os.pread(fd, reply.num_bytes, 0)
            os.close(fd)
        else:
            data = reply.data
        assert data == self.model[key]

    @rule(key=keys, who=who)
    def hold(self, key, who):
        if self.idle(who) and key not in self.holders:
            reply = self.ask(who, m.Hold(key=key, may_be_missing=True))
            assert isinstance(reply, m.Found if key in self.model else m.Done)
            self.clients[who].hang_up()
            self.holders[key] = who

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish_update(self, data):
        key = data.draw(st.sampled_from(sorted(self.holders)))
        who, value = self.holders.pop(key), self.fresh_value()
        assert isinstance(self.ask(who, put(key, value, holding=True)), m.Done)
        self.model[key] = value

    @rule(who=who)
    def die(self, who):
        self.store.forget(self.clients[who])
        self.clients[who].hang_up()
        self.clients[who] = Client(f"rank {who}")
        self.holders = {key: holder for key, holder in self.holders.items() if holder != who}

    @rule(key=keys, who=who)
    def delete(self, key, who):
        if self.idle(who) and key not in self.holders:
            reply = self.ask(who, m.Delete(key=key))
            assert reply == m.Done(existed=self.model.pop(key, None) is not None)

    @invariant()
    def keys_are_the_models(self):
        spectator = Client("spectator")
        assert ask(self.store, spectator, m.ListKeys()).names == tuple(sorted(self.model))

    def teardown(self):
        for client in self.clients:
            self.store.forget(client)
            client.hang_up()
        spectator = Client("spectator")
        for key in list(self.model):
            ask(self.store, spectator, m.Delete(key=key))
        assert self.store.num_bytes <= LIMIT // 4
        self.store.close()


TestAnyOrder = StoreMachine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def put_large(store, client, key, num_bytes, segment=None):
    if segment is None:
        segment = ask(store, client, m.Reserve(num_bytes=num_bytes)).segment
    return ask(
        store,
        client,
        m.Put(key=key, layout=b"L", num_bytes=num_bytes, segment=segment, another=True),
    )


def test_a_put_is_answered_with_the_next_segment(store, clients):
    a, _, _ = clients
    done = put_large(store, a, "k", LIMIT // 32)
    assert done.another is not None
    again = put_large(store, a, "k", LIMIT // 32, done.another.segment)
    assert again.existed
    assert again.another is not None
    assert again.another.segment != done.another.segment
    assert len(a.fds) == 3
    before = store.num_bytes
    store.forget(a)
    assert ask(store, a, m.Reserve(num_bytes=LIMIT // 32)).segment == again.another.segment
    assert store.num_bytes == before


def test_what_is_handed_out_ahead_is_a_small_part_of_the_limit(store, clients):
    a, b, c = clients
    assert put_large(store, a, "a", LIMIT // 15).another is None
    assert put_large(store, a, "a", LIMIT // 20).another is not None
    assert put_large(store, b, "b", LIMIT // 20).another is None
    assert put_large(store, c, "c", LIMIT // 100).another is not None

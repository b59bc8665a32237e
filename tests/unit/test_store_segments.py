"""The pool of shared segments: sizes, reuse, the limit, and who still reads."""

from __future__ import annotations

import ctypes
import mmap
import os

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phalanx.system import kernel
from phalanx.tensors.store.segments import PoolFullError, Segment, SegmentPool

PAGE = 4096
MIB = 1 << 20

needs_leases = pytest.mark.skipif(not kernel.HAS_LEASES, reason="needs leases and memfd")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Reader:
    """Maps a segment as another process would: privately, from a reopening.

    By hand, because Python's own `mmap` holds a descriptor besides the mapping.
    """

    def __init__(self, segment: Segment) -> None:
        self.num_bytes = segment.num_bytes
        fd = kernel.reopen(segment.fd, os.O_RDONLY)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self.address = _libc.mmap(None, self.num_bytes, protection, mmap.MAP_PRIVATE, fd, 0)
        os.close(fd)
        assert self.address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())

    def read(self, num_bytes: int) -> bytes:
        return ctypes.string_at(self.address, num_bytes)

    def unmap(self) -> None:
        assert _libc.munmap(self.address, self.num_bytes) == 0


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def pool():
    pool = SegmentPool(limit=64 * MIB)
    yield pool
    pool.close()


# ── sizes ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (1, PAGE),
        (PAGE, PAGE),
        (PAGE + 1, 2 * PAGE),
        (65_536, 65_536),
        (65_537, 65_536 + 8_192),
        (MIB - 1, MIB),
        (MIB, MIB),
        (MIB + 1, MIB + MIB // 8),
        (MIB + MIB // 8 + 1, MIB + MIB // 4),
        (2 * MIB - 1, 2 * MIB),
        (2 * MIB + 1, 2 * MIB + MIB // 4),
    ],
)
def test_a_segment_has_one_of_eight_sizes_per_doubling(pool, asked, got):
    segment = pool.take(asked, "a")
    assert segment.num_bytes == got
    assert os.fstat(segment.fd).st_size == got
    assert pool.num_bytes == got


def test_sizes_are_enough_and_waste_at_most_an_eighth(pool):
    sizes = set()
    for asked in range(PAGE, 2 * MIB, 10_007):
        segment = pool.take(asked, "a")
        assert asked <= segment.num_bytes
        assert segment.num_bytes - asked <= max(PAGE, asked / 8)
        sizes.add(segment.num_bytes)
        pool.give_back(segment)
    assert len(sizes) <= 8 * 9


# ── reuse ────────────────────────────────────────────────────────────────────────────────


def test_a_segment_given_back_is_taken_again(pool):
    segment = pool.take(100_000, "a")
    os.pwrite(segment.fd, b"pages", 0)
    pool.give_back(segment)
    again = pool.take(99_000, "b")
    assert again is segment
    assert again.last_writer == "b"
    assert pool.num_bytes == segment.num_bytes
    assert pool.take(99_000, "b") is not segment


def test_another_size_gets_another_segment(pool):
    segment = pool.take(100_000, "a")
    pool.give_back(segment)
    assert pool.take(200_000, "a") is not segment
    assert pool.take(50_000, "a") is not segment
    assert pool.take(100_000, "a") is segment


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "a", "c")])
def test_a_writer_gets_what_it_wrote_before(pool, order):
    last = {writer: pool.take(MIB, writer) for writer in "abc"}
    for writer in order:
        pool.give_back(last[writer])
    for writer in "abc":
        assert pool.take(MIB, writer) is last[writer]


def test_a_new_writer_gets_what_was_used_last(pool):
    first, second = pool.take(MIB, "a"), pool.take(MIB, "b")
    pool.give_back(second)
    pool.give_back(first)
    assert pool.take(MIB, "c") is first
    assert pool.take(MIB, "c") is second


def test_numbers_are_never_used_twice(pool):
    seen = set()
    for _ in range(5):
        segments = [pool.take(8 * MIB, "a") for _ in range(8)]
        seen.update(segment.number for segment in segments)
        for segment in segments:
            pool.give_back(segment)
    assert len(seen) == 8 + 4 * 6, "two are kept each time, six are new"


def test_which_segments_exist(pool):
    segments = [pool.take(8 * MIB, "a") for _ in range(8)]
    assert all(pool.exists(segment.number) for segment in segments)
    assert not pool.exists(1234)
    for segment in segments:
        pool.give_back(segment)
    assert [pool.exists(segment.number) for segment in segments] == [False] * 6 + [True] * 2
    assert [is_open(segment.fd) for segment in segments] == [False] * 6 + [True] * 2


def test_a_segment_is_fresh_until_a_value_was_in_it(pool):
    segment = pool.take(MIB, "a")
    assert segment.fresh
    pool.retire(segment)
    assert not segment.fresh


# ── readers ──────────────────────────────────────────────────────────────────────────────


@needs_leases
def test_a_retired_segment_without_readers_comes_back(pool):
    segment = pool.take(MIB, "a")
    pool.retire(segment)
    assert pool.take(MIB, "a") is segment


@needs_leases
def test_a_retired_segment_comes_back_when_nobody_maps_it(pool):
    segment = pool.take(MIB, "a")
    os.pwrite(segment.fd, b"value", 0)
    reader = Reader(segment)
    pool.retire(segment)
    others = [pool.take(MIB, "a") for _ in range(3)]
    assert segment not in others
    assert reader.read(5) == b"value"
    reader.unmap()
    assert pool.take(MIB, "a") is segment


@needs_leases
def test_a_descriptor_on_its_way_counts_as_a_reader(pool):
    segment = pool.take(MIB, "a")
    fd = kernel.reopen(segment.fd, os.O_RDONLY)
    pool.retire(segment)
    assert pool.take(MIB, "a") is not segment
    os.close(fd)
    assert pool.take(MIB, "a") is segment


@needs_leases
def test_every_reader_counts(pool):
    segment = pool.take(MIB, "a")
    readers = [Reader(segment), Reader(segment)]
    pool.retire(segment)
    readers.pop().unmap()
    assert pool.take(MIB, "a") is not segment
    readers.pop().unmap()
    assert pool.take(MIB, "a") is segment


@needs_leases
def test_the_writers_own_mapping_is_no_reader(pool):
    segment = pool.take(MIB, "a")
    with mmap.mmap(segment.fd, MIB, flags=mmap.MAP_SHARED):
        pool.retire(segment)
        assert pool.take(MIB, "a") is segment


@needs_leases
def test_many_readers_do_not_hide_a_segment_that_is_free(pool):
    """A take asks about a few retired ones only, and about others the next time."""
    read = [pool.take(MIB, "a") for _ in range(20)]
    readers = [Reader(segment) for segment in read]
    free = pool.take(MIB, "a")
    for segment in [*read, free]:
        pool.retire(segment)
    for _ in range(3):
        if pool.take(MIB, "a") is free:
            break
    else:
        pytest.fail("it was not found")
    for reader in readers:
        reader.unmap()


# ── the limit ────────────────────────────────────────────────────────────────────────────


def test_beyond_the_limit_nothing_is_handed_out(pool):
    taken = [pool.take(16 * MIB, "a") for _ in range(4)]
    assert pool.num_bytes == pool.limit
    before = open_fds()
    with pytest.raises(PoolFullError) as caught:
        pool.take(1, "b")
    num_bytes, balance = caught.value.args
    assert num_bytes == PAGE
    assert f"the limit is {64 * MIB:,} bytes" in balance
    assert f"values have {64 * MIB:,}" in balance
    assert balance.endswith("still reads 0")
    assert open_fds() == before
    assert pool.num_bytes == pool.limit
    pool.give_back(taken[0])
    assert pool.take(16 * MIB, "b") is taken[0]


@needs_leases
def test_the_balance_tells_values_from_what_is_still_read(pool):
    value, read = pool.take(32 * MIB, "a"), pool.take(24 * MIB, "a")
    pool.inline_bytes = 1_000
    reader = Reader(read)
    pool.retire(read)
    with pytest.raises(PoolFullError) as caught:
        pool.take(10 * MIB, "a")
    _, balance = caught.value.args
    assert f"values have {value.num_bytes + 1_000:,}, " in balance
    assert balance.endswith(f"still reads {24 * MIB:,}")
    reader.unmap()
    assert pool.take(10 * MIB, "a").num_bytes == 10 * MIB


def test_near_the_limit_a_segment_is_as_small_as_it_may_be(pool):
    pool.take(56 * MIB, "a")
    pool.take(4 * MIB - 64 * PAGE, "a")
    pool.inline_bytes = 60 * PAGE
    asked = 4 * MIB + 3 * PAGE - 17
    assert pool.take(asked, "a").num_bytes == 4 * MIB + 3 * PAGE


def test_a_segment_as_small_as_it_may_be_is_taken_again(pool):
    pool.take(56 * MIB, "a")
    pool.inline_bytes = 5 * PAGE
    segment = pool.take(8 * MIB - 6 * PAGE, "a")
    assert segment.num_bytes == 8 * MIB - 6 * PAGE
    pool.give_back(segment)
    assert pool.take(8 * MIB - 6 * PAGE, "a") is segment


@needs_leases
def test_what_was_read_for_long_is_trimmed_by_the_next_take(pool):
    segments = [pool.take(8 * MIB, "a") for _ in range(6)]
    readers = [Reader(segment) for segment in segments]
    for segment in segments:
        pool.retire(segment)
    assert pool.num_bytes == 48 * MIB
    for reader in readers:
        reader.unmap()
    pool.take(PAGE, "a")
    assert pool.num_bytes == 16 * MIB + PAGE, "a quarter is kept"


def test_the_smallest_that_would_do_is_refused_if_it_does_not_fit(pool):
    pool.take(32 * MIB, "a")
    pool.take(28 * MIB, "a")
    pool.inline_bytes = 4 * MIB - PAGE
    with pytest.raises(PoolFullError):
        pool.take(PAGE + 1, "a")
    assert pool.take(PAGE, "a").num_bytes == PAGE


def test_values_without_a_segment_count(pool):
    pool.inline_bytes = 64 * MIB - PAGE
    assert pool.num_bytes == 64 * MIB - PAGE
    with pytest.raises(PoolFullError):
        pool.take(2 * PAGE, "a")
    assert pool.take(PAGE, "a").num_bytes == PAGE
    with pytest.raises(PoolFullError):
        pool.make_room(1)


def test_room_is_made_of_pooled_segments(pool):
    free = pool.take(16 * MIB, "a")
    value = pool.take(40 * MIB, "a")
    pool.give_back(free)
    pool.make_room(8 * MIB)
    assert pool.exists(free.number), "there is room enough"
    pool.make_room(8 * MIB + 1)
    assert not pool.exists(free.number)
    assert pool.num_bytes == value.num_bytes
    pool.make_room(24 * MIB)
    with pytest.raises(PoolFullError):
        pool.make_room(24 * MIB + 1)


def test_taking_another_size_drops_pooled_segments_for_room(pool):
    free = [pool.take(8 * MIB, "a"), pool.take(7 * MIB, "a")]
    pool.take(48 * MIB, "a")
    for segment in free:
        pool.give_back(segment)
    assert pool.take(9 * MIB, "a").num_bytes == 9 * MIB
    assert not pool.exists(free[0].number), "the size that was not used for the longest time"
    assert pool.exists(free[1].number)
    assert pool.num_bytes == pool.limit


@needs_leases
def test_room_is_made_of_all_retired_segments_that_nobody_reads(pool):
    segments = [pool.take(2 * MIB, "a") for _ in range(32)]
    readers = [Reader(segment) for segment in segments]
    for segment in segments:
        pool.retire(segment)
    assert pool.num_bytes == pool.limit
    with pytest.raises(PoolFullError):
        pool.make_room(1)
    for reader in readers:
        reader.unmap()
    pool.make_room(64 * MIB)
    assert pool.num_bytes == 0


def test_at_most_a_quarter_of_the_limit_is_kept(pool):
    segments = [pool.take(3 * MIB, "a") for _ in range(20)]
    for segment in segments[:5]:
        pool.give_back(segment)
    assert pool.num_bytes == 60 * MIB, "up to a quarter stays"
    for segment in segments[5:]:
        pool.give_back(segment)
    assert pool.num_bytes == 15 * MIB


@needs_leases
def test_at_most_a_quarter_of_the_limit_is_kept_of_what_was_retired(pool):
    segments = [pool.take(3 * MIB, "a") for _ in range(20)]
    for segment in segments:
        pool.retire(segment)
    assert pool.num_bytes == 15 * MIB


def test_a_segment_larger_than_what_is_kept_goes_at_once(pool):
    segment = pool.take(17 * MIB, "a")
    pool.give_back(segment)
    assert pool.num_bytes == 0
    assert not is_open(segment.fd)


def test_dropping_returns_the_memory_though_a_writer_has_it_mapped(pool):
    segment = pool.take(17 * MIB, "a")
    fd = os.dup(segment.fd)
    with mmap.mmap(fd, segment.num_bytes, flags=mmap.MAP_SHARED) as kept:
        kept[:MIB] = b"x" * MIB
        assert os.fstat(fd).st_blocks * 512 >= MIB
        pool.give_back(segment)
        assert os.fstat(fd).st_blocks == 0
        assert os.fstat(fd).st_size == 0
    os.close(fd)


@needs_leases
def test_what_somebody_reads_is_never_dropped(pool):
    read = pool.take(40 * MIB, "a")
    os.pwrite(read.fd, b"value", 0)
    reader = Reader(read)
    pool.retire(read)
    pool.give_back(pool.take(20 * MIB, "a"))
    with pytest.raises(PoolFullError):
        pool.take(30 * MIB, "a")
    assert pool.exists(read.number)
    assert reader.read(5) == b"value"
    reader.unmap()


def test_no_file_to_be_had(pool, monkeypatch):
    def none_left(fd: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    before = open_fds()
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", none_left)
        with pytest.raises(OSError, match="No space"):
            pool.take(MIB, "a")
    assert open_fds() == before
    assert pool.num_bytes == 0
    assert pool.take(64 * MIB, "a").num_bytes == 64 * MIB


# ── the end ──────────────────────────────────────────────────────────────────────────────


def test_close_leaves_no_descriptor():
    before = open_fds()
    pool = SegmentPool(limit=64 * MIB)
    value, free, retired, read = (pool.take(MIB, "a") for _ in range(4))
    os.pwrite(read.fd, b"value", 0)
    reader = Reader(read)
    pool.give_back(free)
    pool.retire(retired)
    pool.retire(read)
    pool.inline_bytes = 5
    pool.close()
    assert open_fds() == before
    assert not is_open(value.fd)
    assert pool.num_bytes == 0
    assert not pool.exists(value.number)
    assert reader.read(5) == b"value", "whoever has it mapped keeps it"
    reader.unmap()
    pool.close()


# ── kernels without leases ───────────────────────────────────────────────────────────────


def test_without_leases_a_retired_segment_is_never_written_again(pool, monkeypatch):
    monkeypatch.setattr(kernel, "HAS_LEASES", False)
    segment = pool.take(MIB, "a")
    os.pwrite(segment.fd, b"value", 0)
    reader = Reader(segment)
    pool.retire(segment)
    assert not pool.exists(segment.number)
    assert not is_open(segment.fd)
    assert pool.num_bytes == 0
    again = pool.take(MIB, "a")
    os.pwrite(again.fd, b"other", 0)
    assert again.number != segment.number
    assert reader.read(5) == b"value", "its pages stay until the reader goes"
    reader.unmap()


def test_without_leases_what_had_no_reader_is_taken_again(pool, monkeypatch):
    monkeypatch.setattr(kernel, "HAS_LEASES", False)
    segment = pool.take(MIB, "a")
    pool.give_back(segment)
    assert pool.take(MIB, "a") is segment


# ── any order of things ──────────────────────────────────────────────────────────────────


class PoolMachine(RuleBasedStateMachine):
    """Writers and readers of one pool, in any order."""

    limit = 256 * PAGE
    index = st.integers(0, 1_000)

    def __init__(self) -> None:
        super().__init__()
        self.fds_before = open_fds()
        self.pool = SegmentPool(limit=self.limit)
        self.taken: list[Segment] = []
        self.readers: list[tuple[Segment, Reader, bytes]] = []
        self.numbers: dict[int, Segment] = {}
        self.counter = 0

    @rule(num_bytes=st.integers(1, 64 * PAGE), writer=st.sampled_from("abc"))
    def take(self, num_bytes, writer):
        used = sum(segment.num_bytes for segment in {*self.taken, *self.read_segments()})
        used += self.pool.inline_bytes
        try:
            segment = self.pool.take(num_bytes, writer)
        except PoolFullError:
            smallest = -(-num_bytes // PAGE) * PAGE
            assert used + smallest > self.limit, "there was room"
            return
        assert segment not in self.taken, "given to two"
        assert segment not in self.read_segments(), "somebody maps it"
        assert segment.num_bytes >= num_bytes
        assert self.numbers.setdefault(segment.number, segment) is segment
        self.counter += 1
        os.pwrite(segment.fd, self.mark(), 0)
        self.taken.append(segment)
        self.check_what_is_kept()

    @precondition(lambda self: self.taken)
    @rule(index=index)
    def read(self, index):
        segment = self.taken[index % len(self.taken)]
        self.readers.append((segment, Reader(segment), os.pread(segment.fd, 8, 0)))

    @precondition(lambda self: self.readers)
    @rule(index=index)
    def unread(self, index):
        self.readers.pop(index % len(self.readers))[1].unmap()

    @precondition(lambda self: self.taken)
    @rule(index=index)
    def retire(self, index):
        self.pool.retire(self.taken.pop(index % len(self.taken)))
        self.check_what_is_kept()

    @precondition(lambda self: self.taken)
    @rule(index=index)
    def give_back(self, index):
        segment = self.taken[index % len(self.taken)]
        if segment not in self.read_segments():
            self.taken.remove(segment)
            self.pool.give_back(segment)
            self.check_what_is_kept()

    def check_what_is_kept(self):
        """Beyond a quarter of the limit only what is read, or was when the pool asked."""
        assert self.pool._free_bytes <= self.limit // 4

    @rule(num_bytes=st.integers(0, 20 * PAGE))
    def put_inline(self, num_bytes):
        self.pool.inline_bytes = 0
        try:
            self.pool.make_room(num_bytes)
        except PoolFullError:
            return
        self.pool.inline_bytes = num_bytes

    def mark(self) -> bytes:
        return self.counter.to_bytes(8, "little")

    def read_segments(self) -> set[Segment]:
        return {segment for segment, _, _ in self.readers}

    @invariant()
    def the_limit_holds(self):
        assert 0 <= self.pool.num_bytes <= self.limit

    @invariant()
    def what_is_used_exists(self):
        for segment in {*self.taken, *self.read_segments()}:
            assert self.pool.exists(segment.number)

    @invariant()
    def readers_see_what_they_came_for(self):
        for _, reader, mark in self.readers:
            assert reader.read(8) == mark

    @invariant()
    def its_books_are_right(self):
        sizes = [segment.num_bytes for segment in self.pool._existing.values()]
        assert self.pool.num_bytes == sum(sizes) + self.pool.inline_bytes
        free = [segment for each in self.pool._free.values() for segment in each]
        assert self.pool._free_bytes == sum(segment.num_bytes for segment in free)
        pooled = [*self.pool._retired, *free]
        assert self.pool._pooled_bytes == sum(segment.num_bytes for segment in pooled)
        assert {*pooled, *self.taken} == set(self.pool._existing.values())

    def teardown(self):
        for _, reader, _ in self.readers:
            reader.unmap()
        for segment in self.taken:
            self.pool.retire(segment)
        self.pool.make_room(self.limit - self.pool.inline_bytes)
        assert self.pool.num_bytes == self.pool.inline_bytes
        self.pool.close()
        assert open_fds() == self.fds_before


TestAnyOrder = needs_leases(PoolMachine.TestCase)
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)

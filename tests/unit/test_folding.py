"""Which lines become one, and in which order they come out. A fake loop keeps the time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.agent.folding import (
    WINDOW_S,
    FoldedStream,
    FoldingSink,
    LineFolder,
    in_ranges,
)


def fold(*said: tuple[int, str], num_ranks: int = 4) -> list[tuple[list[int], str]]:
    folder = LineFolder(num_ranks)
    for rank, text in said:
        folder.add(rank, text.encode(), 0.0)
    return [(ranks, text.decode()) for ranks, text in folder.take(None)]


def test_equal_lines_become_one():
    assert fold((0, "a"), (1, "a"), (3, "a")) == [([0, 1, 3], "a")]


def test_what_one_rank_says_twice_stays_two():
    said = [(0, "a"), (0, "a"), (1, "a"), (1, "a"), (1, "a")]
    assert fold(*said) == [([0, 1], "a"), ([0, 1], "a"), ([1], "a")]


def test_a_line_of_ones_own_before_it_does_not_keep_a_rank_from_joining():
    said = [(0, "I am 0"), (0, "step"), (1, "I am 1"), (1, "step")]
    assert fold(*said) == [([0], "I am 0"), ([1], "I am 1"), ([0, 1], "step")]


def test_lines_whose_order_differs_are_not_folded():
    assert fold((0, "a"), (0, "b"), (1, "b"), (1, "a")) == [([0], "a"), ([0, 1], "b"), ([1], "a")]


def test_a_line_waits_for_a_moment_or_until_all_have_said_it():
    folder = LineFolder(2)
    folder.add(0, b"a", 0.0)
    assert folder.take(WINDOW_S / 2) == []
    assert folder.due_s == WINDOW_S
    folder.add(1, b"a", WINDOW_S / 2)
    assert folder.take(WINDOW_S / 2) == [([0, 1], b"a")]
    folder.add(1, b"b", 1.0)
    assert folder.take(1.0 + WINDOW_S) == [([1], b"b")]
    assert folder.due_s is None
    folder.add(0, b"b", 2.0)
    assert folder.take(3.0) == [([0], b"b")], "too late"


SAID = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), max_size=30)


@given(SAID)
def test_every_rank_keeps_its_lines_and_their_order(said):
    out = fold(*said, num_ranks=3)
    for rank in range(3):
        assert [text for ranks, text in out if rank in ranks] == [t for r, t in said if r == rank]


@given(SAID, st.lists(st.booleans(), min_size=30, max_size=30))
def test_the_order_survives_lines_that_come_out_early(said, takes):
    folder = LineFolder(3)
    out: list[tuple[list[int], bytes]] = []
    for (rank, text), take in zip(said, takes, strict=False):
        folder.add(rank, text.encode(), 0.0)
        if take:
            out += folder.take(0.0)
    out += folder.take(None)
    for rank in range(3):
        own = [text.decode() for ranks, text in out if rank in ranks]
        assert own == [text for r, text in said if r == rank]


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"), ([3, 5], "3,5")]
)
def test_ranks_in_ranges(ranks, text):
    assert in_ranges(ranks) == text


class FakeLoop:
    def __init__(self):
        self.now = 0.0
        self.timers = []

    def time(self):
        return self.now

    def call_at(self, at_s, call):
        timer = [at_s, call]
        self.timers.append(timer)

        class Handle:
            def cancel(handle):
                if timer in self.timers:
                    self.timers.remove(timer)

        return Handle()

    def pass_time(self, seconds):
        self.now += seconds
        for timer in [timer for timer in self.timers if timer[0] <= self.now]:
            self.timers.remove(timer)
            timer[1]()


class FakeSink:
    def __init__(self):
        self.text = b""
        self.pending = 0

    def write(self, data):
        self.text += data

    def when_below(self, num_bytes, then):
        then()

    def give_up(self):
        self.text += b"(given up)"


@pytest.fixture
def console():
    loop, sink = FakeLoop(), FakeSink()
    prefixes = {rank: b"[%d] " % rank for rank in range(3)}
    folding = FoldingSink(loop, sink, prefixes, lambda ranks: b"[%d ranks] " % len(ranks))
    streams = [FoldedStream(loop, folding, rank) for rank in range(3)]
    return loop, sink, folding, streams


def test_a_console_gets_prefixes_after_a_moment(console):
    loop, sink, folding, (zero, one, _) = console
    zero.write(b"hi\nmine\n")
    one.write(b"hi\n")
    assert (sink.text, zero.pending > 0) == (b"", True)
    loop.pass_time(WINDOW_S)
    assert sink.text == b"[2 ranks] hi\n[0] mine\n"
    assert folding.pending == 0
    assert not loop.timers


def test_bars_come_behind_what_waits_and_each_state_has_its_prefix(console):
    _, sink, _, (zero, one, _) = console
    one.write(b"first\n")
    zero.write(b"10%\r20%\r")
    assert sink.text == b"[1] first\n[0] 10%\r[0] 20%\r"


def test_a_flood_passes_unfolded_and_none_is_lost(console):
    loop, sink, folding, streams = console
    for number in range(50):
        for rank, stream in enumerate(streams):
            stream.write(b"".join(b"%d %d\n" % (rank, number * 100 + n) for n in range(100)))
    folding.flush()
    lines = sink.text.splitlines()
    assert Counter(line[:4] for line in lines) == {b"[%d] " % rank: 5000 for rank in range(3)}
    for rank in range(3):
        own = [line.split()[2] for line in lines if line.startswith(b"[%d]" % rank)]
        assert own == [b"%d" % n for n in range(5000)]
    assert b"x" not in sink.text
    streams[0].write(b"x\n")
    assert b"x" in sink.text, "still too fast to be folded"
    loop.pass_time(60)
    streams[0].write(b"y\n")
    assert b"y" not in sink.text


def test_who_waits_for_the_console_to_drain_gets_all_of_it(console):
    _, sink, folding, (zero, *_) = console
    zero.write(b"hi\n")
    seen = []
    folding.when_below(0, lambda: seen.append(sink.text))
    assert seen == [b"[0] hi\n"]
    zero.write(b"last\n")
    zero.give_up()
    assert sink.text.endswith(b"[0] last\n(given up)")

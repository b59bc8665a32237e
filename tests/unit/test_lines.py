from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.agent.lines import MAX_LINE, LinePrefixer

P = b"[rank 1] "


def pump(chunks: list[bytes], **options) -> bytes:
    lines = LinePrefixer(P, **options)
    return b"".join(lines.feed(chunk) for chunk in chunks) + lines.finish()


def test_each_line_gets_the_prefix():
    assert pump([b"a\nb\n\nc\n"]) == P + b"a\n" + P + b"b\n" + P + b"\n" + P + b"c\n"


def test_a_line_waits_until_it_is_whole():
    lines = LinePrefixer(P)
    assert lines.feed(b"hel") == b""
    assert lines.feed(b"lo\nwor") == P + b"hello\n"
    assert lines.finish() == P + b"wor\n"
    assert lines.finish() == b""


@given(st.binary(max_size=300), st.lists(st.integers(1, 20), max_size=20))
def test_any_bytes_however_cut_come_out_the_same(data, cuts):
    chunks, rest = [], data
    for size in cuts:
        chunks.append(rest[:size])
        rest = rest[size:]
    assert pump([*chunks, rest]) == pump([data])


@given(st.binary(max_size=300).filter(lambda data: b"\r" not in data))
def test_nothing_is_lost(data):
    whole = data if not data or data.endswith(b"\n") else data + b"\n"
    out = pump([data])
    assert out.replace(P, b"") == whole.replace(P, b"")
    assert out.count(b"\n") == whole.count(b"\n")


def test_progress_bars_stay_bars():
    assert pump([b"\r 10%", b"\r 20%", b"\r100%\n"]) == (
        P + b" 10%\r" + P + b" 20%\r" + P + b"100%\n"
    )


def test_on_a_terminal_bars_erase_what_they_replace():
    out = pump([b"\rlong bar", b"\rshort\n"], terminal=True)
    assert out == P + b"long bar\x1b[K\r" + P + b"short\x1b[K\n"


def test_dos_line_ends_are_line_ends():
    assert pump([b"a\r", b"\nb\r\n"]) == P + b"a\n" + P + b"b\n"


def test_a_bar_can_be_shown_before_it_ends():
    lines = LinePrefixer(P)
    lines.feed(b"\r 10%")
    assert lines.has_bar
    assert lines.take_bar() == P + b" 10%\r"
    assert not lines.has_bar


def test_a_line_without_end_is_cut():
    out = pump([b"x" * (MAX_LINE + 10)])
    assert out == P + b"x" * MAX_LINE + b"\n" + P + b"x" * 10 + b"\n"

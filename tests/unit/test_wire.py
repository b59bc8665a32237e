from __future__ import annotations

import os
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.values.errors import FrameError
from phalanx.wire import frames
from phalanx.wire.messages import Entered, InputLine, Reported, Returned, WorkerMessage


def reader() -> frames.FrameReader:
    return frames.FrameReader(WorkerMessage)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_frames_come_whole_however_the_bytes_are_cut(cuts):
    sent = [Entered(), Reported(metrics={"loss": 0.5, "ok": True}), Returned(data=b"x" * 50)]
    data = b"".join(map(frames.encode, sent))
    stream, got = reader(), []
    while data:
        size = cuts.pop() if cuts else len(data)
        stream.feed(data[:size])
        data = data[size:]
        got += [message for message, _ in stream.messages()]
    assert got == sent


@given(st.binary(min_size=8, max_size=200))
def test_noise_is_an_error_or_incomplete_and_nothing_else(noise):
    stream = reader()
    stream.feed(noise)
    try:
        messages = list(stream.messages())
    except FrameError:
        return
    length, _ = struct.unpack_from("<II", noise)
    assert messages == [] or length <= len(noise)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<II", frames.MAX_FRAME + 1, 0),
        struct.pack("<II", 10, frames.MAX_FDS + 1),
        struct.pack("<II", 3, 0) + b"abc",
        frames.encode(InputLine(run_id="r", rank=0, text="not from a worker")),
        struct.pack("<II", 1, 2) + b"\xc0",
    ],
    ids=["too long", "too many descriptors", "no msgpack", "other union", "descriptors missing"],
)
def test_bad_frames_are_refused(data):
    stream = reader()
    stream.feed(data)
    with pytest.raises(FrameError):
        list(stream.messages())


def test_a_message_that_is_too_large_is_refused_by_the_sender(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    with pytest.raises(FrameError, match="101|1.."):
        frames.encode(Returned(data=b"x" * 200))


def test_descriptors_arrive_with_their_own_message():
    ours, theirs = socket.socketpair()
    sender, receiver = frames.Channel(ours, WorkerMessage), frames.Channel(theirs, WorkerMessage)
    pipes = [os.pipe() for _ in range(3)]
    for number, (_, write_end) in enumerate(pipes):
        sender.send(Reported(metrics={"n": number}))
        sender.send(Returned(data=None), [write_end])
    for number, (read_end, _) in enumerate(pipes):
        message, fds = receiver.receive()
        assert (message, fds) == (Reported(metrics={"n": number}), [])
        message, (fd,) = receiver.receive()
        os.write(fd, b"%d" % number)
        assert os.read(read_end, 10) == b"%d" % number
        os.close(fd)
    sender.close()
    assert receiver.receive() is None
    receiver.close()
    for fds in pipes:
        for fd in fds:
            os.close(fd)

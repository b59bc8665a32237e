"""The status line, written to a pipe instead of a terminal."""

from __future__ import annotations

import os

import pytest

from phalanx.cli.status import StatusLine
from phalanx.values import events as ev
from phalanx.values.failures import Failure

ERASE = "\r\x1b[K"


@pytest.fixture
def terminal():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def read() -> str:
        try:
            return os.read(reader, 65536).decode()
        except BlockingIOError:
            return ""

    line = StatusLine(writer, 2, colour=False)
    yield line, read
    line.close()
    os.close(reader)
    os.close(writer)


def test_it_follows_the_run(terminal):
    line, _ = terminal
    assert line.text() == "starting, 0 of 2 ranks alive, 0:00"
    for rank in range(2):
        line.follow(ev.WorkerStarted(rank=rank, pid=rank + 10))
    line.follow(ev.GroupRan(generation=0))
    assert line.text() == "2 of 2 ranks running, 0:00"
    failure = Failure(rank=1, cause="exit", message="it left")
    line.follow(ev.GroupFell(generation=0, failure=failure, restarting=True))
    assert line.text() == "restarting, 2 of 2 ranks alive, 0:00"
    line.follow(ev.GenerationStarted(generation=1))
    assert line.text() == "starting, 2 of 2 ranks alive, 1 restart, 0:00"


def test_text_is_written_in_its_place_and_it_comes_again_below(terminal):
    line, read = terminal
    line.write("hello\n")
    assert read() == f"hello\n{line.text()}"
    line.write("world\n")
    assert read() == f"{ERASE}world\n{line.text()}"
    line.close()
    assert read() == ERASE
    line.write("after\n")
    assert read() == "after\n"


def test_it_stays_away_from_a_prompt(terminal):
    line, read = terminal
    line.write("(Pdb) ")
    assert read() == "(Pdb) "
    line.follow(ev.GroupRan(generation=0))
    assert read() == "", "somebody types there"
    line.write("1\n")
    assert read() == f"1\n{line.text()}"


def test_it_stands_below_a_bar(terminal):
    line, read = terminal
    line.write("10%\r")
    assert read() == f"10%\r\n{line.text()}"
    line.write("20%\r")
    assert read() == f"{ERASE}\x1b[1A\x1b[K20%\r\n{line.text()}"
    line.follow(ev.GroupRan(generation=0))
    assert read() == f"{ERASE}{line.text()}", "the bar is left alone"


def test_it_is_drawn_only_when_it_has_changed(terminal):
    line, read = terminal
    line.write("\n")
    read()
    line.follow(ev.WorkerReported(rank=0, metrics={}))
    assert read() == ""


def test_a_terminal_that_is_gone_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    line = StatusLine(writer, 2, colour=False)
    line.write("hello\n")
    line.close()
    os.close(writer)

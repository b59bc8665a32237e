"""Output of the workers: whole lines, none lost, none doubled, the last one before a crash too."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from phalanx import WorkerFailedError, start_processes
from tests.deadlines import read_until_closed

FLOOD = """
import sys
from phalanx import start_processes
def flood(rank, world_size):
    filler = "x" * 80
    for number in range({lines}):
        print(f"L {{rank}} {{number:06d}} {{filler}}")
start_processes(flood, 4, preload=(){options})
"""


def check_flood(out: bytes, lines: int, ranks=range(4)) -> None:
    next_number = Counter()
    for line in out.splitlines():
        prefix, _, rest = line.rpartition(b"] ")
        word, rank, number, filler = rest.split(b" ")
        assert prefix == (b"[rank " + rank if len(ranks) > 1 else b""), line
        assert (word, filler) == (b"L", b"x" * 80), line
        assert int(number) == next_number[rank], "in order, none lost, none doubled"
        next_number[rank] += 1
    assert next_number == {b"%d" % rank: lines for rank in ranks}


def test_a_flood_through_a_pipe_arrives_whole(script):
    lines = 20_000
    started = script(FLOOD.format(lines=lines, options=""), text=False)
    out, err = started.process.communicate(timeout=60)
    assert (started.process.returncode, err) == (0, b"")
    check_flood(out, lines)


def test_a_flood_through_a_slow_pipe_arrives_whole_and_does_not_grow_the_agent(script):
    import psutil

    lines = 30_000
    started = script(FLOOD.format(lines=lines, options=""), text=False)
    time.sleep(1.0)  # nobody reads: the pipe is full, the workers wait
    agent = psutil.Process(started.pid).children()[0]
    assert agent.memory_info().rss < 120 * 2**20
    out, _ = started.process.communicate(timeout=60)
    check_flood(out, lines)


def test_a_flood_into_files(run_script, tmp_path):
    done = run_script(
        FLOOD.format(lines=5000, options=f", log_dir={str(tmp_path / 'logs')!r}, console='none'")
    )
    assert (done.returncode, done.stdout) == (0, "")
    for rank in range(4):
        lines = Path(tmp_path, "logs", "0", f"rank-{rank}.out").read_text().splitlines()
        assert len(lines) == 5000
        assert lines[-1].startswith(f"L {rank} 004999")


def test_console_and_files_together_and_a_chosen_rank(script, tmp_path):
    options = f", log_dir={str(tmp_path / 'logs')!r}, console=[2]"
    started = script(FLOOD.format(lines=5000, options=options), text=False)
    out, err = started.process.communicate(timeout=60)
    assert (started.process.returncode, err) == (0, b"")
    check_flood(out, 5000, ranks=[2])
    sizes = {path.stat().st_size for path in Path(tmp_path, "logs", "0").glob("*.out")}
    assert len(sizes) == 1
    assert b"[rank" not in Path(tmp_path, "logs", "0", "rank-2.out").read_bytes()


def abort_after_line(rank, world_size):
    print("the last line")
    os.abort()


def test_the_last_line_before_an_abort_arrives(capfd):
    with pytest.raises(WorkerFailedError, match="SIGABRT") as caught:
        start_processes(abort_after_line, 2, preload=()).wait()
    assert "the last line\n" in capfd.readouterr().out
    assert "the last line" in caught.value.root_cause.log_tail


def write_raw(rank, world_size):
    os.write(1, b"\xff\xfe\x00 not text\n")
    os.write(2, b"unfinished")


def test_any_bytes_pass_and_an_unfinished_line_is_finished(script):
    started = script(
        "import os\nfrom phalanx import start_processes\n"
        "def f(rank, world_size):\n"
        "    os.write(1, bytes(range(256)).replace(b'\\r', b'') + b'\\n'); os.write(2, b'unfinished')\n"
        "start_processes(f, 2, preload=())\n",
        text=False,
    )
    out, err = started.process.communicate(timeout=30)
    line = bytes(range(256)).replace(b"\r", b"")
    head, tail = line.split(b"\n")
    for rank in b"01":
        prefix = b"[rank %c] " % rank
        assert prefix + head + b"\n" + prefix + tail + b"\n" in out
        assert prefix + b"unfinished\n" in err


def test_restarts_keep_the_logs_of_earlier_generations(tmp_path):
    context = start_processes(
        speak_and_fall, 1, preload=(), max_restarts=2, log_dir=tmp_path, console="none"
    )
    context.wait()
    texts = [Path(tmp_path, str(g), "rank-0.out").read_text() for g in range(3)]
    assert texts == [f"generation {g}\n" for g in range(3)]


def speak_and_fall(rank, world_size):
    from phalanx import get_context

    generation = get_context().restart_count
    print("generation", generation, flush=True)
    if generation < 2:
        os._exit(9)


def test_without_console_and_log_dir_the_run_directory_has_the_logs():
    context = start_processes(speak_and_fall, 1, preload=(), max_restarts=2, console="none")
    context.wait()
    path = Path(context.spec.run_dir, "logs", "2", "rank-0.out")
    assert path.read_text() == "generation 2\n"


def test_a_captured_stdout_object_gets_the_output(capsys):
    start_processes(speak_and_fall, 2, preload=(), max_restarts=2).wait()
    out = capsys.readouterr().out
    assert out.count("generation 2\n") == 2
    assert "[rank 1] generation 2\n" in out


def test_a_reader_that_goes_away_does_not_end_the_run(script, tmp_path):
    marker = tmp_path / "done"
    started = script(
        "import pathlib\nfrom phalanx import start_processes\n"
        "def f(rank, world_size):\n"
        "    for i in range(100_000): print('line', i)\n"
        f"    pathlib.Path({str(marker)!r}).touch()\n"
        "start_processes(f, 1, preload=())\n",
        text=False,
    )
    started.out.line()
    started.close_stdout()
    _, err = started.process.communicate(timeout=30)
    assert started.process.returncode == 0
    assert marker.exists()
    assert err.count(b"nobody reads it any more") == 1


def test_a_terminal_gets_colours_and_a_pipe_does_not(tmp_path):
    path = tmp_path / "s.py"
    path.write_text(
        "from phalanx import start_processes\n"
        "def f(rank, world_size):\n    import sys; sys.stderr.write('\\r10%\\r20%\\n'); print('hi')\n"
        "start_processes(f, 2, preload=())\n"
    )

    def run(**env: str) -> bytes:
        parent, child = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, str(path)], stdout=child, stderr=child, stdin=child,
            env={**os.environ, "TERM": "xterm", **env},
        )  # fmt: skip
        os.close(child)
        out = read_until_closed(parent)
        process.wait(20)
        os.close(parent)
        return out

    coloured = run()
    assert b"\x1b[36m[rank 0] \x1b[0mhi" in coloured
    assert b"10%\x1b[K\r" in coloured
    plain = run(NO_COLOR="1")
    assert b"[rank 0] hi" in plain
    assert b"\x1b[36m" not in plain
    assert b"\x1b[36m" not in run(TERM="dumb")


@pytest.mark.parametrize("console", ["all", "none"])
def test_a_log_directory_without_space_is_said_once(script, tmp_path, console):
    """A tiny file system of its own, if this user may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        options = f", log_dir={str(small)!r}, console={console!r}"
        started = script(FLOOD.format(lines=2000, options=options), text=False)
        out, err = started.process.communicate(timeout=60)
        assert started.process.returncode == 0
        check_flood(out, 2000, ranks=range(4) if console == "all" else ())
        assert err.count(b"can't be written (No space left on device)") == 1
    finally:
        subprocess.run(["umount", str(small)], check=True, timeout=60)

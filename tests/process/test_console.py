"""What `phalanx run` shows on a terminal, and through a pipe that is read or not."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from tests.conftest import SOURCE, Script, tagged_processes, wait_until
from tests.deadlines import read_until_closed

SAYS = """
import os, sys, time
rank = os.environ["RANK"]
print("said by all")
print("said by", rank)
if rank != "2":
    print("said by most")
time.sleep(0.5)
"""


@pytest.fixture
def start(start_phalanx):
    """Start `phalanx run` with a script of this source."""

    def start(source: str, *options: str, **more) -> Script:
        return start_phalanx("run", "--preload", "", *options, "train.py", source=source, **more)

    return start


class Terminal:
    """A screen that knows as much as a status line needs: lines, and what erases them."""

    def __init__(self) -> None:
        self.raw = b""
        self.parent, self.child = pty.openpty()

    def read(self, until: bytes | None = None) -> bytes:
        """Read to the end, or until this was shown."""
        if self.child >= 0:
            os.close(self.child)
            self.child = -1
        self.raw = read_until_closed(self.parent, until=until, data=self.raw)
        return self.raw

    def lines(self) -> list[str]:
        """Return what stands on the screen, if it is as high as needed; colours left out."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.raw.decode())
        rows, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[K|\x1b\[1A|\r|\n|[^\x1b\r\n]+", text):
            if token == "\x1b[K":
                rows[row] = rows[row][:column]
            elif token == "\x1b[1A":
                row -= 1
            elif token == "\r":
                column = 0
            elif token == "\n":
                row += 1
                rows += [""] * (row == len(rows))
            else:
                rows[row] = (
                    rows[row][:column].ljust(column) + token + rows[row][column + len(token) :]
                )
                column += len(token)
        return rows

    def close(self) -> None:
        os.close(self.parent)


@pytest.fixture
def on_terminal(tmp_path):
    """Run `phalanx run` on a terminal of its own, in the foreground."""
    made: list[tuple[subprocess.Popen, Terminal]] = []

    def run(source: str, *options: str, **env: str):
        (tmp_path / "train.py").write_text(source)
        terminal = Terminal()
        argv = [sys.executable, "-m", "phalanx", "run", "--preload", "", *options, "train.py"]
        enter = "import os,sys,fcntl,termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        process = subprocess.Popen(
            [sys.executable, "-c", enter, *argv], cwd=tmp_path,
            stdin=terminal.child, stdout=terminal.child, stderr=terminal.child,
            env={**os.environ, "TERM": "xterm", "PYTHONPATH": SOURCE, **env},
        )  # fmt: skip
        made.append((process, terminal))
        return process, terminal

    yield run
    for process, terminal in made:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        terminal.close()


# ── folding ──────────────────────────────────────────────────────────────────────────────


def test_equal_lines_of_several_ranks_become_one(start):
    done = start(SAYS, "--nproc-per-node=3", "--tee=3", "--log-dir=logs").finish()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    # On a busy machine one rank may be so late that its line stands alone.
    who = {"all 3 ranks", "2 of 3 ranks: 0-1", "2 of 3 ranks: 1-2", "2 of 3 ranks: 0,2"}
    alike = [line for line in lines if line.endswith("said by all")]
    assert alike
    heads = {line[1:].partition("] ")[0] for line in alike}
    assert heads <= who | {"rank 0", "rank 1", "rank 2"}
    assert sorted(line for line in lines if re.search(r"by \d$", line)) == [
        f"[rank {rank}] said by {rank}" for rank in range(3)
    ]


def test_equal_lines_are_never_folded_in_files(start, tmp_path):
    start(SAYS, "--nproc-per-node=3", "--tee=3", "--log-dir=logs").finish()
    for rank in range(3):
        text = (tmp_path / "logs" / "0" / f"rank-{rank}.out").read_text()
        assert text.splitlines()[:2] == ["said by all", f"said by {rank}"]


def test_no_fold(start):
    done = start(SAYS, "--nproc-per-node=3", "--no-fold").finish()
    for rank in range(3):
        assert f"[rank {rank}] said by all" in done.stdout.splitlines()
    assert "ranks" not in done.stdout


MEETS = """
import os, pathlib, time
print("ready")
mine = pathlib.Path("here-" + os.environ["RANK"])
mine.touch()
while len(list(pathlib.Path(".").glob("here-*"))) < 2:
    time.sleep(0.001)
time.sleep(0.3)
for n in range(20):
    print("step", n)
    time.sleep(0.02)
time.sleep(0.5)
"""


def test_ranks_that_run_side_by_side_are_folded(start):
    done = start(MEETS, "--nproc-per-node=2").finish()
    assert done.stdout.count("[all 2 ranks] step") >= 10, done.stdout


def test_a_single_rank_on_the_console_needs_neither(start):
    done = start(SAYS, "--nproc-per-node=3", "--local-ranks-filter=1").finish()
    assert done.stdout.splitlines() == ["said by all", "said by 1", "said by most"]


# ── nobody reads ─────────────────────────────────────────────────────────────────────────

TALKS = """
import os, time
print("line")
while True:
    print("line")
    time.sleep(0.01)
    if os.path.exists("enough"):
        break
"""


def test_a_run_goes_on_without_a_reader(start, tmp_path):
    started = start(TALKS, "--nproc-per-node=2")
    started.wait_for_line("line")
    started.close_stdout()
    assert "nobody reads it any more); the run goes on" in started.err.line()
    (tmp_path / "enough").touch()
    done = started.finish(30)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_stops_without_a_reader_if_wanted(start):
    started = start(TALKS, "--nproc-per-node=2", "--on-closed-output=stop", "--rdzv-id=unread")
    started.wait_for_line("line")
    started.close_stdout()
    done = started.finish(30)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr.startswith("phalanx: SIGPIPE (nobody reads the output any more): stopping")
    assert "Traceback" not in done.stderr
    wait_until(lambda: not tagged_processes("unread"), 10)


# ── a terminal ───────────────────────────────────────────────────────────────────────────

NAP = "import time; print('hello'); time.sleep(2.5); print('bye')"


def test_a_terminal_has_a_status_line_that_leaves_nothing(on_terminal):
    process, terminal = on_terminal(NAP, "--nproc-per-node=2")
    raw = terminal.read().decode()
    assert process.wait(30) == 0
    assert "2 of 2 ranks running, 0:0" in raw
    assert len(set(re.findall(r"running, (0:\d\d)", raw))) >= 2, "it keeps time"
    lines = [line for line in terminal.lines() if line]
    assert {line.partition("] ")[2] for line in lines} == {"hello", "bye"}, lines


def test_a_message_and_a_report_stand_where_the_status_line_was(on_terminal):
    source = (
        "import os, sys, time\ntime.sleep(0.3)\n"
        "if os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(100)"
    )
    process, terminal = on_terminal(source, "--nproc-per-node=2", "--max-restarts=1")
    terminal.read()
    assert process.wait(30) == 7
    text = "\n".join(terminal.lines())
    assert "1 restart, 0:" in terminal.raw.decode()
    assert text.startswith("phalanx: rank 1 failed"), text
    assert "\nphalanx: Rank 1 failed: SystemExit: 7\n" in text
    assert "running" not in text


BARS = """
import sys, time
for n in range(5):
    sys.stderr.write(f"\\r{n}/4")
    sys.stderr.flush()
    time.sleep(0.4)
sys.stderr.write("\\n")
print("after")
"""


def test_a_bar_and_the_status_line_don_t_draw_over_each_other(on_terminal):
    process, terminal = on_terminal(BARS)
    terminal.read(until=b"2/4")
    shown = [line for line in terminal.lines() if line]
    assert [line for line in shown if re.fullmatch(r"[0-2]/4", line)] == ["2/4"]
    terminal.read()
    assert process.wait(30) == 0
    assert [line for line in terminal.lines() if line] == ["4/4", "after"]
    assert b"1 of 1 ranks running" in terminal.raw


def test_ctrl_c_on_a_terminal(on_terminal):
    process, terminal = on_terminal(
        "import time; print('up'); time.sleep(100)", "--nproc-per-node=2"
    )
    terminal.read(until=b"2 of 2 ranks running")
    os.write(terminal.parent, b"\x03")
    terminal.read()
    assert process.wait(30) == 130
    text = "\n".join(terminal.lines())
    assert "phalanx: SIGINT: stopping" in text
    assert "ranks" not in text.replace("[all 2 ranks] up", "")


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": "dumb", "NO_COLOR": "1"}])
def test_a_dumb_terminal_gets_plain_text(on_terminal, env):
    process, terminal = on_terminal(BARS, "--nproc-per-node=2", **env)
    raw = terminal.read()
    assert process.wait(30) == 0
    assert b"\x1b" not in raw
    assert b"running" not in raw


def test_no_color_leaves_the_status_line(on_terminal):
    process, terminal = on_terminal(NAP, "--nproc-per-node=2", NO_COLOR="1")
    raw = terminal.read()
    assert process.wait(30) == 0
    assert not re.search(rb"\x1b\[[0-9;]*m", raw)
    assert b"2 of 2 ranks running" in raw


def test_a_notebook_s_shell_escape_has_no_status_line(on_terminal):
    process, terminal = on_terminal(NAP, "--nproc-per-node=2", JPY_PARENT_PID="1")
    raw = terminal.read()
    assert process.wait(30) == 0
    assert b"hello" in raw
    assert b"running" not in raw

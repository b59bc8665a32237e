"""A terminal as standard input: prompts, debuggers and Ctrl-C, as at a real one."""

from __future__ import annotations

import os
import pty
import select
import shlex
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import SOURCE

ENTER = (
    "import os,sys,fcntl,termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class Typist:
    """Sits at the terminal of a command."""

    def __init__(self, argv: list[str], cwd) -> None:
        self.parent, child = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENTER, *argv], cwd=cwd, stdin=child, stdout=child, stderr=child,
            env={**os.environ, "PYTHONPATH": SOURCE, "TERM": "xterm", "NO_COLOR": "1"},
        )  # fmt: skip
        os.close(child)

    def wait_for(self, text: str, within_s: float = 40) -> str:
        """Read until this is shown; return what was shown before it, and forget both."""
        until = time.monotonic() + within_s
        while text not in self.shown:
            left_s = until - time.monotonic()
            assert left_s > 0, f"{text!r} was not shown, but: {self.shown!r}"
            if not select.select([self.parent], [], [], left_s)[0]:
                continue
            try:
                data = os.read(self.parent, 65536)
            except OSError:
                data = b""
            assert data, f"it ended without showing {text!r}: {self.shown!r}"
            self.shown += data.decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C as people do: again, if Python was just between prompt and read."""
        for _ in range(20):
            self.type("\x03")
            try:
                self.wait_for(text, within_s=2)
            except AssertionError:
                continue
            return
        raise AssertionError(f"{text!r} was not shown, but: {self.shown!r}")

    def type(self, text: str) -> None:
        os.write(self.parent, text.encode())

    def end(self) -> int:
        """Read on until it has ended; return its exit code."""
        until = time.monotonic() + 40
        while self.process.poll() is None and time.monotonic() < until:
            if select.select([self.parent], [], [], 0.05)[0]:
                try:
                    self.shown += os.read(self.parent, 65536).decode(errors="replace")
                except OSError:
                    time.sleep(0.05)
        return self.process.wait(1)


@pytest.fixture
def typist(tmp_path):
    made: list[Typist] = []

    def start(source: str, *options: object, shell: str | None = None) -> Typist:
        (tmp_path / "train.py").write_text(source)
        argv = [sys.executable, "-m", "phalanx", "run", "--preload", "", *map(str, options)]
        argv += ["train.py"]
        if shell is not None:
            argv = ["/bin/bash", "-c", shell.format(shlex.join(argv))]
        made.append(Typist(argv, tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()
        os.close(one.parent)


def test_a_prompt_shows_at_once_and_the_line_can_be_edited(typist):
    at = typist("import readline\nprint('read', repr(input('name> ')))\nprint(repr(input('> ')))\n")
    at.wait_for("name> ")
    at.type("bat\x01c\x05s\n")  # Ctrl-A, Ctrl-E: only readline knows them
    at.wait_for("read 'cbats'")
    at.wait_for("> ")
    at.type("second\n")
    at.wait_for("'second'")
    assert at.end() == 0


def test_a_prompt_that_was_printed_shows_before_its_line_is_read(typist):
    at = typist(
        "import sys\nprint('well? ', end='', flush=True)\nprint('read', sys.stdin.readline())"
    )
    at.wait_for("well? ")
    at.type("yes\n")
    at.wait_for("read yes")
    assert at.end() == 0


def test_one_rank_prompts_at_a_time_and_others_are_quiet(typist):
    at = typist(
        "import os, time\nrank = int(os.environ['RANK'])\n"
        "if rank == 2:\n"
        "    while not os.path.exists('done'): print('noise', flush=True); time.sleep(0.01)\n"
        "else:\n    print(rank, 'got', input('word> '))\n",
        "--nproc-per-node", 3, "--no-fold",
    )  # fmt: skip
    for word in ("one", "two"):
        at.wait_for("word> ")
        with pytest.raises(AssertionError, match="'never' was not shown"):
            at.wait_for("never", within_s=0.3)
        assert "noise" not in at.shown, "the line that is typed stays whole"
        assert "ranks" not in at.shown, "no status line either"
        at.type(f"{word}\n")
        at.wait_for(f"got {word}")
    at.wait_for("noise")
    at.process.send_signal(15)
    assert at.end() == 143


def test_pdb_works_in_a_script_and_ctrl_c_at_its_prompt_ends_nothing(typist):
    at = typist("secret = 41\nbreakpoint()\nprint('went on', secret)\n", "--hang-timeout", "1")
    at.wait_for("(Pdb) ")
    at.interrupt_until("KeyboardInterrupt")
    at.wait_for("(Pdb) ")
    at.type("p secret + 1\n")
    at.wait_for("42")
    at.wait_for("(Pdb) ")
    time.sleep(2.5)  # the hang watch would have had its say
    at.type("secret = 7\n")
    at.wait_for("(Pdb) ")
    at.type("c\n")
    at.wait_for("went on 7")
    assert at.end() == 0


def test_ctrl_c_at_a_prompt_is_a_keyboard_interrupt(typist):
    at = typist(
        "while True:\n    try:\n        print('got', input('> '))\n        break\n"
        "    except KeyboardInterrupt:\n        print('caught')\n"
    )
    at.wait_for("> ")
    at.interrupt_until("caught")
    at.type("x\n")
    at.wait_for("got x")
    assert at.end() == 0


def test_the_debugger_of_torch_distributed_reads_from_the_terminal(typist):
    at = typist(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nsecret = 41\n"
        "dist.breakpoint()\nprint('went on', secret)\n",
        "--nproc-per-node", 2, "--preload", "torch",
    )  # fmt: skip
    at.wait_for("(Pdb) ", within_s=90)
    at.type("secret = 7\n")
    at.wait_for("(Pdb) ")
    at.type("up\n")
    at.wait_for("(Pdb) ")
    at.type("p secret + 1\n")
    at.wait_for("42")
    at.wait_for("(Pdb) ")
    at.type("c\n")
    at.wait_for("went on 41")
    assert at.end() == 0


def test_ctrl_z_pauses_all_ranks_and_fg_goes_on(typist, tmp_path):
    shell = "set -m; {}; echo paused=$?; read -r line; echo shell got $line; fg; echo end=$?"
    at = typist(
        "import os, time\nopen('pid' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "print('begun', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\nprint('ended')\n",
        "--nproc-per-node", 2, "--no-fold", "--hang-timeout", "1", shell=shell,
    )  # fmt: skip
    at.wait_for("begun")
    at.wait_for("begun")
    at.type("\x1a")
    at.wait_for("paused=")
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    assert {psutil.Process(pid).status() for pid in pids} == {"stopped"}
    (tmp_path / "go").touch()
    time.sleep(2.5)  # the hang watch would have had its say
    at.type("a line\n")
    at.wait_for("shell got a line")
    at.wait_for("ended")
    at.wait_for("ended")
    at.wait_for("end=0")
    assert at.end() == 0


def test_a_debugger_on_several_ranks_stays_on_one_until_it_goes_on(typist):
    at = typist(
        "import os\nrank = os.environ['RANK']\nbreakpoint()\nprint(rank, 'went on')\n",
        "--nproc-per-node", 2,
    )  # fmt: skip
    at.wait_for("[rank ")
    first = at.wait_for("] (Pdb) ")[-1]
    for _ in range(3):
        at.type("p 6 * 7\n")
        at.wait_for("42")
        at.wait_for(f"[rank {first}] (Pdb) ")
    at.type("c\n")
    at.wait_for(f"[rank {1 - int(first)}] (Pdb) ")
    at.type("c\n")
    assert at.end() == 0

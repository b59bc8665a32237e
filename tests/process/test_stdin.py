"""What workers of the command read: the command's own standard input, or nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tests.conftest import SOURCE

WAYS = pytest.mark.parametrize(
    "how",
    [("--preload", ""), ("--preload", "", "--start-method", "spawn")],
    ids=["fork", "spawn"],
)
READS = "import os, sys; print(os.environ['RANK'], sys.stdin.read().split())"


@WAYS
def test_a_script_reads_the_file_that_the_command_was_given(start_phalanx, tmp_path, how):
    (tmp_path / "answers.txt").write_text("one\ntwo\n")
    with (tmp_path / "answers.txt").open() as answers:
        script = "print(input('> ')); print(input())"
        done = start_phalanx("run", *how, "train.py", source=script, stdin=answers).finish(60)
    assert (done.returncode, done.stdout) == (0, "> one\ntwo\n"), done.stderr


def test_a_program_reads_what_is_piped_to_the_command(start_phalanx):
    started = start_phalanx("run", "--no-python", "cat", stdin=subprocess.PIPE)
    done = started.finish(60, stdin="one\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "one\ntwo\n"), done.stderr


@pytest.mark.parametrize(
    ("who", "readers"), [("1", [[], ["a", "b"]]), ("none", [[], []])], ids=["one", "none"]
)
def test_one_rank_reads_or_none(start_phalanx, who, readers):
    started = start_phalanx(
        "run", "--preload", "", "--nproc-per-node", 2, "--no-fold", "--stdin", who, "train.py",
        source=READS, stdin=subprocess.PIPE,
    )  # fmt: skip
    done = started.finish(60, stdin="a\nb\n")
    expected = [f"[rank {rank}] {rank} {words}" for rank, words in enumerate(readers)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


def test_several_ranks_share_a_pipe(start_phalanx):
    started = start_phalanx(
        "run", "--preload", "", "--nproc-per-node", 2, "--no-fold", "train.py",
        source=READS, stdin=subprocess.PIPE,
    )  # fmt: skip
    done = started.finish(60, stdin="a\nb\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'a', 'b'") == 1, "who reads first gets it"
    assert done.stdout.count("[]") == 1


def test_a_rank_that_does_not_exist_is_refused(start_phalanx):
    done = start_phalanx("run", "--stdin", "2", "train.py", source=READS).finish(60)
    assert done.returncode == 2
    assert "there is no local rank 2" in done.stderr


def test_a_command_in_the_background_takes_nothing_from_its_terminal(tmp_path):
    (tmp_path / "train.py").write_text(READS)
    parent, child = pty.openpty()
    # A shell with job control on the terminal starts the command with `&`, and reads itself.
    shell = subprocess.Popen(
        ["setsid", "--ctty", "bash", "-c",
         f"set -m; {sys.executable} -m phalanx run --preload '' train.py >out.txt 2>err.txt & "
         'wait $!; read -r line; echo "shell $line" >shell.txt'],
        cwd=tmp_path, stdin=child, stdout=child, stderr=child,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )  # fmt: skip
    os.close(child)
    try:
        os.write(parent, b"typed for the shell\n")
        assert shell.wait(60) == 0
    finally:
        shell.kill()
        shell.wait()
        os.close(parent)
    assert (tmp_path / "out.txt").read_text() == "0 []\n", (tmp_path / "err.txt").read_text()
    assert (tmp_path / "shell.txt").read_text() == "shell typed for the shell\n"

"""A debugger on one rank, over the launcher's own standard input."""

from __future__ import annotations

import subprocess

SCRIPT = """
from phalanx import start_processes, get_context

def work(rank, world_size):
    secret = 40 + rank
    get_context().breakpoint(rank=1)
    return secret

print("returns", start_processes(work, 2, preload=()).wait().returns)
"""


def test_a_debugger_on_one_rank_reads_what_is_typed_at_the_launcher(script):
    started = script(SCRIPT, stdin=subprocess.PIPE)
    done = started.finish(30, stdin="p secret + 1\nsecret = 7\nc\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "(rank 1) 42" in done.stdout
    assert "secret = 40 + rank" not in done.stdout, "it stops in the caller, after that line"
    assert "returns (40, 7)" in done.stdout


def test_without_input_the_debugger_quits(script):
    done = script(SCRIPT).finish(30)
    assert done.returncode == 1
    assert "BdbQuit" in done.stderr


def test_pythons_own_breakpoint_opens_it_on_the_rank_that_comes_there(script):
    source = SCRIPT.replace("get_context().breakpoint(rank=1)", "if rank == 1: breakpoint()")
    done = script(source, stdin=subprocess.PIPE).finish(30, stdin="p secret + 1\nsecret = 7\nc\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "(rank 1) 42" in done.stdout
    assert "returns (40, 7)" in done.stdout


def test_a_variable_says_what_breakpoint_means(script):
    source = SCRIPT.replace("get_context().breakpoint(rank=1)", "breakpoint()")
    done = script(source, env={"PYTHONBREAKPOINT": "0"}).finish(30)
    assert (done.returncode, done.stdout) == (0, "returns (40, 41)\n"), done.stderr

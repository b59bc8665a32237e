"""Ctrl-C and its kin, at the right and at the wrong moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import tagged_processes, wait_until
from tests.deadlines import Pipe

SLEEPY = """
import sys, time
from phalanx import start_processes
def f(rank, world_size):
    print("WORKING", flush=True)
    time.sleep(1000)
context = start_processes(f, 2, preload={preload!r}, max_restarts=3)
print("STARTED", context.run_id, flush=True)
{rest}
"""


def interrupted_cleanly(script, timeout: float = 20) -> None:
    done = script.finish(timeout)
    assert done.returncode == -signal.SIGINT, done  # 130 in a shell
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def start(script, rest: str, preload=()):
    started = script(SLEEPY.format(rest=rest, preload=preload))
    return started, started.wait_for_line("STARTED").split()[1]


@pytest.mark.parametrize("rest", ["context.wait()", "", "time.sleep(1000)", "with context: pass"])
def test_ctrl_c_while_the_workers_run(script, rest):
    started, run_id = start(script, rest)
    started.wait_for_line("WORKING")
    os.kill(started.pid, signal.SIGINT)
    interrupted_cleanly(started)
    wait_until(lambda: not tagged_processes(run_id), 10)


def test_ctrl_c_while_the_fork_server_imports(script):
    started, run_id = start(script, "context.wait()", preload=("torch",))
    os.kill(started.pid, signal.SIGINT)
    interrupted_cleanly(started, 5)
    wait_until(lambda: not tagged_processes(run_id), 10)


def test_ctrl_c_during_a_restart(script):
    started, _ = start(
        script,
        "import os, signal\n"
        "for event in context.events():\n"
        "    name = type(event).__name__\n"
        "    if name == 'GroupRan' and event.generation == 0: os.kill(context.pids()[1], signal.SIGKILL)\n"
        "    if name == 'GroupFell': os.kill(os.getpid(), signal.SIGINT)\n"
        "context.wait()",
    )
    interrupted_cleanly(started)


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.05, 0.1])
def test_ctrl_c_at_any_moment_of_a_start(script, delay_s):
    started, _ = start(script, "context.wait()")
    time.sleep(delay_s)
    os.kill(started.pid, signal.SIGINT)
    interrupted_cleanly(started)


STUBBORN = """
import signal, time
from phalanx import start_processes
def f(rank, world_size):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("WORKING", flush=True)
    time.sleep(1000)
context = start_processes(f, 2, preload=(), grace=600)
{rest}
"""


def test_a_second_ctrl_c_kills(script):
    started = script(STUBBORN.format(rest="context.wait()"))
    for _ in range(2):
        started.wait_for_line("WORKING")
    os.kill(started.pid, signal.SIGINT)
    time.sleep(0.3)
    assert started.process.poll() is None, "the grace is long"
    os.kill(started.pid, signal.SIGINT)
    interrupted_cleanly(started, 10)


def test_ctrl_c_during_a_shutdown(script, tmp_path):
    started = script(
        STUBBORN.format(
            rest="import os\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
            "print('SHUTTING', flush=True)\ncontext.shutdown(grace=500)"
        )
    )
    for _ in range(2):
        started.wait_for_line("WORKING")
    (tmp_path / "go").touch()
    started.wait_for_line("SHUTTING")
    time.sleep(0.2)
    os.kill(started.pid, signal.SIGINT)
    time.sleep(0.2)
    os.kill(started.pid, signal.SIGINT)
    interrupted_cleanly(started, 10)


def test_the_keyboard_interrupt_can_be_caught(script):
    started, _ = start(
        script,
        "try:\n    context.wait()\n"
        "except KeyboardInterrupt:\n    print('CAUGHT', context.state, flush=True)\n"
        "assert __import__('signal').getsignal(2) is __import__('signal').default_int_handler",
    )
    started.wait_for_line("WORKING")
    os.kill(started.pid, signal.SIGINT)
    assert "CAUGHT stopped" in started.wait_for_line("CAUGHT")
    done = started.finish()
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_stops_the_run_ends_the_launcher_as_it_would_have(script, signum):
    started, run_id = start(script, "context.wait()")
    started.wait_for_line("WORKING")
    os.kill(started.pid, signum)
    done = started.finish(20)
    assert done.returncode == -signum
    assert "Traceback" not in done.stderr
    wait_until(lambda: not tagged_processes(run_id), 10)


@pytest.mark.parametrize("rest", ["context.wait()", "for _ in context.events(): pass"])
def test_a_signal_that_does_not_interrupt_the_wait_is_not_lost(script, rest):
    """As one that comes just before the wait: another thread gets it, which wakes nobody."""
    started, _ = start(
        script,
        "import os, signal, threading, time\n"
        "def send():\n"
        "    while context.state != 'running': time.sleep(0.01)\n"
        "    time.sleep(0.3)  # nothing more comes that would end the wait\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "threading.Thread(target=send).start()\n" + rest,
    )
    assert started.finish(20).returncode == -signal.SIGTERM


def test_a_handler_of_the_user_gets_the_signal_after_the_stop(script):
    started = script(
        "import signal, time, sys\nfrom phalanx import start_processes\n"
        "def mine(*_): print('MINE', context.state, flush=True); sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, mine)\n"
        "def f(rank, world_size): print('WORKING', flush=True); time.sleep(1000)\n"
        "context = start_processes(f, 2, preload=())\ncontext.wait()\n"
    )
    started.wait_for_line("WORKING")
    os.kill(started.pid, signal.SIGTERM)
    assert "MINE stopped" in started.wait_for_line("MINE")
    assert started.finish().returncode == 5


def test_nohup_stays_nohup(script, tmp_path):
    path = tmp_path / "nohup.py"
    path.write_text(
        "import time, signal\nfrom phalanx import start_processes\n"
        "def f(rank, world_size):\n"
        "    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN\n"
        "    print('WORKING', flush=True); time.sleep(1.0); return rank\n"
        "print(start_processes(f, 2, preload=()).wait().returns, flush=True)\n"
    )
    process = subprocess.Popen(
        ["nohup", sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL, text=True, cwd=tmp_path,
    )  # fmt: skip
    said = Pipe(process.stdout, text=True)
    while "WORKING" not in said.line():
        assert not said.ended
    os.kill(process.pid, signal.SIGHUP)
    out = said.rest()
    assert process.wait(20) == 0
    process.stdout.close()
    assert "(0, 1)" in out


def test_handlers_are_given_back_when_the_run_ends(run_script):
    done = run_script(
        "import signal\nfrom phalanx import start_processes\n"
        "before = [signal.getsignal(n) for n in (1, 2, 15)]\n"
        "def f(rank, world_size): pass\n"
        "context = start_processes(f, 2, preload=())\n"
        "during = [signal.getsignal(n) for n in (1, 2, 15)]\n"
        "context.wait()\n"
        "assert before == [signal.getsignal(n) for n in (1, 2, 15)] != during\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_off_the_main_thread_no_handler_is_touched(run_script):
    done = run_script(
        "import signal, threading\nfrom phalanx import start_processes\n"
        "def f(rank, world_size): return rank\n"
        "def start():\n"
        "    before = signal.getsignal(2)\n"
        "    context = start_processes(f, 2, preload=())\n"
        "    assert signal.getsignal(2) is before\n"
        "    print(context.wait().returns)\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join()\n"
    )
    assert (done.stdout, done.stderr) == ("(0, 1)\n", "")

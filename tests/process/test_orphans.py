"""Whatever is killed: within a moment nothing of the run is alive, and nothing else is hurt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import psutil
import pytest

from tests.conftest import tagged_processes, wait_until

FAMILY = """
import os, subprocess, sys, time
import torch
from phalanx import start_processes

TAG = {tag!r}

def family(rank, world_size):
    # A child, one that founded a session, one that forked and called setsid without exec,
    # a daemon that forked twice, and DataLoader workers.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", TAG])
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", TAG],
                     start_new_session=True, env={{"TAG": TAG}})
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", TAG])
            time.sleep(1000)
        os._exit(0)
    loader = torch.utils.data.DataLoader(list(range(100)), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    context.report(up=True)
    time.sleep(1000)

context = start_processes(family, 2, env={{"TAG": TAG}}, max_restarts={restarts})
up = 0
for event in context.events():
    up += type(event).__name__ == "WorkerReported"
    if type(event).__name__ == "WorkerReported" and up % 2 == 0:
        print("UP", *context.pids().values(), flush=True)
context.wait()
"""


@pytest.fixture
def family(script):
    """A run with relatives of all kinds: its script, its tag, the pids of its workers."""

    def start(restarts: int = 0):
        tag = f"family-{uuid.uuid4().hex}"
        started = script(FAMILY.format(tag=tag, restarts=restarts), env={"TAG": tag})
        pids = [int(word) for word in started.wait_for_line("UP").split()[1:]]
        return started, tag, pids

    return start


def ours(script, name: str) -> psutil.Process:
    """Find the agent or the (exec'd) fork server of a script."""
    for process in psutil.Process(script.pid).children(recursive=True):
        try:
            if f"{name}.__main__" in " ".join(process.cmdline()):
                return process
        except psutil.ZombieProcess:
            continue  # a relative that nobody has waited for
    raise AssertionError(name)


def abstract_sockets() -> set[str]:
    with open("/proc/net/unix") as table:
        return {line.split()[-1] for line in table if "@phalanx-" in line}


def all_gone(tag: str) -> bool:
    return not tagged_processes(tag)


def test_kill_9_of_the_launcher(family):
    script, tag, _ = family()
    assert len(tagged_processes(tag)) > 12
    os.kill(script.pid, signal.SIGKILL)
    wait_until(lambda: all_gone(tag), 10, "descendants of a killed launcher")
    # A process that has no command line any more may still be closing its files.
    name = f"@phalanx-{script.pid}-"
    wait_until(lambda: not any(name in each for each in abstract_sockets()), 10, "its socket")


def test_kill_9_of_the_agent(family):
    script, tag, _ = family()
    agent = ours(script, "agent")
    agent.kill()
    wait_until(lambda: set(tagged_processes(tag)) <= {script.pid}, 10, "descendants of the agent")
    done = script.finish()
    assert done.returncode == 1
    assert "AgentLostError" in done.stderr
    assert "events.jsonl" in done.stderr


def test_kill_9_of_the_fork_server_fails_the_run_and_leaves_nothing(family):
    script, tag, _ = family()
    ours(script, "forkserver").kill()
    done = script.finish(20)
    assert done.returncode == 1
    assert "WorkerFailedError" in done.stderr
    assert all_gone(tag)


def test_kill_9_of_the_fork_server_is_survived_with_a_restart_left(family):
    script, tag, pids = family(restarts=1)
    ours(script, "forkserver").kill()
    again = [int(word) for word in script.wait_for_line("UP").split()[1:]]
    assert not set(again) & set(pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    script.process.send_signal(signal.SIGTERM)
    script.finish(40)
    assert all_gone(tag)


def test_kill_9_of_a_worker_takes_its_relatives_along_and_spares_all_others(family):
    script, tag, pids = family()
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)", "bystander"],
        start_new_session=True,
    )
    os.kill(pids[0], signal.SIGKILL)
    done = script.finish(20)
    assert done.returncode == 1
    assert "SIGKILL" in done.stderr
    assert all_gone(tag)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait(20)


def test_a_run_that_ends_well_leaves_nothing_either(run_script):
    tag = f"tag-{uuid.uuid4().hex}"
    done = run_script(
        "import os, subprocess, sys\nfrom phalanx import start_processes\n"
        "def f(rank, world_size):\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', "
        f"{tag!r}], start_new_session=True)\n"
        "start_processes(f, 3, preload=()).wait()\nprint('over')\n"
    )
    assert done.stdout == "over\n"
    assert all_gone(tag)


def test_a_daemon_of_a_living_worker_is_left_alone(run_script, tmp_path):
    """Only the relatives of a worker that ended are ended, not those of its peers."""
    done = run_script(
        "import os, subprocess, sys, time\nfrom phalanx import start_processes\n"
        "def f(rank, world_size):\n"
        "    if rank == 0:\n"
        "        if os.fork() == 0:\n"  # a daemon of rank 0
        "            os.setsid()\n"
        f"            if os.fork() == 0: open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(1000)\n"
        "            os._exit(0)\n"
        "        time.sleep(1.0)\n"
        f"        os.kill(int(open({str(tmp_path / 'pid')!r}).read()), 0)\n"
        "        return 'daemon lives'\n"
        "    time.sleep(0.5)\n"
        "print(start_processes(f, 2, preload=()).wait().returns)\n"
    )
    assert done.stdout == "('daemon lives', None)\n", done.stderr
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_fork_server_that_dies_while_forking(run_script):
    """Its death is a failure with a reason, not a hang."""
    done = run_script(
        "import os, signal, psutil, time\nfrom phalanx import start_processes\n"
        "def f(rank, world_size): time.sleep(1000)\n"
        "start_processes(lambda rank, world_size: None, 1, preload=()).wait()\n"
        "server = psutil.Process().children()[0].children()[0]\n"
        "server.suspend()\n"
        "context = start_processes(f, 2, preload=())\n"
        "time.sleep(0.2)\nserver.kill()\ncontext.wait()\n",
        timeout=20,
    )
    assert done.returncode == 1
    assert "The fork server (process" in done.stderr

"""The agent from outside: what it loads, whom it listens to, what it costs."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from phalanx import get_context, start_processes
from phalanx.launcher.link import current_link
from tests.conftest import wait_until


def nap(rank, world_size, seconds=0.5):
    time.sleep(seconds)
    return rank


def agent() -> psutil.Process:
    return psutil.Process(current_link().agent_pid)


def test_the_agent_never_loads_torch_and_the_fork_server_does():
    context = start_processes(nap, 1)
    context.wait()
    assert "torch" not in Path(f"/proc/{agent().pid}/maps").read_text()
    servers = [p for p in agent().children() if p.status() != psutil.STATUS_ZOMBIE]
    assert any("libtorch_cpu" in Path(f"/proc/{p.pid}/maps").read_text() for p in servers)


def test_the_agent_has_a_session_of_its_own():
    start_processes(nap, 1, preload=(), args=(0,)).wait()
    assert os.getsid(agent().pid) == agent().pid


def agent_socket() -> str:
    with open("/proc/net/unix") as table:
        names = {line.split()[-1] for line in table if f"@phalanx-{os.getpid()}-" in line}
    (name,) = names
    return "\0" + name.removeprefix("@")


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<II", 2**31, 0), struct.pack("<II", 2, 0) + b"\xc1\xc1",
     struct.pack("<II", 1, 3) + b"\xc0", b""],
    ids=["text", "too long", "no msgpack", "no descriptors", "nothing"],
)  # fmt: skip
def test_nonsense_closes_its_own_connection_and_harms_nothing_else(noise, capfd):
    context = start_processes(nap, 2, preload=())
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(agent_socket())
        stranger.settimeout(10)
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b"", "it is hung up on"
    assert context.wait().returns == (0, 1)


def test_another_user_is_hung_up_on():
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    context = start_processes(nap, 1, preload=())
    probe = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        f"s.connect({agent_socket()!r}); s.settimeout(10); sys.exit(len(s.recv(10)))"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0
    assert context.wait().returns == (0,)


def test_sigterm_to_the_agent_is_a_stop():
    context = start_processes(nap, 2, preload=(), args=(60,))
    wait_until(lambda: len(context.pids()) == 2)
    agent().terminate()
    with pytest.raises(Exception, match="was stopped"):
        context.wait(timeout=20)
    assert start_processes(nap, 1, preload=(), args=(0,)).wait().returns == (0,), "it lives on"


def test_idle_workers_cost_the_agent_no_wakeups():
    context = start_processes(nap, 16, preload=(), args=(60,))
    wait_until(lambda: context.state == "running", 20)
    time.sleep(0.5)

    def wakeups() -> int:
        return sum(
            int(line.split()[1])
            for task in Path(f"/proc/{agent().pid}/task").iterdir()
            for line in (task / "status").read_text().splitlines()
            if line.startswith("voluntary_ctxt_switches")
        )

    # Other tests' fork servers may be on their way; what counts is that there is a quiet time.
    def quiet() -> bool:
        before = wakeups()
        time.sleep(1.0)
        return wakeups() == before

    wait_until(quiet, 15, "a second without a wake-up")
    context.shutdown()


def test_prewarm_starts_a_fork_server_that_the_next_run_uses(run_script):
    done = run_script(
        "import os, time, psutil, phalanx\n"
        "phalanx.prewarm(('json',))\nphalanx.prewarm(('json',))\n"
        "time.sleep(0.5)\n"
        "(agent,) = psutil.Process().children()\n"
        "servers = {p.pid for p in agent.children()}\n"
        "def parent(rank, world_size): return os.getppid()\n"
        "assert set(phalanx.start_processes(parent, 1, preload=('json',)).wait().returns) == servers\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_phalanx_imports_only_names_and_starting_needs_no_torch():
    probe = (
        "import sys; before = set(sys.modules); import phalanx; "
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(names - set(sys.stdlib_module_names))); from phalanx import start_processes; "
        "print([m for m in ('torch', 'numpy', 'cloudpickle', 'uvloop', 'asyncio') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.splitlines() == ["['phalanx']", "[]"]


def fork_and_use_context(rank, world_size):
    context = get_context()
    pid = os.fork()
    if pid == 0:
        context.heartbeat(step=5)
        context.report(child=True)
        os._exit(0 if context.get_rank() == rank and not context.stop_requested else 1)
    return os.waitpid(pid, 0)[1]


def test_a_forked_child_of_a_worker_can_use_the_context():
    context = start_processes(fork_and_use_context, 2, preload=())
    assert context.wait().returns == (0, 0)
    reports = [e.metrics for e in context.events() if type(e).__name__ == "WorkerReported"]
    assert reports == [{"child": True}] * 2

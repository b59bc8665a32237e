"""Each helper × each way to die × each moment: a true message, the right end, nothing left.

A case is a run with two ranks; the launcher is a program, so that it may die too. Its ranks say
where they are and wait there for a file, so a helper dies exactly then. Fork servers are warm
where the moment allows it: one program walks all cases that its launcher and agent survive.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.conftest import SOURCE, wait_until

PATIENCE_S = 20.0
"""Bounds every wait here; nothing is measured by it."""

LAUNCHER = '''
import atexit, json, os, signal, sys, time
from pathlib import Path
from phalanx import get_context, start_processes

def say(**what):
    print(json.dumps(what), flush=True)

def arrive(folder):
    Path(folder, f"at-{os.environ['RANK']}").write_text(str(os.getpid()))

def linger(folder):
    """A rank says that it is there, and waits until the helper has been dealt with."""
    arrive(folder)
    while not Path(folder, "go-on").exists():
        time.sleep(0.005)

class Slow:
    """Takes its time to be unpickled: its worker is starting."""
    def __init__(self, folder):
        self.folder = folder
    def __reduce__(self):
        return (linger, (self.folder,))

def train(rank, world_size, folder, moment, slow):
    context = get_context()
    if context.restart_count:
        return "again"
    if moment == "before rendezvous":
        linger(folder)
    if moment.endswith("rendezvous"):
        import torch.distributed as dist
        if moment == "in rendezvous":
            arrive(folder)
            time.sleep(1000 if rank else 0)  # the other waits for this one
        dist.init_process_group("gloo")
    if moment == "in put_tensor":
        import torch
        arrive(folder)
        while True:
            context.put_tensor("weights", torch.ones(50_000))
    if moment == "in training":
        arrive(folder)
    if moment == "during a restart":
        def stop(signum, frame):
            Path(folder, "at-0").write_text("0")
            linger(folder)
            os._exit(1)
        signal.signal(signal.SIGTERM, stop)
        Path(folder, f"ready-{rank}").touch()
        while not Path(folder, "ready-1").exists():
            time.sleep(0.005)
        if rank == 0:
            os.kill(os.getpid(), 9)
        time.sleep(1000)
    if moment != "at exit":
        time.sleep(1000)
    atexit.register(linger, folder)
    return "done"

start_processes(lambda rank, world_size: None, 1, preload=()).wait()
say(ready=True)
for line in sys.stdin:
    case = json.loads(line)
    folder, moment = case["folder"], case["moment"]
    if moment == "before the first worker":  # with a warm fork server, which is then stopped
        start_processes(lambda rank, world_size: None, 1, preload=()).wait()
        say(ready=True)
        sys.stdin.readline()
    slow = Slow(folder) if moment == "while workers start" else None
    options = {"max_restarts": case["restarts"], "env": {"TAG": case["tag"]}, "grace": 3}
    if case["is_light"]:
        options["preload"] = ()
    context = start_processes(
        train, 2, args=(folder, moment, slow), start_timeout=case["start_timeout"], **options
    )
    say(launched=True)
    answer = {}
    try:
        result = context.wait()
    except Exception as error:
        root = getattr(error, "root_cause", None)
        answer = {"error": type(error).__name__, "text": str(error), "cause": root and root.cause}
    else:
        answer = {"returns": result.returns, "restarts": result.restart_count}
    answer["events"] = [type(event).__name__ for event in context.events()]
    context.close()
    say(**answer)
'''


class Launcher:
    """A program that walks cases, one a line, and says what came of each."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"launcher-{uuid.uuid4().hex}.py"
        path.write_text(LAUNCHER)
        self.log = (folder / "log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, "PYTHONPATH": SOURCE},
            start_new_session=True,
        )
        self._buffer = b""

    def launch(self, **case) -> None:
        self.process.stdin.write(json.dumps(case).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict:
        until = time.monotonic() + PATIENCE_S
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            assert left > 0, "the launcher said nothing: a silent hang"
            if select.select([self.process.stdout], [], [], left)[0]:
                data = os.read(self.process.stdout.fileno(), 65536)
                assert data, f"the launcher ended: {self.process.wait(PATIENCE_S)}"
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        family = self.family() if self.process.poll() is None else []
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        self.process.stdout.close()
        self.log.close()
        for process in psutil.wait_procs(family, 10)[1]:
            process.kill()


@pytest.fixture(scope="module")
def launchers(tmp_path_factory):
    """Returns a launcher that lives; the last one, if that does."""
    folder = tmp_path_factory.mktemp("launchers")
    made: list[Launcher] = []

    def living() -> Launcher:
        if not made or made[-1].process.poll() is not None:
            made.append(Launcher(folder))
            assert made[-1].answer() == {"ready": True}
        return made[-1]

    yield living
    for launcher in made:
        launcher.end()


# ── the table ────────────────────────────────────────────────────────────────────────────

HELPERS = ("fork server", "store host", "agent", "launcher")
MOMENTS = (
    "before the first worker",
    "while workers start",
    "before rendezvous",
    "in rendezvous",
    "in training",
    "in put_tensor",
    "during a restart",
    "at exit",
)
HEAVY = ("before rendezvous", "in rendezvous", "in put_tensor")
WAYS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)


def left_out(helper: str, way: int, moment: str) -> str | None:
    """Return why there is no such case."""
    if helper == "store host" and moment == "before the first worker":
        return "it is made with the workers"
    if way == signal.SIGSTOP:
        if helper != "fork server":
            return "nobody asks it for anything that a timeout of ours could bound"
        if moment not in ("before the first worker", "during a restart", "at exit"):
            return "while no worker starts or ends nobody needs its answer"
    if way == signal.SIGSEGV and helper in ("agent", "launcher") and moment in HEAVY:
        return "as SIGKILL, for who is left"
    return None


CASES = [
    pytest.param(helper, way, moment, id=f"{helper}-{signal.Signals(way).name}-{moment}")
    for helper in HELPERS
    for way in WAYS
    for moment in MOMENTS
    if left_out(helper, way, moment) is None
]


def servers_of(launcher: Launcher) -> list[psutil.Process]:
    (agent,) = psutil.Process(launcher.process.pid).children()
    return [child for child in agent.children() if "forkserver" in " ".join(child.cmdline())]


def is_store_host(process: psutil.Process) -> bool:
    try:
        return "phalanx-store-host" in os.readlink(f"/proc/{process.pid}/fd/2")
    except OSError:
        return False


def find(helper: str, launcher: Launcher, worker: int) -> list[psutil.Process]:
    if helper == "launcher":
        return [psutil.Process(launcher.process.pid)]
    if helper == "agent":
        return psutil.Process(launcher.process.pid).children()
    if helper == "store host":
        return [process for process in launcher.family() if is_store_host(process)]
    return [psutil.Process(worker).parent()] if worker else servers_of(launcher)


@pytest.mark.parametrize(("helper", "way", "moment"), CASES)
def test_no_death_of_a_helper_is_silent(launchers, tmp_path, helper, way, moment):
    launcher = launchers()
    try:
        walk(launcher, tmp_path, helper, way, moment)
    except BaseException:
        launcher.process.kill()  # the next case gets another
        launcher.process.wait(PATIENCE_S)
        raise


def walk(launcher: Launcher, tmp_path: Path, helper: str, way: int, moment: str) -> None:
    tag = f"case-{uuid.uuid4().hex}"
    restarts = int(way == signal.SIGSEGV or moment == "during a restart")
    is_before = moment == "before the first worker"
    launcher.launch(
        folder=str(tmp_path), moment=moment, tag=tag, restarts=restarts,
        is_light=helper != "store host" and moment not in HEAVY,
        start_timeout=1 if is_before and way == signal.SIGSTOP else 60,
    )  # fmt: skip
    if is_before:
        assert launcher.answer() == {"ready": True}
        for server in servers_of(launcher):
            server.suspend()  # so that no worker is made meanwhile
        launcher.launch()
    assert launcher.answer() == {"launched": True}
    worker = 0
    if not is_before:
        for rank in (0, 1):
            wait_until((tmp_path / f"at-{rank}").exists, PATIENCE_S, moment)
        wait_until(lambda: (tmp_path / "at-1").read_text(), PATIENCE_S, "its pid")
        worker = int((tmp_path / "at-1").read_text())
    victims, family = find(helper, launcher, worker), launcher.family()
    assert victims
    for victim in victims:
        victim.send_signal(way)
    for process in family if is_before and way != signal.SIGSTOP else ():
        if process.is_running():
            process.send_signal(signal.SIGCONT)  # or it would not even die of SIGSEGV
    (tmp_path / "go-on").touch()
    if helper == "launcher":
        assert launcher.process.wait(PATIENCE_S) == -way
    else:
        check(launcher.answer(), helper, way, moment, [victim.pid for victim in victims])
    if helper not in ("launcher", "agent"):  # which take the family along, see below
        wait_until(lambda: not any(map(is_worker, launcher.family())), PATIENCE_S, "workers")
    if helper in ("agent", "launcher"):
        wait_until(lambda: not any(map(lives, family)), PATIENCE_S, "the family")
    assert not [process for process in family if process.is_running() and is_store_host(process)]


def is_worker(process: psutil.Process) -> bool:
    """Whether it leads a session, as workers and nobody else below the agent."""
    try:
        own_agent = "phalanx.agent" in " ".join(process.cmdline())
        return lives(process) and not own_agent and os.getsid(process.pid) == process.pid
    except (psutil.Error, OSError):
        return False


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def check(answer: dict, helper: str, way: int, moment: str, pids: list[int]) -> None:
    name = signal.Signals(way).name
    if helper == "agent":
        assert answer["error"] == "AgentLostError"
        assert f"(process {pids[0]}) was ended by {name}, and the workers with it" in answer["text"]
    elif moment == "at exit":  # all have returned: what they say is kept
        assert answer["returns"] == ["done", "done"]
    elif moment == "during a restart":  # it would have gone with its generation
        assert (answer["returns"], answer["restarts"]) == (["again", "again"], 1)
    elif way == signal.SIGSEGV:
        assert (answer["returns"], answer["restarts"]) == (["again", "again"], 1)
        assert "HelperExited" in answer["events"]
    elif way == signal.SIGSTOP:
        assert "did not reach the user's code within 1 s" in answer["text"]
    else:
        what = {"store host": "The store of the group", "fork server": "The fork server"}[helper]
        starts = [f"The run failed: {what} (process {pid}) was ended by {name}" for pid in pids]
        assert answer["text"].startswith(tuple(starts)), answer["text"]
        assert answer["cause"] == "helper"


WITH_SUCCESSOR = """
import os, signal, sys, time
from pathlib import Path

import psutil
from phalanx import start_processes

way, go_on = int(sys.argv[1]), Path(sys.argv[2])

def train(rank, world_size):
    while not go_on.exists():
        time.sleep(0.01)
    return rank

def successor_of(context):
    workers = set(context.pids().values())
    if len(workers) < 2:
        return None
    for child in psutil.Process(min(workers)).parent().children():
        if child.pid not in workers and "store-host" not in os.readlink(f"/proc/{child.pid}/fd/2"):
            return child
    return None

context = start_processes(train, 2)
until = time.monotonic() + 20
while (successor := successor_of(context)) is None:
    assert time.monotonic() < until, "no successor"
    time.sleep(0.005)
successor.send_signal(way)
go_on.touch()
print(context.wait(20).returns, start_processes(train, 2).wait(20).returns, successor.pid)
"""


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_successor_that_dies_or_is_stopped_is_not_missed(run_script, tmp_path, way):
    done = run_script(WITH_SUCCESSOR, str(int(way)), str(tmp_path / "go-on"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(0, 1) (0, 1) ")
    assert not psutil.pid_exists(int(done.stdout.split()[-1]))

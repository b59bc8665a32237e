"""Ranks that show no sign of life, in real processes: who is blamed, and who is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import phalanx
from phalanx import NotALauncherError, SpecError, WorkerFailedError, get_context, start_processes
from phalanx.values import events as ev
from tests.conftest import Script, wait_until

TIMEOUT_S = 1.0
LONG_S = 4 * TIMEOUT_S
"""Somebody would have been called hung by then."""


def light(function, world_size=2, **options):
    """Start watched workers without torch."""
    options.setdefault("hang_timeout", TIMEOUT_S)
    return start_processes(function, world_size, preload=(), **options)


def hang_of(context) -> WorkerFailedError:
    with pytest.raises(WorkerFailedError) as caught:
        context.wait(60)
    assert caught.value.root_cause.cause == "hang"
    return caught.value


@pytest.fixture
def start(start_phalanx, tmp_path, monkeypatch):
    """Start the command; the runs of this test are among no others."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return start_phalanx


# ── who hangs ────────────────────────────────────────────────────────────────────────────

ONE_SLEEPS = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def load():
    if rank == 2 and first:
        time.sleep(300)

for step in range(3):
    dist.all_reduce(torch.ones(2))
load()
dist.all_reduce(torch.ones(2))
print("done", flush=True)
"""


def test_the_rank_that_others_wait_for_is_named_with_the_stacks_of_all(start):
    done = start(
        "run", "--nproc-per-node", "3", "--hang-timeout", "2", "train.py", source=ONE_SLEEPS
    ).finish()
    assert done.returncode == 128 + signal.SIGKILL
    assert "Rank 2 failed: no sign of life for 2 s; it is in " in done.stderr
    assert "it hung, and was killed (SIGKILL)" in done.stderr
    own, others = done.stderr.split("ranks 0, 1 are in:")
    assert 'train.py", line 11, in load' in own.rpartition("rank 2 is in:")[2]
    assert "in all_reduce" in others.partition("Because of that")[0]


def test_a_restart_heals_a_hang(start):
    done = start(
        "run", "--nproc-per-node", "3", "--hang-timeout", "2", "--max-restarts", "1", "--no-fold",
        "train.py", source=ONE_SLEEPS,
    ).finish()  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.count("done") == 3
    assert "rank 2 failed (no sign of life for 2 s; it is in" in done.stderr
    assert "ranks 0, 1 are in:" in done.stderr


def speak_once(rank, world_size):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = get_context()
    context.heartbeat(step=1)
    while rank == 0:
        time.sleep(0.05)
        context.heartbeat()
    time.sleep(300)


def test_each_rank_has_a_clock_of_its_own():
    context = light(speak_once)
    error = hang_of(context)
    assert error.root_cause.rank == 1
    assert error.root_cause.exit == phalanx.Signaled(9, "SIGKILL")
    assert "in speak_once" in error.root_cause.traceback
    hung = [event for event in context.events() if isinstance(event, ev.WorkerHung)]
    assert [event.rank for event in hung] == [1]
    lines = (Path(context.spec.run_dir) / "events.jsonl").read_text().splitlines()
    assert "WorkerHung" in [json.loads(line)["event"] for line in lines]


def beat(rank, world_size, silent):
    context = get_context()
    while True:
        time.sleep(0.05)
        if rank != silent:
            context.heartbeat()


@pytest.mark.parametrize("silent", [None, 1], ids=["spoke before", "never spoke"])
def test_a_rank_that_is_stopped_is_said_to_be_so(silent):
    context = light(beat, 3, args=(silent,))
    wait_until(lambda: context.state == "running" and len(context.pids()) == 3, 20)
    time.sleep(TIMEOUT_S / 5)
    os.kill(context.pids()[1], signal.SIGSTOP)
    error = hang_of(context)
    assert error.root_cause.rank == 1
    assert "the process is stopped (SIGSTOP, Ctrl-Z)" in error.root_cause.message
    assert "no Python stack: the process is stopped" in error.root_cause.stacks


DDP_HANGS = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

backend = sys.argv[1]
if backend == "synchronize":
    from phalanx import get_context
    reduce, model = get_context().synchronize, torch.nn.Linear(4, 1)
else:
    dist.init_process_group(backend)
    reduce, model = (lambda: None), DistributedDataParallel(torch.nn.Linear(4, 1))
rank = int(os.environ["RANK"])
optimizer = torch.optim.SGD(model.parameters())

def load(step):
    if rank == 1 and step == 3:
        time.sleep(300)
    return torch.ones(2, 4)

for step in range(5):
    optimizer.zero_grad()
    model(load(step)).sum().backward()
    reduce()
    optimizer.step()
"""


@pytest.mark.parametrize("backend", ["gloo", "shm", "synchronize"])
def test_who_waits_in_a_training_step_is_not_blamed(start, backend):
    done = start(
        "run", "--nproc-per-node", "3", "--hang-timeout", "3", "--preload", "torch,torch._dynamo",
        "train.py", backend, source=DDP_HANGS,
    ).finish()  # fmt: skip
    assert done.returncode == 137
    assert "Rank 1 failed: no sign of life for 3 s; it is in " in done.stderr
    assert done.stderr.count("in load") == 2, "in the headline, and in its stack"


def sleep_if_first(rank, world_size):
    while rank == 1 and get_context().restart_count == 0:
        time.sleep(1)
    return rank


def test_a_rank_alone_is_started_again():
    context = light(sleep_if_first, restart="worker", max_restarts=1)
    result = context.wait(60)
    assert (result.returns, result.restart_count) == ((0, 1), 1)


# ── who does not ─────────────────────────────────────────────────────────────────────────


def print_only(rank, world_size):
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        print("still here")
        time.sleep(TIMEOUT_S / 10)


@pytest.mark.parametrize("console", ["all", "none"])
def test_output_is_a_sign_of_life(console, tmp_path):
    """Through a pipe, or straight into a file."""
    light(print_only, console=console, log_dir=tmp_path).wait(60)


PRINTS_MUCH = """
for number in range(200_000):
    print(number, "x" * 100)
"""


def test_who_is_held_up_by_a_console_that_nobody_reads_does_not_hang(start):
    started = start(
        "run", "--preload", "", "--nproc-per-node", "2", "--hang-timeout", "1", "--no-fold",
        "train.py", source=PRINTS_MUCH,
    )  # fmt: skip
    ready(started)
    time.sleep(LONG_S)
    done = started.finish()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 400_000


def serve_or_work(rank, world_size):
    print("hello")  # which promises nothing
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        time.sleep(TIMEOUT_S / 10)
        if rank > 0:
            get_context().heartbeat()


def test_a_server_that_says_nothing_is_none_while_others_go_on():
    light(serve_or_work, 3).wait(60)


def test_when_all_are_silent_one_is_blamed():
    error = hang_of(light(time_sleeps))
    assert error.root_cause.rank == 0
    assert "ranks 0, 1 are in:" in error.root_cause.stacks


def time_sleeps(rank, world_size):
    time.sleep(300)


def count_signs(rank, world_size):
    import torch

    context = get_context()
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter])
    calls = {
        "heartbeat": context.heartbeat,
        "report": lambda: context.report(loss=1.0),
        "barrier": context.barrier,
        "should_stop": context.should_stop,
        "synchronize": lambda: context.synchronize(parameter),
        "put_tensor": lambda: context.put_tensor("key", torch.ones(1)),
        "get_tensor": lambda: context.get_tensor("key"),
        "has_tensor": lambda: context.has_tensor("other"),
        "step": optimizer.step,
        "stop_requested": lambda: context.stop_requested,
    }
    counts = {}
    for name, call in calls.items():
        before = context._page.num_signs(rank)
        call()
        counts[name] = context._page.num_signs(rank) - before
    return counts


@pytest.mark.parametrize("hang_timeout", [None, 60])
def test_what_counts_as_a_sign(hang_timeout):
    counts = start_processes(count_signs, 2, hang_timeout=hang_timeout).wait().returns[0]
    assert counts.pop("stop_requested") == 0, "to read a flag is not to get on"
    assert counts.pop("step") == (hang_timeout is not None), "no hook where nobody watches"
    assert set(counts.values()) == {1}


STEPS_ONLY = """
import time
import torch

parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter])
until = time.monotonic() + 12
while time.monotonic() < until:
    parameter.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.1)
"""


def test_optimizer_steps_are_signs_of_a_script_that_knows_nothing_of_us(start):
    watched = ("run", "--nproc-per-node", "2", "--hang-timeout", "8")
    for started in [
        start(*watched, "--preload", preload, "train.py", source=STEPS_ONLY)
        for preload in ("torch", "")
    ]:
        done = started.finish()
        assert (done.returncode, done.stderr) == (0, "")


def return_late(rank, world_size):
    if rank == 0:
        signal.signal(signal.SIGTERM, lambda *_: None)
        while not get_context().stop_requested:
            get_context().heartbeat()
            time.sleep(0.01)
        time.sleep(LONG_S)
    return rank


def test_nobody_is_watched_while_the_run_stops():
    context = light(return_late)
    wait_until(lambda: context.state == "running", 20)
    context.shutdown(60)
    assert context.state == "stopped"
    assert context.wait().returns == (0, 1)


DEBUGGED = """
import sys, threading, time
from phalanx import start_processes, get_context

def work(rank, world_size):
    get_context().heartbeat()
    get_context().breakpoint(rank=1)
    if rank == 0:
        time.sleep(float(sys.argv[1]))
    return rank

context = start_processes(work, 2, preload=(), hang_timeout=1)
print("returns", context.wait().returns)
"""


def test_who_sits_in_a_debugger_is_given_time(script):
    started = script(DEBUGGED, "4", stdin=subprocess.PIPE)
    time.sleep(LONG_S)
    done = started.finish(30, stdin="p rank\nc\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "returns (0, 1)" in done.stdout


# ── arguments ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "soon"])
def test_a_wrong_timeout_is_refused(wrong):
    with pytest.raises(SpecError, match="hang_timeout must be"):
        light(time_sleeps, hang_timeout=wrong)


# ── stacks on demand ─────────────────────────────────────────────────────────────────────


def test_stacks_of_all_ranks_at_any_time():
    with light(time_sleeps, 3, hang_timeout=None) as context:
        wait_until(lambda: context.state == "running", 20)
        for _ in range(2):
            stacks = context.dump_stacks()
            assert sorted(stacks) == [0, 1, 2]
            for text in stacks.values():
                assert text.startswith("  File ")
                assert text.endswith(", in time_sleeps")
                assert "bootstrap.py" not in text
        os.kill(context.pids()[2], signal.SIGSTOP)
        assert "stopped (SIGSTOP" in context.dump_stacks()[2]
        os.kill(context.pids()[2], signal.SIGCONT)
        assert context.dump_stacks()[2].endswith(", in time_sleeps"), "it goes on as before"
        context.shutdown(5)
        assert context.dump_stacks() == {}


def raise_when_told(rank, world_size):
    while not get_context().stop_requested:
        time.sleep(0.01)
    raise ValueError("told")


def crash_when_told(rank, world_size):
    import ctypes

    while not get_context().stop_requested:
        time.sleep(0.01)
    ctypes.string_at(0)


def test_an_answer_is_no_native_stack_of_a_later_crash():
    for function, expected in ((raise_when_told, None), (crash_when_told, "Fatal Python error")):
        context = light(function, 1, hang_timeout=None)
        wait_until(lambda context=context: context.state == "running", 20)
        context.dump_stacks()
        context.shutdown(20)
        with pytest.raises(phalanx.PhalanxError):
            context.wait()
        exits = [e for e in context.events() if isinstance(e, ev.WorkerExited)]
        assert (exits[0].native_stack or "None")[:18] == str(expected)


def ask_in_a_worker(rank, world_size):
    try:
        get_context().dump_stacks()
    except NotALauncherError:
        return True


def test_only_the_launcher_asks():
    assert light(ask_in_a_worker, 1).wait().returns == (True,)


NAP = "import time\ndef nap():\n    time.sleep(300)\nnap()\n"


def ready(script: Script) -> str:
    runs = Path(os.environ["XDG_STATE_HOME"], "phalanx", "runs")
    wait_until(
        lambda: any("GroupRan" in log.read_text() for log in runs.glob("*/events.jsonl")), 20
    )
    return next(runs.iterdir()).name


def test_phalanx_stacks(start):
    script = start("run", "--preload", "", "--nproc-per-node", "3", "train.py", source=NAP)
    run_id = ready(script)
    wait_until(lambda: "in nap" in start("stacks").finish().stdout, 20)
    shown = start("stacks", run_id).finish()
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("ranks 0, 1, 2 are in:\n  File ")
    one = start("stacks", "--rank", "1").finish()
    assert one.stdout.startswith("rank 1 is in:\n")
    assert one.stdout.rstrip().endswith('train.py", line 3, in nap')
    none = start("stacks", "--rank", "7").finish()
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr == "phalanx stacks: there is no rank 7 among 3: they are 0–2\n"
    start("stop").finish()
    assert "has ended already" in start("stacks", run_id).finish().stderr


def test_what_is_no_python_has_a_state_and_output(start):
    """A program that never told that it answers is not sent any signal."""
    command = "while :; do echo on; sleep 0.2; done"
    script = start(
        "run", "--no-python", "--nproc-per-node", "2", "--hang-timeout", "1", "sh", "-c", command
    )
    ready(script)
    time.sleep(LONG_S)
    shown = start("stacks").finish().stdout
    assert shown.startswith("ranks 0, 1:\n  no Python stack: the process is ")
    assert script.process.poll() is None
    start("kill").finish()


def test_a_program_that_prints_nothing_hangs(start):
    done = start("run", "--no-python", "--hang-timeout", "1", "sleep", "300").finish()
    assert done.returncode == 137
    assert "Rank 0 failed: no sign of life for 1 s; the process is waiting" in done.stderr

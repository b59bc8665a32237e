"""Many workers: starts and ends of 64, what idle ones cost the agent, their memory."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from benchmarks.stats import Row, show
from phalanx import start_processes
from phalanx.values.events import GroupRan


def _trivial(rank: int, world_size: int) -> int:
    return rank


def _idle(rank: int, world_size: int) -> None:
    time.sleep(1000)


def many_workers(runs: int) -> None:
    """64 trivial workers on this machine: start, run, end."""
    row = Row("64 trivial workers, call → all returned and gone")
    start_processes(_trivial, 2).wait()
    for _ in range(runs):
        began = time.perf_counter()
        result = start_processes(_trivial, 64).wait()
        row.samples.append(time.perf_counter() - began)
        assert result.returns == tuple(range(64))
    show("64 workers", [row])


def idle_cost(seconds: float = 10.0) -> None:
    """Wake-ups of the agent while 64 workers sleep, and the memory of an idle worker."""
    context = start_processes(_idle, 64)
    for event in context.events():
        if isinstance(event, GroupRan):
            break
    time.sleep(4.0)  # the fork server's successor has come up by then
    agent = psutil.Process().children()[0]
    before = _switches(agent.pid)
    time.sleep(seconds)
    wakeups = Row(f"wake-ups of the agent in {seconds:g} s", "", target="0")
    wakeups.samples.append(_switches(agent.pid) - before)
    memory = Row("memory (PSS) of an idle worker that imported torch", "MB", target="≤ 40 MB")
    memory.samples += [_pss(pid) for pid in context.pids().values()]
    context.shutdown()
    show("64 idle workers", [wakeups, memory])


def _switches(pid: int) -> int:
    """Voluntary context switches of all threads: each is a sleep that ended."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def _pss(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0

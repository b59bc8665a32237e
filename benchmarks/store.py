"""The tensor store: what a put and a get cost, beside other ways; and many keys."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.stats import Row, show
from benchmarks.store_peers import (
    PATIENCE_S,
    PEERS,
    WARM_UP,
    Line,
    Peer,
    Phalanx,
    Ray,
    RayActor,
    Samples,
    by_size,
    work,
)
from phalanx import get_context, start_processes

_MIB = 1024 * 1024
_NAMES = {
    4096: "4 KiB", 65_536: "64 KiB", _MIB: "1 MiB", 64 * _MIB: "64 MiB", 1024 * _MIB: "1 GiB"
}  # fmt: skip
_KEYS = 1000
_OPERATIONS = 100_000
_HEADER = (
    "| | put | get | put + get, or transfer | with all read and dropped | rounds | note |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass
class _Figures:
    """What one way took at one size, in milliseconds."""

    name: str
    put: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    compared: bool = True
    note: str = ""

    def __str__(self) -> str:
        cells = " | ".join(_cell(times) for times in (self.put, self.get, self.total, self.whole))
        rounds = len(self.total or self.put)
        return f"| {self.name} | {cells} | {rounds} | {self.note} |"


def _cell(times: list[float]) -> str:
    if not times:
        return "–"
    return f"{_ms(statistics.median(times))} ({_ms(min(times))}–{_ms(max(times))})"


def _ms(time_: float) -> str:
    return f"{time_:.3f}" if time_ < 10 else f"{time_:.1f}"


# ── put and get ──────────────────────────────────────────────────────────────────────────


def store(runs: int) -> None:
    """Tensors from one worker to another, and 1,000 keys."""
    rounds = {4096: 50, 65_536: 30, _MIB: 10, 64 * _MIB: 2}
    sizes = {size: count * runs for size, count in rounds.items()}
    sizes[1024 * _MIB] = max(3, runs // 2)
    ours, memcpy = _measure_phalanx(sizes)
    tables = {size: [ours[size], memcpy[size]] for size in sizes}
    for kind in PEERS:
        answer = measure(kind, sizes)
        for size, count in sizes.items():
            tables[size].append(_figures_of(kind, answer, size, count))
    for size, table in tables.items():
        print(f"\n## Store: {_NAMES[size]} from one worker to another, ms\n\n{_HEADER}")
        for figures in table:
            print(figures, flush=True)
    print()
    for line in _aims(tables):
        print(f"- {line}")
    many_keys()


def _measure_phalanx(sizes: dict[int, int]) -> tuple[dict[int, _Figures], dict[int, _Figures]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        start_processes(_phalanx_worker, 2, args=(folder, sizes)) as context,
    ):
        answers = context.wait().returns
    ours, memcpy = {}, {}
    times = by_size([answer[0] for answer in answers])
    for size, count in sizes.items():
        ours[size] = _figures_of(Phalanx, times, size, count)
        memcpy[size] = _Figures("memcpy: copy_ into a warm tensor", answers[0][1][size])
        for figures in (ours[size], memcpy[size]):
            figures.note = f"{_gigabytes(size, figures):.1f} GB/s; {figures.note}".rstrip("; ")
    return ours, memcpy


def _gigabytes(size: int, figures: _Figures) -> float:
    return size / statistics.median(figures.put) / 1e6


def _phalanx_worker(rank: int, world_size: int, folder: str, sizes: dict[int, int]) -> Any:
    """Return the times by size, and of rank 0 those of memcpy, before and after."""
    import torch

    torch.set_num_threads(1)
    if rank:
        return work(Phalanx(), rank, folder, None, sizes), {}
    before = _time_copies(sizes)
    times = work(Phalanx(), rank, folder, None, sizes)
    after = _time_copies(sizes)
    return times, {size: before[size] + after[size] for size in sizes}


def _time_copies(sizes: dict[int, int]) -> dict[int, list[float]]:
    import torch

    times: dict[int, list[float]] = {}
    for size, count in sizes.items():
        source, copy = torch.rand(size // 4), torch.zeros(size // 4)
        times[size] = []
        for _ in range(count):
            began = time.monotonic_ns()
            copy.copy_(source)
            times[size].append((time.monotonic_ns() - began) / 1e6)
    return times


def _figures_of(
    kind: type[Peer], answer: dict[int, list[Samples]] | str, size: int, rounds: int
) -> _Figures:
    figures = _Figures(kind.name, compared=kind.compared)
    if isinstance(answer, str):
        figures.note = answer if answer == "not installed" else f"failed: {answer:.200}"
    elif size > kind.limit:
        figures.note = f"takes at most {kind.limit / _MIB:g} MiB"
    else:
        _add_rounds(figures, answer[size], separate=kind.separate)
        figures.note = f"first round {_ms(figures.whole[0])}"
        for times in (figures.put, figures.get, figures.total, figures.whole):
            del times[:WARM_UP]
        if len(figures.total) < rounds:
            figures.note += f"; {rounds} rounds would have taken too long"
    return figures


def _add_rounds(figures: _Figures, samples: list[Samples], *, separate: bool) -> None:
    for (put, was_put), (get, was_got, was_read) in zip(*samples, strict=True):
        if separate:
            figures.put.append((was_put - put) / 1e6)
            figures.get.append((was_got - get) / 1e6)
            figures.total.append(figures.put[-1] + figures.get[-1])
            figures.whole.append(figures.put[-1] + (was_read - get) / 1e6)
        else:
            figures.total.append((was_got - put) / 1e6)
            figures.whole.append((was_read - put) / 1e6)


# ── the aims ─────────────────────────────────────────────────────────────────────────────


def _aims(tables: dict[int, list[_Figures]]) -> list[str]:
    small = tables[4096][0]
    put, get = (statistics.median(times) * 1000 for times in (small.put, small.get))
    lines = [
        _judged(put <= 60 and get <= 60, f"4 KiB: put ≤ 60 µs: {put:.0f}; get ≤ 60 µs: {get:.0f}")
    ]
    for size in (64 * _MIB, 1024 * _MIB):
        ours, memcpy = (_gigabytes(size, figures) for figures in tables[size][:2])
        aim = min(8.0, memcpy / 2)
        text = f"{_NAMES[size]}: put ≥ {aim:.1f} GB/s (8, or half of memcpy): {ours:.1f}"
        lines.append(_judged(ours >= aim, text))
    slowest = max(tables, key=lambda size: statistics.median(tables[size][0].get))
    got = statistics.median(tables[slowest][0].get)
    text = f"get ≤ 0.2 ms at every size: at most {got:.3f} ms ({_NAMES[slowest]})"
    lines.append(_judged(got <= 0.2, text))
    large = [size for size in tables if size >= _MIB]
    behind = _behind(tables, large, "total")
    lines.append(_judged(not behind, f"ahead of every peer from 1 MiB on: {_joined(behind)}"))
    lines.append(_against_tcp_store(tables))
    behind = _behind(tables, [size for size in tables if size < _MIB], "total")
    lines.append(f"Below 1 MiB, put + get: {_joined(behind)}.")
    behind = _behind(tables, list(tables), "whole")
    lines.append(f"With all read and dropped: {_joined(behind)}.")
    others = [figures.name for figures in tables[large[-1]] if not figures.compared]
    lines.append(f"Not compared, as it does something else: {', '.join(others)}.")
    return lines


def _judged(met: bool, text: str) -> str:  # noqa: FBT001
    return f"Aim {'met' if met else 'MISSED'}: {text}."


def _joined(behind: list[str]) -> str:
    return "behind " + "; ".join(behind) if behind else "behind nobody"


def _behind(tables: dict[int, list[_Figures]], sizes: list[int], what: str) -> list[str]:
    """Name every peer that took less at one of the sizes, and both times."""
    found = []
    for size in sizes:
        ours, _, *theirs = tables[size]
        mine = statistics.median(getattr(ours, what))
        for figures in theirs:
            times = getattr(figures, what)
            if figures.compared and times and statistics.median(times) < mine:
                both = f"{_ms(mine)} against {_ms(statistics.median(times))} ms"
                found.append(f"{figures.name} at {_NAMES[size]} ({both})")
    return found


def _against_tcp_store(tables: dict[int, list[_Figures]]) -> str:
    ratios = {}
    for size in (4096, 65_536):
        ours = tables[size][0]
        for figures in tables[size]:
            if figures.name.startswith("TCPStore") and figures.put:
                for what in ("put", "get"):
                    mine, its = (statistics.median(getattr(f, what)) for f in (ours, figures))
                    ratios[f"{what} of {_NAMES[size]}"] = mine / its
    text = ", ".join(f"{what} {ratio:.2f} ×" for what, ratio in ratios.items())
    met = bool(ratios) and max(ratios.values()) <= 2
    return _judged(met, f"at most 2 × TCPStore's time below 1 MiB: {text or 'not measured'}")


# ── many keys ────────────────────────────────────────────────────────────────────────────


def many_keys() -> None:
    """1,000 keys of 4 KiB in a fixed pseudo-random order: flat in time and memory?"""
    with (
        tempfile.TemporaryDirectory() as folder,
        start_processes(_many_keys_worker, 2, args=(folder,)) as context,
    ):
        (puts, memory), (gets, _) = context.wait().returns
    rows, notes = [], []
    for what, tenths in (("put", puts), ("get", gets)):
        medians = [statistics.median(times) for times in tenths]
        middle = medians.index(sorted(medians)[len(medians) // 2])
        for which, number in (("first", 0), ("median", middle), ("last", -1)):
            row = Row(f"{what}, {which} tenth, per operation", "µs", tenths[number])
            row.note = f"the fastest tenth of them ≤ {_low(tenths[number]):.1f} µs"
            rows.append(row)
        change = medians[-1] / medians[0] - 1
        low = _low(tenths[-1]) / _low(tenths[0]) - 1
        notes.append(f"{what}: median {change:+.0%} from first to last tenth, fastest {low:+.0%}")
    for when, size in memory.items():
        rows.append(Row(f"memory (RSS) of the agent, {when}", "MB", [size]))
    show(f"Store: {_KEYS:,} keys, {_OPERATIONS:,} puts, then gets, of 4 KiB", rows)
    sizes = list(memory.values())
    notes.append(f"memory: {sizes[-1] - sizes[1]:+.1f} MB from all keys being there to the end")
    print("\nAim: cost per operation flat, memory flat. " + "; ".join(notes) + ".")


def _many_keys_worker(rank: int, world_size: int, folder: str) -> Any:
    """Rank 0 puts a tenth, then rank 1 gets a tenth, and so on; return µs by tenth."""
    import torch

    torch.set_num_threads(1)
    context, tensor = get_context(), torch.rand(1024)
    agent = psutil.Process().parents()[1]  # the fork server's parent
    line = Line(rank, folder)
    memory = {"before": _rss(agent)}
    order = random.Random(rank).choices([f"key-{number}" for number in range(_KEYS)], k=_OPERATIONS)
    if rank == 0:
        for number in range(_KEYS):
            context.put_tensor(f"key-{number}", tensor)
        memory[f"all {_KEYS:,} keys there"] = _rss(agent)
        operate = lambda key: context.put_tensor(key, tensor)  # noqa: E731
    else:
        operate = context.get_tensor
    tenths, step = [], _OPERATIONS // 10
    for number in range(10):
        if rank:
            line.hear()
        tenths.append([_microseconds(operate, key) for key in order[number * step :][:step]])
        line.tell()
        if not rank:
            line.hear()
            if number == 4:
                memory["halfway"] = _rss(agent)
    memory["after"] = _rss(agent)
    return tenths, memory


def _microseconds(operate: Any, key: str) -> float:
    began = time.monotonic_ns()
    operate(key)
    return (time.monotonic_ns() - began) / 1000


def _low(times: list[float]) -> float:
    """Return the tenth percentile: what others on the machine do shows in it least."""
    return statistics.quantiles(times, n=10)[0]


def _rss(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / _MIB


# ── two processes ────────────────────────────────────────────────────────────────────────


def measure(kind: type[Peer], sizes: dict[int, int]) -> dict[int, list[Samples]] | str:
    """Hand over `sizes` (bytes: rounds); return both ranks' times by size, or what failed."""
    if issubclass(kind, Ray) and importlib.util.find_spec("ray") is None:
        return "not installed"
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, kind.shared(start) as shared:
        if issubclass(kind, Ray):
            calls: list[Any] = [(_drive_ray, (kind, folder, sizes))]
        else:
            calls = [(_worker, (kind, rank, folder, shared, sizes)) for rank in range(2)]
        answers = _run_processes(start, calls)
    return by_size(answers[0] if issubclass(kind, Ray) else answers)


def _run_processes(start: Any, calls: list[Any]) -> list[Any]:
    """Run functions in processes; whatever happens, none of these is left."""
    ends, processes = [], []
    try:
        for function, args in calls:
            ours, theirs = start.Pipe(duplex=False)
            process = start.Process(target=function, args=(*args, theirs))
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        return [_answer(end) for end in ends]
    finally:
        for process in processes:
            process.join(5.0)
            process.terminate()
        for process in processes:
            process.join(5.0)
            process.kill()
            process.join()


def _answer(end: Any) -> Any:
    try:
        return end.recv() if end.poll(PATIENCE_S) else "no answer in time"
    except EOFError:
        return "a process died"


def _worker(
    kind: type[Peer], rank: int, folder: str, shared: object, sizes: dict[int, int], answers: Any
) -> None:
    try:
        result: object = work(kind(), rank, folder, shared, sizes)
    except KeyboardInterrupt:
        return
    except Exception:  # noqa: BLE001 - it is handed on
        result = traceback.format_exc().strip().splitlines()[-1]
    answers.send(result)
    answers.close()
    os._exit(0)  # some of these libraries hang, or complain, in their teardown


def _drive_ray(kind: type[Ray], folder: str, sizes: dict[int, int], answers: Any) -> None:
    """In a process of its own: the flag counts only if it is set before ray is imported."""
    os.environ.update(kind.environment)
    import ray

    variables = {**kind.environment, "PYTHONPATH": str(Path(__file__).parents[1])}
    try:
        ray.init(
            num_cpus=2, object_store_memory=4 << 30, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR", runtime_env={"env_vars": variables},
        )  # fmt: skip
        actor = ray.remote(RayActor).options(max_concurrency=2, num_cpus=1)
        actors = [actor.remote() for _ in range(2)]
        result: Any = ray.get([
            each.work.remote(kind, rank, folder, actors[1], sizes)
            for rank, each in enumerate(actors)
        ])  # fmt: skip
    except Exception:  # noqa: BLE001 - it is handed on
        result = [traceback.format_exc().strip().splitlines()[-1]] * 2
    finally:
        ray.shutdown()
    answers.send(result)

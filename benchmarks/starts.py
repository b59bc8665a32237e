"""Cold and warm starts, recovery, detection: against torchrun, in one run."""

from __future__ import annotations

from benchmarks.programs import import_torch_seconds, run, times
from benchmarks.stats import Row, show

_WORLD_SIZE = 4


def cold_start(runs: int) -> None:
    """Command issued → last rank's first all-reduce, 4 workers, launcher without torch."""
    bare = Row("one bare `import torch`")
    ours = Row("Phalanx, command → first all-reduce", target="≤ 1.5 × import torch")
    whole = Row("Phalanx, whole command")
    after = Row("Phalanx, last worker ended → exit", target="≤ 0.1 s")
    theirs = Row("torchrun, command → first all-reduce")
    theirs_whole = Row("torchrun, whole command")
    for _ in range(runs):
        bare.samples.append(import_torch_seconds())
        for kind, first, total in (("phalanx", ours, whole), ("torchrun", theirs, theirs_whole)):
            stamps = run(kind, "start", _WORLD_SIZE)
            if stamps:
                (command,), (end,) = times(stamps, "command"), times(stamps, "exit")
                first.samples.append(max(times(stamps, "collective-0")) - command)
                total.samples.append(end - command)
                if kind == "phalanx":
                    after.samples.append(end - times(stamps, "ended-0")[0])
    ours.note = f"{ours.median / bare.median:.2f} × import torch"
    theirs.note = f"{theirs.median / ours.median:.1f} × Phalanx" if theirs.samples else ""
    show(f"Cold start, {_WORLD_SIZE} workers", [bare, ours, theirs, whole, theirs_whole, after])


def warm_start(runs: int) -> None:
    """Second and later starts in one launcher: call → last rank's first all-reduce."""
    rows: list[Row] = []
    for world_size in (2, 4, 8, 16):
        stamps = run("phalanx", "start", world_size, runs + 1)
        row = Row(f"{world_size} workers, call → first all-reduce")
        row.target = "≤ 0.1 s" if world_size == 4 else "slowest ≤ 3 × median"
        collectives = times(stamps, "collective-0")
        for number in range(1, runs + 1):
            (called,) = times(stamps, f"call-{number}")
            own = collectives[number * world_size : (number + 1) * world_size]
            row.samples.append(max(own) - called)
        if row.samples:
            row.note = f"slowest {max(row.samples) / row.median:.1f} × the median"
        rows.append(row)
    show("Warm start in the same launcher (torchrun has none: see the cold start)", rows)


def recovery(runs: int) -> None:
    """SIGKILL of one of 4 ranks → the next generation works again."""
    first = Row("Phalanx, SIGKILL → first all-reduce", target="≤ 0.1 s")
    step = Row("Phalanx, SIGKILL → first optimizer.step()", target="≤ 0.2 s")
    seen = Row("Phalanx, SIGKILL → event in the launcher", "ms", target="≤ 10 ms")
    theirs = Row("torchrun, SIGKILL → first all-reduce")
    theirs.note = "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which it often fails"
    theirs_step = Row("torchrun, SIGKILL → first optimizer.step()")
    stamps = run("phalanx", "recover", _WORLD_SIZE, runs)
    _collect(stamps, "collective-1", _WORLD_SIZE, first)
    for killed, noticed in zip(times(stamps, "kill"), times(stamps, "seen"), strict=True):
        seen.samples.append((noticed - killed) * 1000)
    # In its first seconds the fork server still prepares what the first optimizer imports.
    stamps = run("phalanx", "step", _WORLD_SIZE, runs, SETTLE="2")
    _collect(stamps, "step-1", _WORLD_SIZE, step)
    for _ in range(max(2, runs // 4)):
        _collect(run("torchrun", "recover", _WORLD_SIZE), "collective-1", _WORLD_SIZE, theirs)
        _collect(run("torchrun", "step", _WORLD_SIZE), "step-1", _WORLD_SIZE, theirs_step)
    show(f"Recovery, {_WORLD_SIZE} workers", [first, theirs, step, theirs_step, seen])


def many_recoveries(runs: int) -> None:
    """The same with more workers, often: the slowest counts."""
    rows: list[Row] = []
    for world_size in (8, 16):
        row = Row(
            f"{world_size} workers, SIGKILL → first all-reduce", target="slowest ≤ 3 × median"
        )
        _collect(run("phalanx", "recover", world_size, runs), "collective-1", world_size, row)
        if row.samples:
            row.note = f"slowest {max(row.samples) / row.median:.1f} × the median"
        rows.append(row)
    show("Recovery of larger groups", rows)


def _collect(stamps: list[list[str]], name: str, world_size: int, row: Row) -> None:
    """Add, for each kill, the time until the last rank had come to `name`."""
    reached = times(stamps, name)
    for number, killed in enumerate(times(stamps, "kill")):
        own = reached[number * world_size : (number + 1) * world_size]
        if len(own) == world_size:
            row.samples.append(max(own) - killed)

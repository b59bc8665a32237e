"""``phalanx ps``: a table of runs."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

from phalanx.cli.runs import known_runs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from phalanx.cli.runs import KnownRun
    from phalanx.values.spec import LaunchSpec

_HEADINGS = ("RUN", "WHAT", "RANKS", "RESTARTS", "AGE", "STATE", "LAUNCHER")
_MAX_WHAT = 40


def ps(values: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    runs = [run for run in known_runs() if values.all or run.lives]
    if values.quiet:
        lines = [run.run_id for run in runs]
    elif values.json:
        lines = [json.dumps(describe(run)) for run in runs]
    else:
        lines = table([_HEADINGS, *(row(describe(run), time.time()) for run in runs)])
        if not runs and not values.all:
            print("phalanx ps: no run lives; --all shows ended ones", file=sys.stderr)  # noqa: T201
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


def describe(run: KnownRun) -> dict[str, Any]:
    """Return what there is to say about a run, as JSON has it."""
    status, spec, control = run.status(), run.spec(), run.control
    return {
        "run_id": run.run_id,
        "what": None if spec is None else what_runs(spec),
        "lives": run.lives,
        "state": status.state,
        "world_size": None if spec is None else spec.world_size,
        "pids": {str(rank): pid for rank, pid in sorted(status.pids.items())},
        "generation": status.generation,
        "restart_count": status.restart_count,
        "started_at": status.started_at,
        "ended_at": status.ended_at,
        "launcher_pid": control.launcher_pid if control is not None and run.lives else None,
        "run_dir": str(run.paths.root),
    }


def what_runs(spec: LaunchSpec) -> str:
    """Return the function, or the program with its arguments, on one line."""
    if spec.program is None:
        return spec.function
    dash_m = ["-m"] if spec.program.kind == "module" else []
    return shlex.join([*dash_m, spec.program.target, *spec.program.arguments])


def row(about: dict[str, Any], now: float) -> tuple[str, ...]:
    """Return the cells of a run's row."""
    size = about["world_size"]
    started_at = about["started_at"]
    return (
        about["run_id"],
        _shortened(about["what"] or "?"),
        f"{len(about['pids'])}/{'?' if size is None else size}",
        str(about["restart_count"]),
        "-" if started_at is None else age(now - started_at),
        about["state"],
        str(about["launcher_pid"] or "-"),
    )


def age(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = max(0, int(seconds))
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    for (name, size), (lesser, lesser_size) in itertools.pairwise(units):
        if whole >= size:
            return f"{whole // size}{name}{whole % size // lesser_size:02}{lesser}"
    return f"{whole}s"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, in columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_WHAT else f"{text[: _MAX_WHAT - 1]}…"

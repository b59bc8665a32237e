"""``python -m benchmarks [section …] [--runs N]``: measure and print tables."""

from __future__ import annotations

import argparse
import os
import platform

from benchmarks import collectives, command, logs, scale, starts, store, training

_SECTIONS = {
    "cold": lambda runs: starts.cold_start(max(3, runs // 2)),
    "warm": lambda runs: starts.warm_start(runs * 5),
    "recovery": starts.recovery,
    "groups": lambda runs: starts.many_recoveries(runs * 5),
    "logs": lambda runs: logs.flood(max(3, runs // 3)),
    "collectives": lambda runs: collectives.all_reduce(max(3, runs // 2)),
    "workers": scale.many_workers,
    "idle": lambda runs: scale.idle_cost(),
    "command": command.command,
    "store": store.store,
    "training": training.steps,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(_SECTIONS))
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    for name in options.sections:
        if name not in _SECTIONS:
            parser.error(f"there is no section {name!r}; there are {', '.join(_SECTIONS)}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    print(f"# Phalanx on {os.cpu_count()} cores, Python {platform.python_version()}")
    for name, measure in _SECTIONS.items():
        if not options.sections or name in options.sections:
            measure(options.runs)


if __name__ == "__main__":
    main()

"""``python -m matrix [PYTHON:TORCH …]``: test pairs of versions, and write docs/support.md."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matrix import environments, report
from matrix.environments import DEFAULT_PAIRS, ROOT, Pair, PairError


def main() -> int:
    """Test the pairs one after another; return 1 if one does not work."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was made is deleted
    folder = options.folder or Path(tempfile.mkdtemp(prefix="phalanx-matrix-"))
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    good = True
    try:
        for pair in options.pairs or DEFAULT_PAIRS:
            print(f"{pair} …", flush=True)
            result = _examine(pair, folder, keep=options.keep)
            _tell(pair, result)
            report.save({**report.load(), pair: result})  # each at once: the next may take long
            good = good and result.works
    finally:
        if not options.keep:
            shutil.rmtree(folder / "cache", ignore_errors=True)
        if options.folder is None and not options.keep and good:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"written: {report.PAGE.relative_to(ROOT)}")
    if not good or options.keep:
        print(f"kept: {folder}")
    return 0 if good else 1


def _examine(pair: Pair, folder: Path, *, keep: bool) -> report.Result:
    date = time.strftime("%Y-%m-%d", time.gmtime())
    commit = _commit()
    python_version, torch_version = pair.python, pair.torch
    try:
        with environments.environment(pair, folder, keep=keep) as python:
            python_version, torch_version = environments.versions(python)
            tallies, why_not = environments.run_tests(python, folder), ""
    except PairError as error:
        tallies, why_not = {}, str(error)
    return report.Result(
        date=date,
        phalanx=commit,
        python=python_version,
        torch=torch_version,
        tallies=tallies,
        why_not=why_not,
    )


def _tell(pair: Pair, result: report.Result) -> None:
    if result.why_not:
        print(f"{pair}: not tested: {result.why_not}", flush=True)
        return
    failed = [test for tally in result.tallies.values() for test in tally.failed]
    passed = sum(tally.passed for tally in result.tallies.values())
    print(f"{pair}: {passed} passed, {len(failed)} failed", *failed, sep="\n  ", flush=True)


def _commit() -> str:
    """Return the commit that is tested; with a plus if files differ from it."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        [*git, "status", "--porcelain", "src", "tests"], capture_output=True, text=True, check=False
    )
    return (commit.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m matrix",
        description=__doc__,
        epilog=f"Without pairs: {', '.join(map(str, DEFAULT_PAIRS))}. Results of other pairs "
        "stay on the page, with their dates.",
    )
    parser.add_argument("pairs", nargs="*", metavar="PYTHON:TORCH", type=Pair.parse)
    parser.add_argument(
        "--folder", type=Path, help="where environments are made, and logs stay; 7 GB are needed"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the environments, and use kept ones again"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

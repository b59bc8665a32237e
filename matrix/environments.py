"""One environment per pair: made, tested and deleted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from matrix.conformance import Tally, all_tests, read_report

ROOT = Path(__file__).parents[1]
_TEST_NEEDS = ("pytest>=8.0", "pytest-timeout>=2.3", "hypothesis>=6.100", "psutil>=6.0")
_INSTALL_S = 1800.0
_TEST_S = 900.0


class PairError(Exception):
    """A pair can't be tested; says why."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pair:
    """A version of Python, as ``3.11``, and one of torch, as ``2.13.0``."""

    python: str
    torch: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Read ``3.11:2.13.0``.

        Raises:
            ValueError: It is no such pair.
        """
        python, colon, torch = text.partition(":")
        if not (python and colon and torch):
            raise ValueError(f"{text!r} is no pair; write it as PYTHON:TORCH, like 3.11:2.13.0")
        return cls(python=python, torch=torch)

    def __str__(self) -> str:
        return f"{self.python}:{self.torch}"


DEFAULT_PAIRS = tuple(
    Pair.parse(text)
    for text in (
        "3.10:2.6.0",  # the lowest of both
        "3.11:2.6.0",
        "3.11:2.9.1",
        "3.11:2.13.0",
        "3.11:2.14.1",
        "3.12:2.9.1",
        "3.13:2.14.1",  # the highest of both
    )
)


def find_python(version: str) -> str:
    """Return the path of an interpreter: on PATH, this one, or one that pyenv has.

    Raises:
        PairError: There is none.
    """
    candidates = [shutil.which(f"python{version}") or "", sys.executable]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates += [str(path) for path in pyenv.glob(f"versions/{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        asked = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.strip() == version:
            return candidate
    raise PairError(f"there is no Python {version} here; install it, or choose other pairs")


@contextmanager
def environment(pair: Pair, folder: Path, *, keep: bool) -> Iterator[Path]:
    """Make a pair's environment with Phalanx in it, and delete it in the end.

    Args:
        pair: What it has.
        folder: Where it is made. One that is there already, kept by an earlier call, is used
            again, with the Phalanx of today.
        keep: Do not delete it.

    Yields:
        Path of its interpreter.

    Raises:
        PairError: Something can't be installed.
    """
    place = folder / f"python{pair.python}-torch{pair.torch}"
    python = place / "bin" / "python"
    try:
        if not python.exists():
            _do([find_python(pair.python), "-m", "venv", str(place)], folder)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _do([*pip, f"torch=={pair.torch}", *_TEST_NEEDS, str(ROOT)], folder)
        _do([*pip, "--no-deps", "--force-reinstall", str(ROOT)], folder)
        yield python
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _do(command: list[str], folder: Path) -> None:
    """Run a step of the installation; what pip downloads stays in the folder, too."""
    variables = {**os.environ, "PIP_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(folder)}
    variables.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise PairError(f"not installed within {_INSTALL_S:.0f} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise PairError(
            f"can't be installed: {(lines or ['pip failed'])[0].removeprefix('ERROR: ')}"
        )


def versions(python: Path) -> tuple[str, str]:
    """Return what an environment really has: the full versions of Python and torch.

    Raises:
        PairError: Torch can't be imported there.
    """
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    asked = subprocess.run(
        [str(python), "-c", code],
        cwd="/",
        env=_clean(),
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        words = asked.stderr.strip().splitlines() or ["no word"]
        raise PairError(f"torch can't be imported: {words[-1]}")
    found_python, found_torch = asked.stdout.split()[-2:]
    return found_python, found_torch


def run_tests(python: Path, folder: Path) -> dict[str, Tally]:
    """Run the tests with the installed package; return the tally of each area."""
    report = folder / f"{python.parents[1].name}.xml"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "--durations=0", f"--junitxml={report}"]
    command += ["-p", "no:cacheprovider", "--timeout-method=signal", *all_tests()]
    with report.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_clean(), stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TEST_S)
        finally:  # also when this tool is interrupted
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return read_report(report)


def _clean() -> dict[str, str]:
    """Return an environment in which only what is installed is found."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PHALANX"))}

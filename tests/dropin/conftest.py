"""Scripts as people write them, started by torchrun and by `phalanx run`."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import Script, end_scripts

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
PHALANX = ("-m", "phalanx", "run")


@dataclass(frozen=True)
class Launch:
    """Starts scripts by one launcher, each with two ranks, in a folder of its own."""

    launcher: tuple[str, ...]
    folder: Path
    temporary: Path
    scripts: list[Script]

    def start(
        self, name: str, *arguments: str, options: tuple[str, ...] = (), **env: str
    ) -> Script:
        launcher = self.launcher
        if launcher is TORCHRUN:
            options = (*options, "--log-dir", str(self.folder / "torchrun"))
        argv = [*launcher, "--nproc-per-node", "2", *options, str(SCRIPTS / name), *arguments]
        home = {"TMPDIR": str(self.temporary), "HF_HOME": str(self.folder / "hf")}
        self.scripts.append(Script([sys.executable, *argv], self.folder, env={**home, **env}))
        return self.scripts[-1]

    def left(self) -> set[str]:
        """Kinds of temporary files that are still there."""
        return {re.split("[-_]", path.name)[0] for path in self.temporary.iterdir()}

    def result(self) -> dict:
        """What the script has written to ``out.json``."""
        return json.loads((self.folder / "out.json").read_text())


@pytest.fixture
def launch(tmp_path) -> Callable[..., contextlib.AbstractContextManager[Launch]]:
    """Make a `Launch`, whose temporary files and processes end with it."""

    @contextlib.contextmanager
    def launch(launcher: tuple[str, ...], folder: str):
        (tmp_path / folder).mkdir()
        scripts: list[Script] = []
        temporary = Path(tempfile.mkdtemp(prefix="dropin-"))  # short: sockets are made in it
        try:
            yield Launch(launcher, tmp_path / folder, temporary, scripts)
        finally:
            end_scripts(scripts)
            shutil.rmtree(temporary, ignore_errors=True)

    return launch


@pytest.fixture
def ours(launch):
    with launch(PHALANX, "phalanx") as launch:
        yield launch


@pytest.fixture
def theirs(launch):
    with launch(TORCHRUN, "torchrun") as launch:
        yield launch


@pytest.fixture
def results(ours, theirs):
    """Run a script by both, side by side; return what it has written under each."""

    def results(name: str, *arguments: str, **env) -> tuple[dict, dict]:
        started = [launch.start(name, *arguments, **env) for launch in (theirs, ours)]
        torchrun, phalanx_run = [one.finish(75) for one in started]
        assert phalanx_run.returncode == 0, ended(phalanx_run)
        # Real interpreters that used Gloo abort now and then at their exit, after the work.
        aborted = "Signal 6 (SIGABRT)" in torchrun.stderr
        assert torchrun.returncode == 0 or aborted, ended(torchrun)
        assert ours.left() <= theirs.left()
        return ours.result(), theirs.result()

    return results


def ended(done: subprocess.CompletedProcess) -> str:
    """What to show of a run that ended otherwise than it should have."""
    return f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"

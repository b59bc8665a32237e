"""Shared fixtures: scripts in real processes, and a check that no test leaves anything."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from tests.deadlines import (  # noqa: F401 - pytest finds its hooks here
    PATIENCE_S,
    SOURCE,
    Pipe,
    gather,
    living,
    pytest_sessionstart,
    pytest_timeout_cancel_timer,
    pytest_timeout_set_timer,
    pytest_unconfigure,
)

HERE = Path(__file__).parent
_CHECKED = ("dropin", "process", "ranks")
_OURS = ("phalanx.agent", "phalanx.worker.forkserver")


@pytest.fixture(scope="session", autouse=True)
def _own_state_directory(tmp_path_factory: pytest.TempPathFactory):
    """Runs of the tests must not land in the user's home."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(scope="session", autouse=True)
def _signals_as_in_a_terminal():
    """What nohup, or a shell's background, had ignored would stay so in all that tests start."""
    for signum in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Leftovers:
    """What a test could leave behind, as sets of names."""

    processes: frozenset[str]
    threads: frozenset[str]
    files: frozenset[str]
    num_fds: int

    @classmethod
    def now(cls) -> Leftovers:
        gc.collect()
        children = psutil.Process().children(recursive=True)
        files = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
        for name in os.listdir(tempfile.gettempdir()):
            if name.startswith(("phalanx", "torch")):
                files.add(f"{tempfile.gettempdir()}/{name}")
        return cls(
            processes=frozenset(_describe(child) for child in children if not _is_warm(child)),
            threads=frozenset(
                f"{t.name} ({t.ident})"
                for t in threading.enumerate()
                if not t.name.startswith(("phalanx-send", "phalanx-receive"))
            ),
            files=frozenset(files),
            num_fds=len(os.listdir("/proc/self/fd")),
        )

    def beyond(self, before: Leftovers) -> list[str]:
        new = [*(self.processes - before.processes), *(self.threads - before.threads)]
        new += self.files - before.files
        # Starting the agent costs descriptors once; a test that loses some loses many.
        if self.num_fds > before.num_fds + 4:
            new.append(f"{self.num_fds - before.num_fds} descriptors")
        return new


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[-120:]}"
    except psutil.Error:
        return f"{process.pid} (gone)"


def _is_warm(process: psutil.Process) -> bool:
    """The agent and its fork servers stay until this process ends."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE and process.ppid() == os.getpid():
            return False
        return any(name in " ".join(process.cmdline()) for name in _OURS) and (
            process.environ().get("PHALANX_WORKER") is None and not _is_session_leader(process)
        )
    except psutil.Error:
        return True  # gone meanwhile


def _is_session_leader(process: psutil.Process) -> bool:
    """A forked worker has the fork server's command line, but leads a session of its own."""
    own_agent = "phalanx.agent" in " ".join(process.cmdline())
    return not own_agent and os.getsid(process.pid) == process.pid


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in _CHECKED:
            item.add_marker(pytest.mark.usefixtures("nothing_left_behind"))


@pytest.fixture
def nothing_left_behind():
    """Fails a test that leaves processes, threads, files, shared memory or descriptors."""
    before = Leftovers.now()
    yield
    until = time.monotonic() + 3
    while (left := Leftovers.now().beyond(before)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left, f"left behind: {left}"


class Script:
    """A Python program in a process group of its own."""

    def __init__(self, argv: list[str], cwd: Path, **options) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PHALANX"))}
        env["PYTHONPATH"] = SOURCE
        env |= options.pop("env", {})
        options = {"text": True, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE,
                   "stderr": subprocess.PIPE, **options}  # fmt: skip
        self.process = subprocess.Popen(argv, cwd=cwd, env=env, start_new_session=True, **options)
        self.pid = self.process.pid
        streams = (self.process.stdout, self.process.stderr)
        pipes = [None if one is None else Pipe(one, text=options["text"]) for one in streams]
        self.out, self.err = pipes
        living.add(self)

    def finish(self, timeout: float = 60, stdin: str | None = None) -> subprocess.CompletedProcess:
        """Wait for its end; return what it has said since the last line that was read."""
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(stdin)
                self.process.stdin.close()
        until = time.monotonic() + timeout
        pipes = [pipe for pipe in (self.out, self.err) if pipe is not None]
        while left := [pipe for pipe in pipes if not pipe.ended]:
            if not gather(left, until):
                self._fail(f"no end after {timeout} s")
        try:
            code = self.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._fail(f"no end after {timeout} s")
        out, err = (None if pipe is None else pipe.rest() for pipe in (self.out, self.err))
        return subprocess.CompletedProcess(self.process.args, code, out, err)

    def _fail(self, why: str) -> NoReturn:
        self.kill_group()
        said = [pipe.said.decode(errors="replace") for pipe in (self.out, self.err) if pipe]
        raise AssertionError("\n".join([f"{why}:", *said]))

    def close_stdout(self) -> None:
        """Read no more of what it says."""
        self.process.stdout.close()
        self.process.stdout = self.out = None

    def wait_for_line(self, text: str, timeout: float = PATIENCE_S) -> str:
        """Read standard output up to a line that contains `text`; return that line."""
        until = time.monotonic() + timeout
        while line := self.out.line(max(0.0, until - time.monotonic())):
            if text in line:
                return line
        raise AssertionError(f"it ended without saying {text!r}: {self.finish()}")

    def kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


@pytest.fixture
def script(tmp_path: Path):
    """Start a script from a text; whatever it started is ended with the test."""
    scripts: list[Script] = []

    def start(source: str, *arguments: str, name: str = "script.py", **options) -> Script:
        path = tmp_path / name
        path.write_text(source)
        scripts.append(Script([sys.executable, str(path), *arguments], tmp_path, **options))
        return scripts[-1]

    yield start
    end_scripts(scripts)


@pytest.fixture
def start_phalanx(tmp_path: Path):
    """Start the command with these arguments, beside a ``train.py`` of this source.

    Whatever it started is ended with the test.
    """
    scripts: list[Script] = []

    def start(
        *arguments: object, source: str | None = None, module: str = "phalanx", **options
    ) -> Script:
        if source is not None:
            (tmp_path / "train.py").write_text(source)
        options.setdefault("cwd", tmp_path)
        scripts.append(Script([sys.executable, "-m", module, *map(str, arguments)], **options))
        return scripts[-1]

    yield start
    end_scripts(scripts)


def end_scripts(scripts: list[Script]) -> None:
    """End whatever they have started, and let go of them."""
    for one in scripts:
        one.kill_group()
        one.process.wait(20)
        for stream in (one.process.stdout, one.process.stderr, one.process.stdin):
            if stream is not None:
                stream.close()


@pytest.fixture
def run_script(script):
    """Run a script from a text to its end."""

    def run(source: str, *arguments: str, timeout: float = 60, **options):
        return script(source, *arguments, **options).finish(timeout)

    return run


def tagged_processes(tag: str) -> list[int]:
    """Return the pids of all living processes whose environment or command has `tag`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            if tag in " ".join(process.cmdline()) or tag in "".join(process.environ().values()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until(condition, timeout: float = 5.0, what: str = "") -> None:
    """Wait for a condition; time only bounds it."""
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, f"not within {timeout} s: {what or condition}"
        time.sleep(0.01)

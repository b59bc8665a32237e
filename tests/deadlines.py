"""Nothing in a test waits for ever: reading from a child, a test, and what pytest has started."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest
import pytest_timeout

import phalanx
from tests import watchdog

if TYPE_CHECKING:
    from tests.conftest import Script

SOURCE = str(Path(phalanx.__file__).parents[1])
"""What every Python program of a test finds Phalanx by: the code that is being tested."""
PATIENCE_S = 60.0
"""How long a child may be silent while a test waits for a line."""
_TEARDOWN_S = 30.0
"""How long a test that has timed out may take to end, before it is interrupted again."""
_STACKS_S = 10.0
_NATIVE_S = 5.0
"""How long a test may not notice that its time is over before its programs are ended."""

living: weakref.WeakSet[Script] = weakref.WeakSet()
"""The programs of the present test."""


class Pipe:
    """What a child says on one of its streams, read with a deadline only.

    It reads the descriptor itself, so nothing hides in the buffer of a file object; all that was
    said is kept, for the report of a test that fails.
    """

    def __init__(self, stream: IO, *, text: bool) -> None:
        self._stream = stream
        self._text = text
        self._unread = b""
        self._after_cr = False
        self.ended = False
        self.said = b""

    def line(self, timeout: float = PATIENCE_S):
        """Return the next line, as `readline` would; nothing at the end."""
        until = time.monotonic() + timeout
        while b"\n" not in self._unread and not self.ended:
            if not gather([self], until):
                raise AssertionError(f"no line in time; so far:\n{_decoded(self.said)}")
        line, newline, self._unread = self._unread.partition(b"\n")
        return self._as_wanted(line + newline)

    def rest(self, timeout: float = PATIENCE_S):
        """Return what comes up to the end."""
        until = time.monotonic() + timeout
        while not self.ended:
            if not gather([self], until):
                raise AssertionError(f"no end within {timeout} s; so far:\n{_decoded(self.said)}")
        rest, self._unread = self._unread, b""
        return self._as_wanted(rest)

    def _as_wanted(self, data: bytes):
        return data.decode() if self._text else data

    def fileno(self) -> int:
        return self._stream.fileno()

    def take(self) -> None:
        """Read what is there."""
        data = os.read(self.fileno(), 65536)
        self.ended = not data
        if self._text:  # universal newlines, also where a pair is torn
            torn = self._after_cr and data.startswith(b"\n")
            self._after_cr = data.endswith(b"\r")
            data = data[torn:].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self.said += data
        self._unread += data


def gather(pipes: list[Pipe], until: float) -> bool:
    """Read once from those that have something; False if none had until then."""
    ready = select.select(pipes, [], [], max(0.0, until - time.monotonic()))[0]
    for pipe in ready:
        pipe.take()
    return bool(ready)


def read_until_closed(
    fd: int, timeout: float = PATIENCE_S, until: bytes | None = None, data: bytes = b""
) -> bytes:
    """Read a terminal to its end, or until it has shown this; `data` was read before."""
    deadline = time.monotonic() + timeout
    while until is None or until not in data:
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise AssertionError(f"no end within {timeout} s; so far:\n{_decoded(data)}")
        try:
            more = os.read(fd, 65536)
        except OSError:  # how a terminal says it
            break
        if not more:
            break
        data += more
    return data


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


class Guard:
    """Interrupts a test that takes too long, and ends what pytest has started."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        command = [sys.executable, "-S", "-E", watchdog.__file__, self.token, str(os.getpid())]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[watchdog.TAG] = self.token
        self._old = signal.getsignal(signal.SIGALRM)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._watchdog.stdin.close()
        self._watchdog.wait(20)
        os.environ.pop(watchdog.TAG, None)

    def begin(self, item: pytest.Item, timeout: float) -> None:
        def interrupt(_signum: int, _frame: object) -> None:
            report = f"{item.nodeid} took longer than {timeout} s\n{_report()}"
            self._tell(time.monotonic() + _TEARDOWN_S + 5)
            self.end_programs()
            pytest.fail(report)

        signal.signal(signal.SIGALRM, interrupt)
        # Again if its fixtures do not end then.
        signal.setitimer(signal.ITIMER_REAL, timeout, _TEARDOWN_S)
        self._tell(time.monotonic() + timeout + _NATIVE_S)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._old)
        self._tell(0.0)

    def end_programs(self) -> None:
        """End the test's programs with all that they have started, and this process' agent."""
        watchdog.end_family(self.token, (os.getpid(), self._watchdog.pid))

    def _tell(self, deadline: float) -> None:
        with contextlib.suppress(OSError):
            os.write(self._watchdog.stdin.fileno(), f"{deadline}\n".encode())


def _report() -> str:
    """Say what the programs have said so far, and where the ranks are."""
    parts = []
    for script in list(living):
        if script.process.poll() is not None:
            continue
        for name, pipe in (("stdout", script.out), ("stderr", script.err)):
            if pipe is None:
                continue
            with contextlib.suppress(OSError, ValueError):  # closed by the test
                while not pipe.ended and gather([pipe], 0):
                    pass
            parts.append(f"─── {name} of {script.pid} so far ───\n{_decoded(pipe.said)}")
    parts += [f"─── ranks of run {run} ───\n{_command('stacks', run)}" for run in _live_runs()]
    return "\n".join(parts)


def _live_runs() -> list[str]:
    with contextlib.suppress(ValueError, KeyError):
        return [json.loads(line)["run_id"] for line in _command("ps", "--json").splitlines()]
    return []


def _command(*arguments: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", *arguments], capture_output=True, text=True,
            timeout=_STACKS_S, check=False, env={**os.environ, "PYTHONPATH": SOURCE},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "(no answer)"
    return done.stdout + done.stderr


_guard: Guard | None = None


def guard() -> Guard:
    """Return this pytest's guard, which begins with the first question."""
    global _guard
    if _guard is None:
        _guard = Guard()
    return _guard


# ── hooks ────────────────────────────────────────────────────────────────────────────────


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings) -> bool:
    """In the place of pytest-timeout's own: that can end all of pytest, and knows no family."""
    if settings.disable_debugger_detection or not pytest_timeout.is_debugging():
        guard().begin(item, settings.timeout)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    guard().end()
    return True


def pytest_sessionstart() -> None:
    guard()


def pytest_unconfigure() -> None:
    global _guard
    if _guard is not None:
        _guard.close()
        _guard = None

"""The end of a launcher: it waits for its runs, and exits non-zero if one failed.

Registered when Phalanx is imported, so that it runs after the exit handlers of everybody
who registered later. Raising in an exit handler does not change the exit code, so a failed
run ends the process by `os._exit`, with everything flushed.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from typing import Protocol

from phalanx.launcher.link import current_link
from phalanx.values.errors import PhalanxError, RunStoppedError


class OpenRun(Protocol):
    """What this module needs to know of a run: a `LauncherContext`, but for its name."""

    looked_at: bool

    @property
    def ended(self) -> bool:
        """Whether nothing of it is alive any more."""

    def wait(self) -> object:
        """Wait until it has ended; raises if it failed."""

    def shutdown(self) -> None:
        """Stop it, and wait until nothing of it is alive."""


_open: list[OpenRun] = []
"""Runs that live, or that failed without anybody having waited for them."""
_open_lock = threading.Lock()


def keep(context: OpenRun) -> None:
    """See to this run at exit."""
    with _open_lock:
        _open.append(context)


def forget(context: OpenRun) -> None:
    """Nothing is left to see to."""
    with _open_lock:
        if context in _open:
            _open.remove(context)


def _at_exit() -> None:
    link = current_link()
    if link is None:  # nothing was started, or this is a fork of the launcher
        return
    with _open_lock:
        contexts = list(_open)
    code = 0
    try:
        if _ended_by_exception() or _is_interactive():
            for context in contexts:
                context.shutdown()
        else:
            code = max((_wait(context) for context in contexts), default=0)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    try:
        link.close()
    except KeyboardInterrupt:  # no need to see the agent out: it ends with this process
        code = 128 + signal.SIGINT
    if code:
        _leave(code)


def _wait(context: OpenRun) -> int:
    if context.ended and context.looked_at:
        return 0
    try:
        context.wait()
    except RunStoppedError:
        return 0
    except PhalanxError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - its purpose
        return 1
    return 0


def _ended_by_exception() -> bool:
    return hasattr(sys, "last_value") and sys.last_value is not None


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue
    if code == 128 + signal.SIGINT:  # as a shell expects of a program that Ctrl-C ended
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(code)


atexit.register(_at_exit)

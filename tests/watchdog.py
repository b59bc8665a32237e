"""Ends what tests have started when pytest itself can't: a process of its own, without imports.

It is told on standard input by when the present test must have ended. Past that it ends the
test's family, on which pytest may be waiting deep in native code; if that does not help, pytest,
which then shows its stacks. When pytest is gone, however that came, it ends what is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

TAG = "FAMILY_OF_TESTS"
"""The variable by which the processes of a test run are known, however deep they are."""
_TICK_S = 0.2
_GRACE_S = 1.0
"""What ends by itself, once pytest has, gets this long."""
_LAST_RESORT_S = 20.0


def family(token: str, spare: tuple[int, ...] = ()) -> list[int]:
    """Return the living processes that were started with this token in their environment."""
    mark = f"{TAG}={token}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in spare:
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                found.append(int(name))
    return found


def end_family(token: str, spare: tuple[int, ...] = (), within_s: float = 5.0) -> None:
    """Kill them, and those that they start meanwhile."""
    until = time.monotonic() + within_s
    while (pids := family(token, spare)) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def watch(token: str, pytest: int) -> None:
    """Watch until pytest is gone."""
    deadline, has_killed = 0.0, False
    while os.getppid() == pytest:
        if select.select([0], [], [], _TICK_S)[0]:
            said = os.read(0, 65536).split()
            if not said:
                break
            deadline, has_killed = float(said[-1]), False
        late_s = time.monotonic() - deadline
        if deadline and late_s > 0 and not has_killed:
            has_killed = True
            end_family(token, (pytest, os.getpid()))
        elif deadline and late_s > _LAST_RESORT_S:
            os.kill(pytest, signal.SIGABRT)
            break


def main() -> None:
    """Watch, and clean up."""
    token, pytest = sys.argv[1], int(sys.argv[2])
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    watch(token, pytest)
    until = time.monotonic() + _GRACE_S
    while family(token, (pytest, os.getpid())) and time.monotonic() < until:
        time.sleep(0.05)
    end_family(token, (pytest, os.getpid()))


if __name__ == "__main__":
    main()

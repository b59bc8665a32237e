"""Where a rank is: the stack of its Python code, asked for from outside.

A worker lets faulthandler write its stack into a file of its own when SIGURG comes, a signal
that does nothing otherwise. The handler is C, so it answers also from inside a library call
that never returns. Where to find process and file is on the control page.

It is the main thread's stack: `all_threads` would make faulthandler walk through threads that run
meanwhile.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from phalanx.system import kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.system.page import ControlPage

QUESTION: Final = signal.SIGURG
PATIENCE_S: Final = 0.5
"""How long an answer is waited for: the handler runs at once, but the machine may be busy."""
POLL_S: Final = 0.005

_MAX_FRAMES: Final = 50
_MAX_SHOWN: Final = 6
_MAX_GROUPS: Final = 16
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_BELOW_USER: Final = re.compile(r'File ".*/phalanx/(worker/(bootstrap|script)|elastic/worker)\.py"')
"""Frames of ours that user code was called from."""
_WAITS: Final = re.compile(
    r'File ".*/(torch/(distributed|autograd)/|phalanx/tensors/|phalanx/worker/group\.py)'
)
_LIBRARY: Final = re.compile(
    r'File "(<frozen |.*/(torch|phalanx)/|(?!.*-packages/).*/lib/python\d)'
)
"""Frames that may lie between a wait and the user's code; the standard library's among them."""
_STATES: Final[Mapping[str, str]] = {
    "R": "is computing",
    "S": "is waiting (sleeps in a system call)",
    "D": "is in the kernel (state D: a disk or a device does not answer)",
    "T": "is stopped (SIGSTOP, Ctrl-Z)",
    "t": "is held by a debugger",
    "": "has ended",
    "Z": "has ended",
}
STOPPED: Final = "T"
"""State of a process that SIGSTOP has stopped."""
STUCK: Final = (STOPPED, "D")
"""States of a process that can't answer."""
HELD: Final = "t"
"""State of a process that a debugger has stopped."""


def be_found(page: ControlPage, rank: int, fd: int) -> None:
    """Have this process tell its stack in the file `fd` when it is asked."""
    faulthandler.register(QUESTION, fd, all_threads=False)
    page.note_stack_file(rank, os.getpid(), fd, os.fstat(fd).st_ino)


def stack_of(page: ControlPage, rank: int) -> list[str]:
    """Return where a rank's main thread is, the innermost frames first; blocks up to 0.5 s.

    Empty if it can't be found out: the process is gone, or has not come that far.
    """
    pid, fd, inode = page.stack_file(rank)
    pidfd = kernel.open_pidfd(pid) if pid else None
    if pidfd is None:
        return []
    try:
        file = Path(f"/proc/{pid}/fd/{fd}")
        status = file.stat()
        if status.st_ino != inode:  # the number is another process' by now
            return []
        kernel.signal_pidfd(pidfd, QUESTION)
        answer = Answer(lambda: file.stat().st_size, status.st_size)
        until = time.monotonic() + PATIENCE_S
        while not answer.is_whole() and time.monotonic() < until:
            time.sleep(POLL_S)
        text = file.read_bytes()[status.st_size :].decode(errors="replace")
    except OSError:
        return []
    finally:
        os.close(pidfd)
    return list(parse_frames(text)[:_MAX_SHOWN])


class Answer:
    """Knows when an answer is whole: something was written, and no more comes."""

    def __init__(self, size: Callable[[], int], start: int) -> None:
        """Take the way to ask for the file's size, and the size before the question."""
        self._size = size
        self._start = self._last = start

    def is_whole(self) -> bool:
        """Look; call it every `POLL_S`."""
        size = self._size()
        whole = size == self._last > self._start
        self._last = size
        return whole


# ── what an answer says ──────────────────────────────────────────────────────────────────


def parse_frames(text: str) -> tuple[str, ...]:
    """Return the frames that faulthandler wrote, the innermost first, as tracebacks have them.

    What user code was called from is left out.
    """
    found = (_FRAME.fullmatch(line) for line in text.splitlines())
    frames = ['File "{}", line {}, in {}'.format(*frame.groups()) for frame in found if frame]
    ours = (number for number, frame in enumerate(frames) if _BELOW_USER.match(frame))
    outermost = next((number for number in ours if number > 0), len(frames))
    return tuple(frames[: min(outermost, _MAX_FRAMES)])


def waits_for_others(frames: Sequence[str]) -> bool:
    """Whether user code waits for other ranks: it is in a collective, a store, or a backward."""
    for frame in frames:
        if _WAITS.match(frame):
            return True
        if not _LIBRARY.match(frame):
            return False
    return False


def as_text(frames: Sequence[str], state: str) -> str:
    """Return a stack as a traceback has it, the innermost call last.

    Args:
        frames: The innermost first; none if the process did not answer.
        state: The process' state, as `kernel.process_state` says it.
    """
    if frames:
        return "\n".join(f"  {frame}" for frame in reversed(frames))
    return f"  no Python stack: the process {describe_state(state)}"


def own_frame(frames: Sequence[str]) -> str | None:
    """Return the innermost frame of the user's own code."""
    return next((frame for frame in frames if not _LIBRARY.match(frame)), None)


def describe_state(state: str) -> str:
    """Return a process' state as a person says it, after "the process"."""
    return _STATES.get(state, f"is in state {state}")


def grouped(stacks: Mapping[int, str], first: int | None = None) -> str:
    """Return all ranks' stacks, equal ones together, that of rank `first` at the head."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items(), key=lambda item: (item[0] != first, item[0])):
        groups.setdefault(text, []).append(rank)
    parts: list[str] = []
    for text, ranks in list(groups.items())[:_MAX_GROUPS]:
        names = ", ".join(map(str, sorted(ranks)))
        who, verb = (f"ranks {names}", "are") if len(ranks) > 1 else (f"rank {names}", "is")
        is_stack = text.startswith("  File")
        parts.append(f"{who} {verb} in:\n{text}" if is_stack else f"{who}:\n{text}")
    if len(groups) > _MAX_GROUPS:
        parts.append(f"… and {len(groups) - _MAX_GROUPS} more stacks")
    return "\n".join(parts)

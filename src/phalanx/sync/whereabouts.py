"""Where a rank is that did not come: the stack of its Python code, asked for from outside.

A worker lets faulthandler write its stack into a file of its own when SIGURG comes, a signal
that does nothing otherwise. The handler is C, so it answers also from inside a library call
that never returns. Where to find process and file is on the control page.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from phalanx import kernel

if TYPE_CHECKING:
    from phalanx.page import ControlPage

_SIGNAL: Final = signal.SIGURG
_PATIENCE_S: Final = 0.5
_POLL_S: Final = 0.005
_MAX_FRAMES: Final = 6
_OWN_FRAME: Final = f"{os.sep}phalanx{os.sep}"


def be_found(page: ControlPage, rank: int, fd: int) -> None:
    """Have this process tell its stack in the file `fd` when it is asked."""
    faulthandler.register(_SIGNAL, fd, all_threads=False)
    page.note_stack_file(rank, os.getpid(), fd, os.fstat(fd).st_ino)


def stack_of(page: ControlPage, rank: int) -> list[str]:
    """Return where a rank's main thread is, the innermost frame first; blocks up to 0.5 s.

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
        kernel.signal_pidfd(pidfd, _SIGNAL)
        text = _read_answer(file, status.st_size)
    except OSError:
        return []
    finally:
        os.close(pidfd)
    frames = [line.strip() for line in text.splitlines() if line.startswith("  File ")]
    own = [number for number, frame in enumerate(frames) if _OWN_FRAME in frame]
    outermost = next((number for number in own if number > 0), len(frames))
    return frames[:outermost][:_MAX_FRAMES]


def _read_answer(file: Path, start: int) -> str:
    """Return what is written behind `start`, once no more comes."""
    until = time.monotonic() + _PATIENCE_S
    size = start
    while time.monotonic() < until:
        time.sleep(_POLL_S)
        now = file.stat().st_size
        if now == size > start:
            break
        size = now
    return file.read_bytes()[start:].decode(errors="replace")

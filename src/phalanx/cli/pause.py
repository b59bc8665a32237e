"""Ctrl-Z: all ranks pause with the command, and go on with it."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from phalanx.launcher.prompts import prompts
from phalanx.system import kernel
from phalanx.system.whereabouts import STOPPED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from phalanx.cli.status import StatusLine
    from phalanx.launcher.context import LauncherContext

_PATIENCE_S: Final = 2.0
_POLL_S: Final = 0.01
_LOOK_S: Final = 0.1


class _Pauses:
    def __init__(self, context: LauncherContext[Any], line: StatusLine | None) -> None:
        self._context = context
        self._line = line

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Pause the ranks, stop as if there were no handler, and go on where that ends."""
        del frame
        self._context.pass_signal(signum)
        self._wait_until_paused()
        self._show(away=True)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)  # here the shell has the terminal
        signal.signal(signum, self.handle)
        in_background = kernel.is_terminal_in_background(0)
        self._show(away=prompts.open or in_background)
        if prompts.open and in_background:  # it would take what is typed for the shell
            threading.Thread(target=self._go_on_later, name="phalanx-paused", daemon=True).start()
        else:
            self._context.pass_signal(signal.SIGCONT)

    def _wait_until_paused(self) -> None:
        until = time.monotonic() + _PATIENCE_S
        pids = list(self._context.pids().values())
        while time.monotonic() < until:
            if all(kernel.process_state(pid) in (STOPPED, "") for pid in pids):
                return
            time.sleep(_POLL_S)

    def _go_on_later(self) -> None:
        while kernel.is_terminal_in_background(0):
            time.sleep(_LOOK_S)
        self._context.pass_signal(signal.SIGCONT)

    def _show(self, *, away: bool) -> None:
        if self._line is not None:
            self._line.stay_away(away)


@contextmanager
def pauses(context: LauncherContext[Any], line: StatusLine | None) -> Iterator[None]:
    """Have Ctrl-Z pause the ranks, too, inside the block; what is ignored stays so."""
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, _Pauses(context, line).handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)

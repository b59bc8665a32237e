"""While a worker reads from this process' terminal: who may, and who is quiet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from phalanx.system import kernel

_LOOK_S: Final = 0.1


class Prompts:
    """Lets workers read while this process is in the foreground. One per process."""

    def __init__(self) -> None:
        """Nobody reads yet."""
        self._begun: dict[tuple[str, int], threading.Event] = {}
        self._on_change: Callable[[bool], None] = lambda _: None

    def watch(self, on_change: Callable[[bool], None]) -> None:
        """Have this called when a prompt comes (True) and when it is gone (False)."""
        self._on_change = on_change

    @property
    def open(self) -> bool:
        """Whether a worker reads, so that a Ctrl-C is meant for it."""
        return bool(self._begun)

    def begin(self, run_id: str, rank: int, allow: Callable[[], None]) -> None:
        """A worker wants to read: allow it, once what is typed is meant for this job."""
        over = self._begun[run_id, rank] = threading.Event()
        if kernel.is_terminal_in_background(0):
            threading.Thread(
                target=self._wait, args=(over, allow), name="phalanx-prompt", daemon=True
            ).start()
        else:
            self._allow(allow)

    def end(self, run_id: str, rank: int) -> None:
        """It has read."""
        over = self._begun.pop((run_id, rank), None)
        if over is not None:
            over.set()
            self._on_change(False)

    def _wait(self, over: threading.Event, allow: Callable[[], None]) -> None:
        while not over.wait(_LOOK_S):
            if not kernel.is_terminal_in_background(0):
                self._allow(allow)
                return

    def _allow(self, allow: Callable[[], None]) -> None:
        self._on_change(True)
        allow()


prompts = Prompts()

"""Signals to the launcher while runs live: SIGINT, SIGTERM and SIGHUP are a stop.

The handler only enqueues. When the last run has ended because of a signal, the old handlers
are put back and the signal is raised again, so that it means what it meant before: Ctrl-C
becomes a KeyboardInterrupt, a SIGTERM ends the process, after the workers, not before.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.launcher.prompts import prompts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType, TracebackType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What is a stop, whatever else is."""
NAP_S = 0.2
"""How long the main thread may wait at once while runs live.

A signal that comes just before a wait begins, or to another thread, does not end the wait, and
Python's handlers run between two waits only.
"""
_LAST_RESORT = 3
"""With this many SIGINTs the old handler gets one at once: something must be stuck."""


class Stoppable(Protocol):
    """A live run. Its methods must be safe in a signal handler: they only enqueue."""

    def request_stop(self, reason: str) -> None:
        """Stop, with grace."""

    def request_kill(self, reason: str) -> None:
        """End now."""

    def pass_signal(self, signum: int) -> None:
        """Give it to workers that catch it; stop if none does."""


class StopSignals:
    """Holds the handlers while there are live runs. One per process."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._live: list[Stoppable] = []
        self._old: dict[int, Any] = {}
        self._received: list[int] = []
        self._stops: tuple[int, ...] = STOPS
        self._passed: tuple[int, ...] = ()
        self._main_thread = threading.main_thread().ident

    def also_handle(self, *, stops: Iterable[int] = (), passed: Iterable[int] = ()) -> None:
        """Have more signals mean something to runs that begin from now on.

        Args:
            stops: They stop a run, too.
            passed: They go to the workers that catch them, and stop a run where none does.
        """
        self._stops = (*STOPS, *stops)
        self._passed = tuple(passed)

    @property
    def idle(self) -> bool:
        """Whether no run lives."""
        return not self._live

    def run_began(self, run: Stoppable) -> None:
        """Take the signals, if this is the main thread and nobody has yet."""
        self._live.append(run)
        if self._old or threading.current_thread() is not threading.main_thread():
            return
        self._received.clear()
        for signum in (*self._stops, *self._passed):
            old = signal.getsignal(signum)
            if old in (signal.SIG_IGN, None):  # nohup, or a handler that is not Python's
                continue
            self._old[signum] = old
            signal.signal(signum, self._handle)

    def run_ended(self, run: Stoppable) -> None:
        """Give the signals back after the last run. From any thread."""
        if run in self._live:
            self._live.remove(run)
        if self._live or not self._old:
            return
        if threading.current_thread() is threading.main_thread():
            self._give_back()
        elif self._received and self._main_thread is not None:
            # Handlers can be set by the main thread only: have it come here.
            signal.pthread_kill(self._main_thread, self._received[0])

    def restore_if_idle(self) -> None:
        """Put the old handlers back if no run lives. Called where the main thread passes by."""
        idle = not self._live and self._old and not self._received
        if idle and threading.current_thread() is threading.main_thread():
            self._give_back()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if not self._live:
            self._give_back(again=signum)
            return
        at_a_prompt = signum == signal.SIGINT and prompts.open  # it is for the worker there
        if signum in self._passed or at_a_prompt:
            for run in self._live:
                run.pass_signal(signum)
            return
        self._received.append(signum)
        name = signal.Signals(signum).name
        num_interrupts = self._received.count(signal.SIGINT)
        if signum == signal.SIGINT and num_interrupts >= _LAST_RESORT:
            self._give_back(again=signum)
        elif signum == signal.SIGINT and num_interrupts > 1:
            for run in self._live:
                run.request_kill(name)
        else:
            for run in self._live:
                run.request_stop(name)

    def _give_back(self, again: int | None = None) -> None:
        if again is None and self._received:
            again = self._received[0]
        for signum, old in self._old.items():
            signal.signal(signum, old)
        self._old.clear()
        self._received.clear()
        if again == signal.SIGINT:
            _say_interrupted_without_traceback()
        if again is not None:
            signal.raise_signal(again)


def _say_interrupted_without_traceback() -> None:
    """If nobody catches the KeyboardInterrupt, one line says it; our frames tell nothing."""
    usual = sys.excepthook
    if usual is not sys.__excepthook__:
        return  # a notebook, or somebody who wants to see for himself

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        sys.excepthook = usual
        if kind is KeyboardInterrupt:
            os.write(2, b"phalanx: interrupted; every worker has ended\n")
        else:
            usual(kind, error, traceback)

    sys.excepthook = hook


stop_signals = StopSignals()

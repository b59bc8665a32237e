"""Signals to this process while contexts live: they raise torchelastic's `SignalException`."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed.elastic.multiprocessing.api import SignalException

if TYPE_CHECKING:
    from types import FrameType

_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class Living(Protocol):
    """A context."""

    @property
    def ended(self) -> bool:
        """Whether nothing of it is alive any more."""


class TerminationSignals:
    """Holds the handlers while there are living contexts. One per process."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._contexts: list[Living] = []
        self._old: dict[int, Any] = {}

    def begin(self, context: Living) -> None:
        """Take the signals, if this is the main thread and nobody has yet."""
        self._contexts.append(context)
        if self._old or threading.current_thread() is not threading.main_thread():
            return
        for name in os.environ.get(_VARIABLE, _DEFAULT).split(","):
            signum = getattr(signal, name.strip(), None)
            if not isinstance(signum, signal.Signals) or signum in (signal.SIGKILL, signal.SIGSTOP):
                continue
            old = signal.getsignal(signum)
            if old in (signal.SIG_IGN, None):  # nohup, or a handler that is not Python's
                continue
            self._old[signum] = old
            signal.signal(signum, self._handle)

    def end(self, context: Living) -> None:
        """A context has ended; put the old handlers back after the last."""
        if context in self._contexts:
            self._contexts.remove(context)
        if not self._contexts and threading.current_thread() is threading.main_thread():
            self._give_back()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if all(context.ended for context in self._contexts):
            self._give_back()
            signal.raise_signal(signum)
            return
        number = signal.Signals(signum)
        raise SignalException(f"Process {os.getpid()} got signal: {number}", sigval=number)

    def _give_back(self) -> None:
        for signum, old in self._old.items():
            if signal.getsignal(signum) == self._handle:  # else somebody has taken it since
                signal.signal(signum, old)
        self._old.clear()


termination_signals = TerminationSignals()

"""Signals that the launcher passes on: to the workers that they are for, once they can."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from phalanx.system import kernel

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from phalanx.agent.hangs import HangWatch
    from phalanx.agent.prompts import Prompts
    from phalanx.agent.worker import WorkerProcess

PATIENCE_S = 5.0
"""How long after its start a group's workers may take to set their handlers."""
_TICK_S = 0.05


class PassedSignals:
    """Holds signals from their arrival until every worker that will catch them had its one.

    To a worker that does not catch it, a signal is the end. One that has just been started may
    still come to setting its handler, and nothing tells when: so until a while after all have
    entered the user's code, whoever does not catch it yet is looked at again. As with the
    kernel's pending signals, several of one kind are one to a worker that can't take them yet.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers: Callable[[], Mapping[int, WorkerProcess]],
        prompts: Prompts,
        hang_watch: HangWatch,
        all_run: Callable[[], bool],
        stop: Callable[[str], None],
    ) -> None:
        """Hold nothing yet.

        Args:
            loop: The agent's.
            workers: Those of the present generation, by rank.
            prompts: Knows who reads from the terminal.
            hang_watch: Is told of pauses.
            all_run: Tells whether the group runs and none of its workers is being started.
            stop: Stops the run; called with the name of a signal that nobody catches.
        """
        self._loop = loop
        self._workers = workers
        self._prompts = prompts
        self._hang_watch = hang_watch
        self._all_run = all_run
        self._stop = stop
        self._entered_s = 0.0
        self._served: dict[int, set[int]] = {}
        self._taken: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def worker_starts(self, rank: int) -> None:
        """Look at this rank again: it is a new process, which has had nothing yet."""
        for served in self._served.values():
            served.discard(rank)

    def worker_entered(self) -> None:
        """Wait for the handlers of one that has just come to the user's code."""
        self._entered_s = self._loop.time()

    def pass_on(self, signum: int) -> None:
        """Give it to those that it is for.

        SIGTSTP pauses all, SIGCONT lets them go on; a SIGINT is for the one that reads. Any
        other goes to all that catch it, and to the others as soon as they do.
        """
        if signum in (signal.SIGTSTP, signal.SIGCONT):
            self._pause(signum)
            return
        if signum == signal.SIGINT:
            self._interrupt()
            return
        self._served[signum] = set()
        self._taken.discard(signum)
        self._look()

    def _pause(self, signum: int) -> None:
        self._hang_watch.pause(paused=signum == signal.SIGTSTP)
        for worker in self._workers().values():
            worker.signal(signal.SIGSTOP if signum == signal.SIGTSTP else signum)

    def _interrupt(self) -> None:
        reader = self._prompts.current
        worker = None if reader is None else self._workers().get(reader)
        if worker is None:
            self._stop(kernel.signal_name(signal.SIGINT))
        else:
            worker.signal(signal.SIGINT)

    def close(self) -> None:
        """Drop what is held: the run stops, or has ended."""
        self._served.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        all_run = self._all_run()
        settled = all_run and self._loop.time() >= self._entered_s + PATIENCE_S
        unwanted = []
        for signum in tuple(self._served):
            all_have_it = self._serve(signum)
            if settled or (all_run and all_have_it):
                del self._served[signum]
                unwanted += [] if signum in self._taken else [signum]
        if self._served:
            self._timer = self._loop.call_later(_TICK_S, self._look)
        if unwanted:
            self._stop(kernel.signal_name(unwanted[0]))

    def _serve(self, signum: int) -> bool:
        """Give it to those that can take it now; return whether nobody is left."""
        served = self._served[signum]
        left = False
        for rank, worker in self._workers().items():
            if rank in served or not worker.exists:
                continue
            if worker.catches(signum):
                worker.signal(signum)
                served.add(rank)
                self._taken.add(signum)
            else:
                left = True
        return not left

"""Asks workers where they are, all at once, without making the agent's loop wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.system import kernel
from phalanx.system.whereabouts import (
    HELD,
    PATIENCE_S,
    POLL_S,
    STOPPED,
    STUCK,
    Answer,
    as_text,
    parse_frames,
    waits_for_others,
)

if TYPE_CHECKING:
    import asyncio

    from phalanx.agent.worker import WorkerProcess
    from phalanx.system.page import ControlPage


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where a worker is.

    Attributes:
        frames: Of its main thread, the innermost first; empty if it did not answer.
        state: Its process' state, see `kernel.process_state`.
    """

    frames: tuple[str, ...]
    state: str

    @property
    def text(self) -> str:
        """As people read it."""
        return as_text(self.frames, self.state)

    @property
    def is_stuck(self) -> bool:
        """Whether it can't answer."""
        return not self.frames and self.state in STUCK

    @property
    def is_held(self) -> bool:
        """Whether somebody has attached a debugger, and stopped it."""
        return self.state == HELD

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return waits_for_others(self.frames)


class Roundup:
    """One question to several workers; their answers come within half a second."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        page: ControlPage,
        workers: Iterable[WorkerProcess],
        then: Callable[[dict[int, Stack]], None],
    ) -> None:
        """Ask all that have a process; `then` gets the answers by rank, later."""
        self._loop = loop
        self._then = then
        self._workers = [worker for worker in workers if worker.exists]
        self._starts: dict[int, int] = {}
        self._open: list[Answer] = []
        for worker in self._workers:
            if _state(worker) in (STOPPED, HELD):
                continue  # it could answer only once it goes on
            start = worker.ask_for_stack(page)
            if start is not None:
                self._starts[worker.rank] = start
                self._open.append(Answer(worker.stack_size, start))
        self._until_s = loop.time() + PATIENCE_S
        self._timer = loop.call_later(POLL_S if self._open else 0, self._poll)

    def cancel(self) -> None:
        """The answers are of no interest any more."""
        self._timer.cancel()

    def _poll(self) -> None:
        self._open = [answer for answer in self._open if not answer.is_whole()]
        if self._open and self._loop.time() < self._until_s:
            self._timer = self._loop.call_later(POLL_S, self._poll)
        else:
            self._then({worker.rank: self._stack(worker) for worker in self._workers})

    def _stack(self, worker: WorkerProcess) -> Stack:
        start = self._starts.get(worker.rank)
        frames = () if start is None else parse_frames(worker.stack_text(start))
        return Stack(frames=frames, state=_state(worker))


def _state(worker: WorkerProcess) -> str:
    if worker.pid is None or not worker.exists:
        return ""
    return kernel.process_state(worker.pid)

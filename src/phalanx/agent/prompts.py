"""Whose turn it is to read from the terminal: one rank at a time, in a quiet console."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from phalanx.wire.messages import Prompt

if TYPE_CHECKING:
    import asyncio

    from phalanx.agent.hangs import HangWatch
    from phalanx.agent.output import RunOutput
    from phalanx.wire.messages import AgentMessage

_READS_ON_S: Final = 0.2


class Prompts:
    """The ranks of a run that want to read, the first of which does."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        run_id: str,
        output: RunOutput,
        hang_watch: HangWatch,
        tell: Callable[[AgentMessage], None],
    ) -> None:
        """Keep whom to tell: the launcher lets a rank read once it is in the foreground."""
        self._loop = loop
        self._run_id = run_id
        self._output = output
        self._hang_watch = hang_watch
        self._tell = tell
        self._ranks: deque[int] = deque()
        self._last: int | None = None  # who has just read, and may at once read on
        self._timer: asyncio.TimerHandle | None = None

    @property
    def current(self) -> int | None:
        """Who reads."""
        return self._ranks[0] if self._ranks and self._timer is None else None

    def want(self, rank: int) -> None:
        """A rank wants to read."""
        self._hang_watch.debugger_waits(rank)
        if self._timer is not None and rank == self._last:
            self._ranks.appendleft(rank)
            self._begin()
            return
        self._ranks.append(rank)
        if len(self._ranks) == 1:
            self._begin()

    def over(self, rank: int) -> None:
        """It has read, or it is gone."""
        if rank not in self._ranks:
            return
        was_current = rank == self.current
        self._ranks.remove(rank)
        self._hang_watch.debugger_goes_on(rank)
        if was_current:
            self._output.go_on()
            self._tell(Prompt(run_id=self._run_id, rank=rank, opens=False))
            if self._ranks:  # a debugger should not change ranks with each command
                self._last = rank
                self._timer = self._loop.call_later(_READS_ON_S, self._begin)

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._ranks:
            return
        rank = self._ranks[0]
        self._output.show_begun(rank)
        self._output.when_flushed(lambda: self._quiet(rank))

    def _quiet(self, rank: int) -> None:
        if rank == self.current:
            self._output.hold()
            self._tell(Prompt(run_id=self._run_id, rank=rank, opens=True))

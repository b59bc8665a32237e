"""Questions about where the workers are, from any thread, and the agent's answers."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.wire.messages import AskForStacks

if TYPE_CHECKING:
    from phalanx.wire.messages import StacksFound

_PATIENCE_S = 30.0
"""The agent answers within a second, unless its machine is on its knees."""


class StackQuestions:
    """Those of one run that are open."""

    def __init__(self, run_id: str, send: Callable[[AskForStacks], None]) -> None:
        """Keep the way to the agent."""
        self._run_id = run_id
        self._send = send
        self._tickets = itertools.count()
        self._open: dict[int, queue.SimpleQueue[dict[int, str]]] = {}
        self._closed = False

    def ask(self) -> dict[int, str]:
        """Return the answer; nothing if the run ends meanwhile. Blocks.

        Raises:
            TimeoutError: The agent does not answer.
        """
        ticket = next(self._tickets)
        answer = self._open[ticket] = queue.SimpleQueue()
        if self._closed:
            return {}
        self._send(AskForStacks(run_id=self._run_id, ticket=ticket))
        try:
            return answer.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise TimeoutError(
                f"the agent did not say within {_PATIENCE_S:g} s where the workers of run "
                f"{self._run_id} are: the machine may be overloaded. Try again"
            ) from None
        finally:
            del self._open[ticket]

    def answer(self, found: StacksFound) -> None:
        """The agent answers."""
        waiting = self._open.get(found.ticket)
        if waiting is not None:
            waiting.put(found.stacks)

    def close(self) -> None:
        """The run has ended: no answer will come."""
        self._closed = True
        for waiting in list(self._open.values()):
            waiting.put({})

"""pdb on one rank, over the launcher's terminal."""

from __future__ import annotations

import pdb  # noqa: T100 - that is the purpose
from typing import TYPE_CHECKING, Any

from phalanx.wire.messages import DebuggerText

if TYPE_CHECKING:
    from types import FrameType

    from phalanx.worker.link import AgentLink


class _Terminal:
    """Lines in and text out, by way of agent and launcher."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._prompt = ""

    def write(self, text: str) -> int:
        """Send text to the console, without a prefix; a last line without end is a prompt."""
        whole, newline, self._prompt = (self._prompt + text).rpartition("\n")
        if newline:
            self._link.send(DebuggerText(text=whole + newline))
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back but the prompt."""

    def readline(self) -> str:
        """Have the launcher show the prompt and read a line."""
        prompt, self._prompt = self._prompt, ""
        return self._link.ask(prompt)


def open_debugger(link: AgentLink, rank: int, frame: FrameType) -> None:
    """Stop in `frame` and talk to whoever sits at the launcher."""
    terminal: Any = _Terminal(link)  # all that pdb uses of a file
    debugger = pdb.Pdb(stdin=terminal, stdout=terminal)
    debugger.prompt = f"(rank {rank}) "
    debugger.set_trace(frame)

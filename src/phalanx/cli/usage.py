"""What is wrong with what was typed."""

from __future__ import annotations


class UsageError(Exception):
    """The command line can't be understood or carried out; nothing was started.

    Attributes:
        command: What to put before the message.
        exit_code: 2, as is usual; or what Python itself gives in such a case.
    """

    def __init__(self, message: str, *, command: str = "phalanx run", exit_code: int = 2) -> None:
        """Keep what the message is printed with."""
        super().__init__(message)
        self.command = command
        self.exit_code = exit_code

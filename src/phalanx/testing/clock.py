"""A clock that stands still until it is told to go on."""

from __future__ import annotations


class FakeClock:
    """Time for tests: `now` moves only by `advance`."""

    def __init__(self, now: float = 1000.0) -> None:
        """Start at `now`, in seconds."""
        self.now = now

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: Time would run backwards.
        """
        if seconds < 0:
            raise ValueError(f"time does not run backwards: advance({seconds})")
        self.now += seconds

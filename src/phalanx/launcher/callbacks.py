"""Calls the user's `on_event`, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.values.events import Event

_log = logging.getLogger("phalanx")


class Callbacks:
    """Hands events over in their order; a slow callback holds nobody up."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        """Start the thread; it ends with `close`, or with the process."""
        self._on_event = on_event
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        threading.Thread(target=self._call, name="phalanx-events", daemon=True).start()

    def put(self, event: Event) -> None:
        """Have it called with this event; does not wait."""
        self._events.put(event)

    def close(self) -> None:
        """No event will come any more."""
        self._events.put(None)

    def _call(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._on_event(event)
            except Exception:  # noqa: BLE001 - user code
                _log.exception("on_event(%s) raised; the run goes on", type(event).__name__)

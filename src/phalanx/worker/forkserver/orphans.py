"""Descendants that a worker left behind: whose they were, and their end.

The server is a subreaper, so they become its children when their parent dies. It never
reaps a child before it has looked at it, so a pid read here can't have come to mean another
process, and `os.kill` is safe.

An orphan is attributed by the tag in its environment; one that was forked without exec has
the server's own environment there, and is attributed by its session, which the worker
founded. What has neither (a fork that called setsid) is taken along when no other
generation lives on this server.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx.system import kernel
from phalanx.values.spec import TAG_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class Orphanage:
    """Knows the founders of sessions, finds orphans and ends them."""

    def __init__(self) -> None:
        """Know nobody yet."""
        self._tag_by_session: dict[int, str] = {}

    def note_worker(self, pid: int, tag: str) -> None:
        """A worker with this tag leads the session that has its pid as a number."""
        self._tag_by_session[pid] = tag

    def forget(self, tag: str) -> None:
        """The generation is swept: its sessions have no members any more."""
        self._tag_by_session = {
            pid: known for pid, known in self._tag_by_session.items() if not _belongs(known, tag)
        }

    def kill(self, tag: str, known: Collection[int], living_tags: Iterable[str]) -> list[int]:
        """Kill the orphans of `tag` (or below it); return those that are still there.

        Args:
            tag: ``run/generation`` or ``run/generation/rank``.
            known: Children that the server made itself.
            living_tags: Tags of the workers that are alive on this server.
        """
        others_live = any(not _belongs(living, tag) for living in living_tags)
        found: list[int] = []
        for pid in kernel.child_pids():
            if pid in known:
                continue
            owner = self._owner(pid)
            if _belongs(owner, tag) if owner else not others_live:
                found.append(pid)
        return [pid for pid in found if not _end(pid)]

    def _owner(self, pid: int) -> str | None:
        tag = kernel.environment_value(pid, TAG_VARIABLE)
        if tag is None:
            _, session = kernel.parent_and_session(pid)
            tag = self._tag_by_session.get(session)
        return tag


def _belongs(tag: str, prefix: str) -> bool:
    return tag == prefix or tag.startswith(f"{prefix}/")


def _end(pid: int) -> bool:
    """Kill an adopted child and collect it; False while it is still on its way out."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
        if kernel.peek_exit(pid) is None:
            return False
    except ChildProcessError:
        return True
    kernel.reap(pid)
    return True

"""Versions of a key that ranks commit part by part, to resume from one that is whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(slots=True, eq=False, kw_only=True)
class Versions(Generic[V]):
    """The versions of one key, each with a part per rank.

    Kept are the newest whole one and what is newer: what is older nobody will ask for. A
    part of a version that can't become whole any more (its generation has fallen) is dropped
    by `begin_generation`: a version never mixes parts of two generations.
    """

    world_size: int
    newest_whole: int | None = None
    _parts: dict[int, dict[int, V]] = field(default_factory=dict)

    def takes(self, version: int) -> bool:
        """Whether a part of this version may come: it must be newer than the newest whole one."""
        return self.newest_whole is None or version > self.newest_whole

    def commit(self, version: int, rank: int, part: V) -> list[V]:
        """Set a rank's part of a version that it `takes`; return parts not needed any more."""
        parts = self._parts.setdefault(version, {})
        dropped = [parts[rank]] if rank in parts else []
        parts[rank] = part
        if len(parts) == self.world_size:
            self.newest_whole = version
            dropped += self._drop([number for number in self._parts if number < version])
        return dropped

    def get(self, rank: int) -> tuple[int, V] | None:
        """Return the number of the newest whole version, and a rank's part of it."""
        if self.newest_whole is None:
            return None
        return self.newest_whole, self._parts[self.newest_whole][rank]

    def begin_generation(self) -> list[V]:
        """Forget versions that are not whole; return their parts."""
        return self._drop([number for number in self._parts if number != self.newest_whole])

    def clear(self) -> list[V]:
        """Forget everything; return all parts."""
        self.newest_whole = None
        return self._drop(list(self._parts))

    def _drop(self, numbers: list[int]) -> list[V]:
        return [part for number in numbers for part in self._parts.pop(number).values()]

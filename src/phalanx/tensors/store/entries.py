"""What the store's table knows of a key: its value, its versions, who waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.tensors.store.messages import StoreReply
    from phalanx.tensors.store.segments import Segment
    from phalanx.tensors.store.versions import Versions

_OVERHEAD: Final = 200
"""About how many bytes the table itself needs for a value."""


class StoreClient(Protocol):
    """One conversation. It must be `forget`-ed when it ends."""

    name: str
    """Who it is, for a person: ``rank 2``."""

    process: object
    """What is the same for all conversations of a process."""

    def reply(self, reply: StoreReply, fds: Sequence[int] = ()) -> None:
        """Send an answer; the descriptors are the client's from here on."""


class Timer(Protocol):
    """Something that will happen."""

    def cancel(self) -> None:
        """It shall not."""


@dataclass(slots=True, eq=False, kw_only=True)
class Value:
    """What one put brought: `data`, or a `segment`."""

    layout: bytes
    num_bytes: int
    data: bytes | None
    segment: Segment | None

    @property
    def inline_bytes(self) -> int:
        """Bytes of the agent's own memory that it needs, segments aside."""
        return len(self.layout) + (0 if self.data is None else len(self.data)) + _OVERHEAD


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting:
    """A client whose answer has to wait."""

    client: StoreClient
    go_on: Callable[[], None]
    timer: Timer | None = None

    def stop_timer(self) -> None:
        """It has waited long enough."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """All that is known of a key.

    Attributes:
        value: What was put last.
        versions: What was committed.
        holder: Who may change it now, alone.
        in_line: Who wants to change it, in the order of coming.
        for_value: Who wants to read it, once there is something.
    """

    value: Value | None = None
    versions: Versions[Value] | None = None
    holder: StoreClient | None = None
    in_line: deque[Waiting] = field(default_factory=deque)
    for_value: list[Waiting] = field(default_factory=list)

    @property
    def exists(self) -> bool:
        """Whether a reader could get something."""
        whole = self.versions is not None and self.versions.newest_whole is not None
        return self.value is not None or whole

    @property
    def needed(self) -> bool:
        """Whether anything is to be remembered."""
        waited_for = self.holder is not None or bool(self.in_line) or bool(self.for_value)
        return self.value is not None or self.versions is not None or waited_for

    def waiting(self) -> Iterator[Waiting]:
        """Yield everybody who waits."""
        yield from self.in_line
        yield from self.for_value

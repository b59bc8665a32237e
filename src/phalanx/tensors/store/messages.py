"""What a client of the tensor store says to it, and hears.

A conversation is one question, one answer, over a socket of its own; a process with several
threads has several. "fds:" names the file descriptors that travel with the message.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class StoreMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """What all messages have in common."""


class Reserve(StoreMessage, frozen=True, kw_only=True):
    """Get a segment to write into.

    Attributes:
        num_bytes: What it must hold.
        mapped: Segments that this process keeps mapped, to hear which are gone.
    """

    num_bytes: int
    mapped: tuple[int, ...] = ()


class GiveBack(StoreMessage, frozen=True, kw_only=True):
    """A reserved segment is not needed after all."""

    segment: int


class Put(StoreMessage, frozen=True, kw_only=True):
    """Set a key's value: `data`, or what was written into a reserved segment.

    Attributes:
        key: Its name.
        layout: What the bytes mean; the store does not look into it.
        num_bytes: Length of the value.
        data: The bytes, or None if they are in `segment`.
        segment: A segment that was reserved, or None.
        timeout_s: How long to wait while somebody else holds the key (None: without limit).
        holding: This conversation holds the key (`Hold`), and lets it go herewith.
        another: Answer a value that came in a segment with the next one of that size, which
            spares a question.
    """

    key: str
    layout: bytes
    num_bytes: int
    data: bytes | None = None
    segment: int | None = None
    timeout_s: float | None = None
    holding: bool = False
    another: bool = False


class Commit(StoreMessage, frozen=True, kw_only=True):
    """Set a rank's part of a version of a key; the other fields as in `Put`."""

    key: str
    version: int
    rank: int
    layout: bytes
    num_bytes: int
    data: bytes | None = None
    segment: int | None = None


class Get(StoreMessage, frozen=True, kw_only=True):
    """Ask for a key's value; wait for it if it is not there yet."""

    key: str
    timeout_s: float | None = None


class GetCommitted(StoreMessage, frozen=True, kw_only=True):
    """Ask for a rank's part of the newest version that all ranks have committed."""

    key: str
    rank: int


class Hold(StoreMessage, frozen=True, kw_only=True):
    """Keep others from changing a key until `Put` (holding) or `LetGo`; ask for its value.

    Attributes:
        key: Its name.
        timeout_s: How long to wait for the key, and for whoever holds it.
        may_be_missing: Answer `Done(existed=False)` if it is not there, instead of waiting.
    """

    key: str
    timeout_s: float | None = None
    may_be_missing: bool = False


class LetGo(StoreMessage, frozen=True, kw_only=True):
    """Leave a held key as it was."""

    key: str


class Delete(StoreMessage, frozen=True, kw_only=True):
    """Remove a key with all its versions."""

    key: str
    timeout_s: float | None = None


class Has(StoreMessage, frozen=True, kw_only=True):
    """Ask whether a key has a value, or a version that all ranks have committed."""

    key: str


class ListKeys(StoreMessage, frozen=True, kw_only=True):
    """Ask for the names of all keys."""


StoreRequest: TypeAlias = (
    Reserve | GiveBack | Put | Commit | Get | GetCommitted | Hold | LetGo | Delete | Has | ListKeys
)


class Reserved(StoreMessage, frozen=True, kw_only=True):
    """A segment is the client's to write; fds: the segment.

    Attributes:
        segment: Its number, never used for another.
        num_bytes: Its length.
        fresh: It has no pages yet.
        keep: The client may keep it mapped for its next turn.
        gone: Segments of `Reserve.mapped` that don't exist any more.
    """

    segment: int
    num_bytes: int
    fresh: bool
    keep: bool
    gone: tuple[int, ...] = ()


class Found(StoreMessage, frozen=True, kw_only=True):
    """A value; fds: the segment to map (read only), if `data` is None."""

    layout: bytes
    num_bytes: int
    data: bytes | None = None
    version: int = 0


class Done(StoreMessage, frozen=True, kw_only=True):
    """It was done; whether the key existed; fds: that of `another`."""

    existed: bool = True
    another: Reserved | None = None


class Keys(StoreMessage, frozen=True, kw_only=True):
    """The names of all keys, sorted."""

    names: tuple[str, ...]


Why: TypeAlias = Literal["full", "timeout", "misuse"]


class Refused(StoreMessage, frozen=True, kw_only=True):
    """It was not done, and nothing has changed."""

    why: Why
    message: str


StoreReply: TypeAlias = Reserved | Found | Done | Keys | Refused

"""Where what ranks print goes: to the console, to files, or to both, stream by stream."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias

import msgspec

Stream: TypeAlias = Literal["out", "err"]
"""Standard output, standard error."""
STREAMS: tuple[Stream, ...] = ("out", "err")


class StreamOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Where one stream of one rank goes. What does not go to the console goes to a file.

    Attributes:
        console: It goes to the console.
        prefix: What stands before each line there; None: Phalanx' own, which names the rank.
        kept: It goes to a file as well.
        file: Path of that file, which it is appended to; None: the usual one, in the folder
            for logs.
    """

    console: bool = False
    prefix: str | None = None
    kept: bool = False
    file: str | None = None

    @property
    def goes_to_file(self) -> bool:
        """Whether there is a file of it."""
        return self.kept or not self.console


class LineFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Lines that contain one of the needles are copied to one file for all ranks.

    Attributes:
        needles: Texts to look for.
        file: Path of the file; None: the usual one, in the folder for logs.
    """

    needles: tuple[str, ...]
    file: str | None = None


class Outputs(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks' streams go, by rank; ranks that are not told of have a file each."""

    out: tuple[StreamOutput, ...] = ()
    err: tuple[StreamOutput, ...] = ()
    out_filter: LineFilter | None = None
    err_filter: LineFilter | None = None

    def of(self, rank: int, stream: Stream) -> StreamOutput:
        """Return where one stream goes."""
        streams = self.out if stream == "out" else self.err
        return streams[rank] if rank < len(streams) else StreamOutput()

    def filter_of(self, stream: Stream) -> LineFilter | None:
        """Return what is copied of a stream."""
        return self.out_filter if stream == "out" else self.err_filter

    def ranks_on_console(self, stream: Stream) -> list[int]:
        """Return whose stream goes to the console."""
        streams = self.out if stream == "out" else self.err
        return [rank for rank, where in enumerate(streams) if where.console]


def alike(world_size: int, console: Collection[int], *, kept: bool) -> Outputs:
    """Return outputs in which both streams of a rank go the same way.

    Args:
        world_size: Number of ranks.
        console: Those that go to the console.
        kept: These have files, too; the others have them anyway.
    """
    streams = tuple(StreamOutput(console=rank in console, kept=kept) for rank in range(world_size))
    return Outputs(out=streams, err=streams)

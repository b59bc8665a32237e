"""From torchelastic's log destinations to where each stream of each rank goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from phalanx.values.outputs import LineFilter, Outputs, StreamOutput

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import LogsDest


def make_outputs(
    name: str,
    logs: LogsDest,
    prefixes: dict[int, str] | None,
    out_needles: Sequence[str] | None,
    err_needles: Sequence[str] | None,
) -> Outputs:
    """Return where the streams go: to a file, to the console as they are, or, prefixed, to both.

    Args:
        name: Of the processes; part of the usual prefix.
        logs: The files by local rank, and which of them are shown on the console, too.
        prefixes: By local rank, what takes the place of the usual prefix.
        out_needles: Lines of standard output that contain one go to a file of their own.
        err_needles: The same for standard error.
    """

    def stream(rank: int, file: str, shown: str | None) -> StreamOutput:
        if not file:
            return StreamOutput(console=True, prefix="")
        return StreamOutput(
            console=shown == file,
            prefix=(prefixes or {}).get(rank, f"[{name}{rank}]:"),
            kept=True,
            file=_absolute(file),
        )

    def streams(files: dict[int, str], shown: dict[int, str]) -> tuple[StreamOutput, ...]:
        return tuple(stream(rank, files[rank], shown.get(rank)) for rank in sorted(files))

    return Outputs(
        out=streams(logs.stdouts, logs.tee_stdouts),
        err=streams(logs.stderrs, logs.tee_stderrs),
        out_filter=_line_filter(logs, "filtered_stdout", out_needles),
        err_filter=_line_filter(logs, "filtered_stderr", err_needles),
    )


def open_filtered(wanted: LineFilter | None) -> TextIO | None:
    """Make the file that the lines are appended to; like torch's context, ours holds it open."""
    return None if wanted is None or wanted.file is None else Path(wanted.file).open("w")


def _line_filter(logs: LogsDest, name: str, needles: Sequence[str] | None) -> LineFilter | None:
    if not needles:
        return None
    return LineFilter(file=_absolute(getattr(logs, name)), needles=tuple(needles))


def _absolute(path: str) -> str:
    return str(Path(path).absolute())

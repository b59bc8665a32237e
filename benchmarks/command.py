"""``phalanx run`` beside torchrun: the same script, the same options."""

from __future__ import annotations

from benchmarks.programs import run, times
from benchmarks.stats import Row, show

_WORLD_SIZE = 4
_NUM_KILLS = 20


def command(runs: int) -> None:
    """Command → first all-reduce and exit, and whether a killed rank is survived."""
    first = Row("phalanx run, command → first all-reduce", target="≤ 0.5 × torchrun")
    whole = Row("phalanx run, whole command", target="≤ 0.4 × torchrun")
    their_first = Row("torchrun, command → first all-reduce")
    their_whole = Row("torchrun, whole command")
    for _ in range(max(3, runs // 2)):
        for kind, to_first, to_exit in (
            ("phalanx run", first, whole),
            ("torchrun", their_first, their_whole),
        ):
            stamps = run(kind, "start", _WORLD_SIZE)
            if stamps:
                (began,), (ended,) = times(stamps, "command"), times(stamps, "exit")
                to_first.samples.append(max(times(stamps, "collective-0")) - began)
                to_exit.samples.append(ended - began)
    first.note = f"{first.median / their_first.median:.2f} × torchrun"
    whole.note = f"{whole.median / their_whole.median:.2f} × torchrun"
    show(f"The command, {_WORLD_SIZE} workers", [first, their_first, whole, their_whole])
    ours = Row("phalanx run, SIGKILL → first all-reduce", target=f"{_NUM_KILLS} of {_NUM_KILLS}")
    theirs = Row("torchrun, as it is by default")
    for kind, row, number in (
        ("phalanx run", ours, _NUM_KILLS),
        ("torchrun", theirs, max(3, runs // 2)),
    ):
        for _ in range(number):
            default = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
            stamps = run(kind, "recover", _WORLD_SIZE, quiet=True, **default)
            back = times(stamps, "collective-1")
            if len(back) == _WORLD_SIZE:
                row.samples.append(max(back) - times(stamps, "kill")[0])
        row.note = f"{len(row.samples)} of {number} came back"
    show("A rank is killed, --max-restarts 3", [ours, theirs])

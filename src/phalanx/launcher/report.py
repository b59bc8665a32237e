"""What the launcher tells a person: a line where it matters, and a page when a run failed.

The page says what broke first, where, why; then what followed. Plain text, made for
a person who has just lost a training run.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from phalanx.values import events as ev

if TYPE_CHECKING:
    from phalanx.values.failures import Failure
    from phalanx.values.spec import LaunchSpec

_log = logging.getLogger("phalanx")
_TAIL_LINES = 20
_SHOWN_EFFECTS = 16
_OWN_FRAME = re.compile(
    r'  File "(.*/phalanx/worker/(bootstrap|script|forkserver/__main__)\.py|<string>)", line .*'
)
"""Frames below the user's in a native stack: they tell nobody anything."""


def log_event(event: ev.Event, spec: LaunchSpec) -> None:
    """Log what a person at the console wants to know while a run goes on."""
    match event:
        case ev.Warned(message=message):
            _log.warning("%s", message)
        case ev.GroupFell(failure=failure, restarting=True):
            what = failure.headline()
            if failure.rank >= 0:
                what = f"rank {failure.rank} failed ({what})"
            _log.warning("%s; restarting all %d workers", what, spec.world_size)
            _log_stacks(failure)
        case ev.WorkerRestarted(rank=rank, failure=failure):
            _log.warning("rank %d failed (%s); restarting it", rank, failure.headline())
            _log_stacks(failure)
        case ev.StopRequested(reason=reason, grace_s=grace_s) if reason.startswith("SIG"):
            _log.warning("%s: stopping (at most %g s; Ctrl-C again to kill)", reason, grace_s)
        case ev.StopRequested(reason=reason, grace_s=grace_s) if reason.startswith("phalanx"):
            _log.warning("`%s`: the run is stopping (at most %g s)", reason, grace_s)
        case ev.KillRequested(reason=reason) if reason.startswith("phalanx"):
            _log.warning("`%s`: the run is ending", reason)
        case _:
            pass


def _log_stacks(failure: Failure) -> None:
    """Of a hang that is healed this is all that a person gets to see."""
    if failure.stacks:
        _log.warning("where the ranks were (innermost call last):\n%s", failure.stacks)


def failure_page(spec: LaunchSpec, failures: tuple[Failure, ...], restart_count: int) -> str:
    """Return the page.

    Args:
        spec: What was launched.
        failures: The records, the root cause first.
        restart_count: Restarts before the run was given up.
    """
    root, *others = failures
    lines = [f"{_who(root)} failed: {root.headline()}", "", f"  where     {_where(root, spec)}"]
    lines.append(f"  how       {_how(root, spec)}")
    if restart_count or spec.max_restarts:
        lines.append(f"  restarts  {restart_count} of {spec.max_restarts} were used")
    lines.append(f"  run       {spec.run_dir}")
    lines += _section("message", root.message if "\n" in root.message else "")
    if root.stacks:  # its own is the first of them
        lines += _section("where the ranks were (innermost call last)", root.stacks)
    else:
        lines += _section("traceback", root.traceback or "")
    lines += _section("native stack", _native_stack(root))
    lines += _section("last lines of its log", _tail(root))
    if others:
        lines += ["", "Because of that:"]
        lines += [f"  {_effect(failure)}" for failure in others[:_SHOWN_EFFECTS]]
        if len(others) > _SHOWN_EFFECTS:
            lines.append(f"  … and {len(others) - _SHOWN_EFFECTS} more ranks")
    return "\n".join(lines)


def _who(failure: Failure) -> str:
    return "The run" if failure.rank < 0 else f"Rank {failure.rank}"


def _where(failure: Failure, spec: LaunchSpec) -> str:
    parts = [f"rank {failure.rank} of {spec.world_size}"] if failure.rank >= 0 else []
    parts.append(f"node {failure.node_rank}")
    if failure.pid is not None:
        parts.append(f"pid {failure.pid}")
    parts.append(f"generation {failure.generation}")
    return ", ".join(parts)


def _how(failure: Failure, spec: LaunchSpec) -> str:
    what = "the function"
    if spec.program is not None:
        what = "the program" if spec.program.kind == "executable" else f"the {spec.program.kind}"
    whose = what if failure.rank >= 0 else "Phalanx"
    left = "the process left" if spec.program else f"the process left before {what} returned"
    causes = {
        "exception": f"{whose} raised an exception",
        "exit": left,
        "signal": "a signal from outside its code, or a crash in native code",
        "startup": "it never reached the user's code",
        "hang": "it hung, and was killed",
        "helper": "a process of Phalanx' own ended, which the run needs",
    }
    how = causes[failure.cause]
    return f"{how} ({failure.exit})" if failure.exit is not None else how


def _section(title: str, text: str) -> list[str]:
    text = text.rstrip()
    if not text:
        return []
    return ["", f"{title}:", *(f"  {line}" for line in text.splitlines())]


def _native_stack(failure: Failure) -> str:
    lines = (failure.native_stack or "").splitlines()
    return "\n".join(line for line in lines if not _OWN_FRAME.fullmatch(line))


def _tail(failure: Failure) -> str:
    """The last log lines, without the traceback that stands above already."""
    lines = failure.log_tail.rstrip().splitlines()
    if failure.traceback:
        last = failure.traceback.rstrip().splitlines()[-1:]
        if last and lines and lines[-1].endswith(last[0]):
            starts = [n for n, line in enumerate(lines) if "Traceback (most recent" in line]
            lines = lines[: starts[-1]] if starts else []
    return "\n".join(lines[-_TAIL_LINES:])


def _effect(failure: Failure) -> str:
    who = f"rank {failure.rank}, node {failure.node_rank}"
    if failure.pid is not None:
        who += f", pid {failure.pid}"
    what = failure.headline()
    if failure.kind == "effect":
        what = f"lost its peers ({what})"
    return f"{who}: {what}"

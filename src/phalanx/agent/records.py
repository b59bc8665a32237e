"""Failure records that the agent makes itself, of workers that could not speak."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from phalanx.values.failures import Failure, Signaled, kind_of
from phalanx.values.spec import error_file

if TYPE_CHECKING:
    from phalanx.agent.forkserver import NotMade
    from phalanx.values.failures import Exit
    from phalanx.values.spec import LaunchSpec, WorkerSpec

_MAX_ERROR_FILE = 4 * 1024 * 1024


def record_of_no_start(worker: WorkerSpec, why: NotMade) -> Failure:
    """Make the record of a process that could not be made."""
    return Failure(
        rank=worker.rank,
        node_rank=worker.node_rank,
        generation=worker.generation,
        cause="startup",
        message=why.message,
        traceback=why.traceback,
        at=time.time(),
        retry=False,
    )


def record_of_helper(
    what: str, pid: int | None, exit_: Exit | None, *, how: str = "", last_words: str = ""
) -> Failure:
    """Make the record of a process of ours that ended, nobody having asked it to.

    Args:
        what: Which process, as a sentence begins.
        pid: Its process id.
        exit_: How it ended, if that is known.
        how: The same in words, where there is more to say.
        last_words: What it wrote to its standard error.
    """
    if not how and isinstance(exit_, Signaled):
        how = f"was ended by {exit_}"
        if exit_.name == "SIGKILL":
            how += " (if nobody sent that: `dmesg` says whether memory ran out)"
    elif not how:
        how = "ended unexpectedly" if exit_ is None else f"left with {exit_}"
    process = "" if pid is None else f" (process {pid})"
    return Failure(
        rank=-1,
        pid=pid,
        cause="helper",
        message=f"{what}{process} {how}",
        exit=exit_,
        log_tail=last_words,
        at=time.time(),
    )


def record_of_error_file(spec: LaunchSpec, worker: WorkerSpec, pid: int | None) -> Failure | None:
    """Make the record of what torchelastic's ``@record`` left in its file, if there is one."""
    found = _read_error_file(error_file(spec, worker))
    if found is None:
        return None
    type_name, message, callstack = found
    return Failure(
        rank=worker.rank,
        node_rank=worker.node_rank,
        pid=pid,
        generation=worker.generation,
        cause="exception",
        kind=kind_of((type_name or "",), message),
        type_name=type_name,
        message=message,
        traceback=callstack,
        at=time.time(),
    )


def _read_error_file(path: str) -> tuple[str | None, str, str | None] | None:
    """Return class, message and traceback from torchelastic's error file, if it is a sound one.

    Source:
        The format is that of torch.distributed.elastic.multiprocessing.errors (torch 2.13):
        ``{"message": {"message": "ValueError: …", "extraInfo": {"py_callstack": …}}}`` or
        ``{"message": "…"}``. A torn file is no file.
    """
    try:
        with contextlib.closing(open(path, "rb")) as file:  # noqa: PTH123 - bounded read
            content = msgspec.json.decode(file.read(_MAX_ERROR_FILE))
        message = content["message"]
        if not isinstance(message, dict):
            return None, str(message), None
        callstack = message.get("extraInfo", {}).get("py_callstack")
        type_name, colon, text = str(message["message"]).partition(": ")
        if not (colon and type_name.isidentifier()):  # somebody else's file
            return None, str(message["message"]), callstack
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return None
    return type_name, text, callstack

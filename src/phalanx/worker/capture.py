"""Turns what went wrong in the user's code into a failure record. Must never fail itself."""

from __future__ import annotations

import os
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from phalanx.values.failures import Cause, Failure, kind_of

if TYPE_CHECKING:
    from phalanx.values.spec import WorkerSpec

MAX_MESSAGE = 16 * 1024
"""Characters of an exception's text that travel."""
MAX_TRACEBACK = 256 * 1024
"""Characters of a traceback that travel."""
MAX_EXCEPTION = 1024 * 1024
"""Bytes of a pickled exception that travel."""


def failure_of(
    error: BaseException, worker: WorkerSpec, *, cause: Cause, skip_frames: int = 0
) -> Failure:
    """Make the record of an exception.

    Args:
        error: What was raised.
        worker: The rank that it was raised in.
        cause: ``exception``, or ``startup`` where the user's function was not reached.
        skip_frames: Frames of Phalanx at the top of the traceback that tell nobody anything.
    """
    message = _cut(_text(error), MAX_MESSAGE)
    return Failure(
        rank=worker.rank,
        node_rank=worker.node_rank,
        pid=os.getpid(),
        generation=worker.generation,
        cause=cause,
        kind=kind_of((kind.__name__ for kind in type(error).__mro__), message),
        type_name=_clean(_type_name(error)),
        message=message,
        traceback=_cut(_traceback(error, skip_frames), MAX_TRACEBACK),
        at=time.time(),
        retry=cause != "startup",
        exception=None if worker.program is not None else _pickled(error),
    )


def _type_name(error: BaseException) -> str:
    kind = type(error)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - a user's __str__ may do anything
        return f"<its text can't be shown: {type(broken).__name__}>"


def _traceback(error: BaseException, skip_frames: int) -> str:
    shown: TracebackType | None = error.__traceback__
    for _ in range(skip_frames):
        shown = None if shown is None else shown.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, shown))
    except BaseException:  # noqa: BLE001 - as above
        return f"{_type_name(error)} (its traceback can't be shown)"


def _pickled(error: BaseException) -> bytes | None:
    from phalanx.wire import payload  # noqa: PLC0415 - cloudpickle, only on this path

    try:
        data = payload.roundtrips(error)
    except BaseException:  # noqa: BLE001 - whatever its pickling does, the record goes out
        return None
    return data if data is not None and len(data) <= MAX_EXCEPTION else None


def _cut(text: str, limit: int) -> str:
    text = _clean(text)
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - limit:,} characters left out …\n{text[-half:]}"


def _clean(text: str) -> str:
    """Lone surrogates can't be encoded: show them as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

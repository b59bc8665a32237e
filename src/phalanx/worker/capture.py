"""Turns what went wrong in the user's code into a failure record. Must never fail itself."""

from __future__ import annotations

import os
import re
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from phalanx.failures import Cause, Failure, Kind

if TYPE_CHECKING:
    from phalanx.spec import WorkerSpec

MAX_MESSAGE = 16 * 1024
"""Characters of an exception's text that travel."""
MAX_TRACEBACK = 256 * 1024
"""Characters of a traceback that travel."""
MAX_EXCEPTION = 1024 * 1024
"""Bytes of a pickled exception that travel."""

_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe"
    r"|connectFullMesh failed|Socket (Timeout|closed)|Read timeout"
    r"|remote process exited or there was a network error|NCCL communicator was aborted"
    r"|Application timeout caused pair closure|failed to recv, got 0 bytes"
    r"|recvValue failed|sendBytes failed|PeerLostError",
    re.IGNORECASE,
)
"""How the loss of a peer reads in Gloo's, NCCL's and TCPStore's errors, and in one of ours that
came through torch's C++ (from a future, under DDP)."""

_LOST_PEER_TYPES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "PeerLostError"}
)


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
        kind=_kind(error, message),
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


def _kind(error: BaseException, message: str) -> Kind:
    """Tell the effect of a peer's death from a failure of this rank's own."""
    if isinstance(error, ConnectionError | EOFError) or type(error).__name__ in _LOST_PEER_TYPES:
        return "effect"
    if isinstance(error, RuntimeError) and _LOST_PEER.search(message):
        return "effect"
    return "primary"


def _pickled(error: BaseException) -> bytes | None:
    from phalanx import payload  # noqa: PLC0415 - cloudpickle, only on this path

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

"""From Phalanx' failure records to torchelastic's `ProcessFailure`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from phalanx.values.failures import Exited, Signaled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from phalanx.values.failures import Failure

_log = logging.getLogger("phalanx")
NO_PID = 2**31 - 1
"""In place of the pid of a process that never was: no process has it, so no signal hits any."""


def process_failures(
    records: Iterable[Failure], pids: Mapping[int, int], error_files: Mapping[int, str]
) -> dict[int, ProcessFailure]:
    """Return the failures by rank, in the order of the records: the root cause comes first.

    torchelastic takes the one with the least timestamp for the root cause, in whole seconds, so
    no other may have a lesser one. Ranks that were stopped and ended well are left out.
    """
    failures: dict[int, ProcessFailure] = {}
    first: ProcessFailure | None = None
    for record in records:
        code = exit_code(record)
        if code == 0 or record.rank in failures or record.rank not in error_files:
            continue
        pid = record.pid or pids.get(record.rank, NO_PID)
        failure = process_failure(record.rank, pid, code, error_files[record.rank])
        if record.cause == "startup":  # user code was not reached, so no error file can say why
            failure.message = record.traceback or record.headline()
        if first is None:
            first = failure
        failure.timestamp = max(failure.timestamp, first.timestamp)
        failures[record.rank] = failure
    return failures


def process_failure(rank: int, pid: int, code: int, error_file: str) -> ProcessFailure:
    """Make a failure; an error file that can't be read (torn, say) is left out of it."""
    try:
        return ProcessFailure(local_rank=rank, pid=pid, exitcode=code, error_file=error_file)
    except Exception as error:  # noqa: BLE001 - it may hold anything
        _log.warning("the error file %s can't be read (%s); going on without it", error_file, error)
        return ProcessFailure(local_rank=rank, pid=pid, exitcode=code, error_file="")


def exit_code(record: Failure) -> int:
    """Return how a rank ended as one number: negative for a signal."""
    match record.exit:
        case Exited(code=code):
            return code
        case Signaled(signum=signum):
            return -signum
        case None:
            return 1  # there was no process, or it is stuck in the kernel

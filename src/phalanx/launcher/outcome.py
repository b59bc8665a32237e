"""What came of a run: values that were returned, or the error that says what failed."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from phalanx.launcher.report import failure_page
from phalanx.values.errors import WorkerFailedError

if TYPE_CHECKING:
    from phalanx.values.spec import LaunchSpec
    from phalanx.wire.messages import RunFinished


def load_return(value: bytes | int | None) -> object:
    """Unpickle what a rank returned.

    A program returns nothing, and a rank that left by `os._exit(0)` returned None.

    Args:
        value: The pickle, or a descriptor of a file that holds it, which is closed here.
    """
    if value is None or value == b"":
        return None
    from phalanx.wire import payload  # noqa: PLC0415 - loaded by the launch

    if isinstance(value, bytes):
        return payload.load_value(value)
    with mmap.mmap(value, 0, access=mmap.ACCESS_READ) as data:
        os.close(value)
        return payload.load_value(data)


def failure_of(spec: LaunchSpec, finished: RunFinished) -> WorkerFailedError:
    """Make the error of a run that failed, with the exceptions that could travel."""
    exceptions: dict[int, BaseException] = {}
    for failure in finished.failures:
        if failure.exception is None:
            continue
        from phalanx.wire import payload  # noqa: PLC0415 - loaded by the launch

        try:
            exception = payload.load_value(failure.exception)
        except Exception:  # noqa: BLE001, S112 - a class may not exist here: the text will do
            continue
        if isinstance(exception, BaseException):
            exceptions[failure.rank] = exception
    page = failure_page(spec, finished.failures, finished.restart_count)
    return WorkerFailedError(page, finished.failures, exceptions)

"""What a worker does that calls a function: it leaves an exception where torch would leave it.

Imports no torch unless the function does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from typing import TYPE_CHECKING, Any

from phalanx.worker import fresh

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def call_function(
    rank: int,
    world_size: int,
    function: Callable[..., object],
    args: Mapping[int, tuple[Any, ...]],
    numa_options: object | None,
) -> object:
    """Call a rank's function; an exception goes into the rank's error file, too."""
    del world_size
    num_cores = len(os.sched_getaffinity(0))  # as in a fresh process that is told nothing
    fresh.set_threads({"OMP_NUM_THREADS": str(num_cores), **os.environ})
    with contextlib.suppress(Exception):  # standard error may be closed
        faulthandler.enable()
    if numa_options is not None:
        from torch.numa.binding import _maybe_wrap_with_numa_binding  # noqa: PLC0415

        function = _maybe_wrap_with_numa_binding(
            function, gpu_index=rank, numa_options=numa_options
        )
    try:
        return function(*args[rank])
    except Exception as error:
        _record(error)
        raise


def _record(error: Exception) -> None:
    """Do with an exception what torchelastic's ``@record`` does, in torch's own words."""
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415

    def fail_again() -> None:
        raise error

    traceback = error.__traceback__
    with contextlib.suppress(BaseException):  # whatever becomes of the file, the failure counts
        record(fail_again)()
    error.__traceback__ = traceback

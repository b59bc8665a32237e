"""The names of ``torch.distributed.elastic.multiprocessing``: ours where processes are started."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    RunProcsResult,
    SignalException,
    Std,
    to_map,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from phalanx.elastic.checks import check_ranks
from phalanx.elastic.contexts import MultiprocessContext, PContext, SubprocessContext

if TYPE_CHECKING:
    from torch.numa.binding import NumaOptions

    from phalanx.elastic.contexts import Args, Envs

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]


def start_processes(
    name: str,
    entrypoint: Callable[..., object] | str,
    args: Args,
    envs: Envs,
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: NumaOptions | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
) -> PContext:
    """Start one process per local rank that calls a function or is a binary; return at once.

    ``args`` and ``envs`` have the local ranks, 0 and up, as their keys.

    Args:
        name: What the processes are called on the console.
        entrypoint: A function, called as ``entrypoint(*args[local_rank])``, or the name of a
            binary, whose arguments are converted by `str`.
        args: Arguments by local rank.
        envs: Variables by local rank, on top of this process' own.
        logs_specs: Which streams go to files, to the console, or to both.
        log_line_prefixes: What stands before console lines of ranks that go to a file, too; the
            default is ``[{name}{local_rank}]:``.
        start_method: For functions: ``spawn`` (a fresh interpreter), or ``fork`` or ``forkserver``
            (forked from a process that has imported torch).
        numa_options: torch's options for binding ranks to NUMA nodes.
        duplicate_stdout_filters: Standard output lines that contain one of these, of ranks that go
            to console and file, are also written to the logs' ``filtered_stdout``.
        duplicate_stderr_filters: The same for standard error.

    Returns:
        The context: `wait` for it, `close` it.

    Raises:
        RuntimeError: Keys are not the local ranks.
        FileNotFoundError: There is no such binary.
        PayloadError: The function or an argument can't travel to another process.
    """
    check_ranks(args, len(args), "args")
    check_ranks(envs, len(args), "envs")
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            numa_options,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
    else:
        context = MultiprocessContext(
            name,
            entrypoint,
            args,
            envs,
            start_method,
            logs_specs,
            log_line_prefixes,
            numa_options,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
    try:
        context.start()
    except BaseException:
        context.close()
        raise
    return context

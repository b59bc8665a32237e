"""torchelastic's process contexts on Phalanx: change the import, keep the code.

``from torch.distributed.elastic.multiprocessing import …`` becomes ``from phalanx.elastic import
…``. `start_processes`, `PContext`, `MultiprocessContext` and `SubprocessContext` are Phalanx';
the values that code compares or makes (`Std`, `DefaultLogsSpecs`, `RunProcsResult`,
`ProcessFailure`, `SignalException`, …) are torch's own classes.

What differs on purpose:

- Nothing polls: `wait` wakes when the run ends, whatever `period` says. It also returns when a
  function left by ``os._exit(0)`` (as one that returned None) or was killed while returning.
- While the others are being stopped after a failure, ``wait(0)`` returns None instead of blocking.
- A failure is noticed at once, not up to a second later: a binary that would have ended well in
  that second is stopped, and is then among the failures, after the root cause.
- The others get SIGTERM and one second, not thirty: they sit in a collective that can't complete.
  `close` honours its signal and its timeout. A process has five minutes to reach the function, and
  thirty seconds to end after it has returned. Signals go to the rank's process, not to its group;
  whatever a rank leaves behind is ended, however it ended.
- Functions report the root cause only, as torch's do, and binaries all that did not end with 0;
  the root cause is first, and has the least timestamp, even if others failed in the same second.
  An error file that can't be read is no error: the failure counts, without the file.
- Functions travel by value where they must (lambdas, closures, ``__main__``); what only inheritance
  could bring over (queues and locks of multiprocessing) can't. ``start_method="spawn"`` is a fresh
  interpreter; ``fork`` and ``forkserver`` fork a process that has imported torch and nothing of
  yours, never this one: globals that were changed here are not seen there.
- A binary is executed in the worker's place, so `pids` are its own. Its standard input is empty,
  and its output a pipe or a file, never the terminal. One that is missing is an error of the call,
  one that can't be executed otherwise a failure of its rank.
- Output without a file goes where this process' ``sys.stdout`` goes, in whole lines; Python workers
  are line-buffered. Log files are there as soon as `start_processes` has returned.
- Signal handlers are put back after the last context has ended, what was ignored (nohup) stays
  ignored, and workers die with this process, also if it is killed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.elastic.api import (
        DefaultLogsSpecs,
        LogsDest,
        LogsSpecs,
        MultiprocessContext,
        PContext,
        ProcessFailure,
        RunProcsResult,
        SignalException,
        Std,
        SubprocessContext,
        start_processes,
        to_map,
    )

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


def __getattr__(name: str) -> object:
    """Import a public name on first use: workers import this package, and torch costs a second."""
    if name not in __all__:
        raise AttributeError(f"module 'phalanx.elastic' has no attribute {name!r}")
    import phalanx.elastic.api as home  # noqa: PLC0415 - see above

    value: object = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Offer the public names to completion."""
    return list(__all__)

"""What a fork must not share: makes a forked child look like a fresh interpreter.

The user's code must not be able to tell, except by how soon it runs, by what is already in
`sys.modules`, and by the hash seed. The fork server did nothing but import, so what has to
be undone is little and known, and each piece stands here under its own name.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import random
import resource
import signal
import sys
import types
from multiprocessing import process as mp_process
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.values.spec import ProcessImage


_SET_BY_THREADPOOLCTL = "KMP_DUPLICATE_LIB_OK"
"""Importing it sets this; a worker's environment is what the launcher's was."""


def enter_surroundings(image: ProcessImage) -> None:
    """Take over from the launcher what survives an exec: directory, limits, umask, signals."""
    os.setsid()
    with contextlib.suppress(OSError):  # the directory may have been removed meanwhile
        os.chdir(image.directory)
    os.umask(image.umask)
    for limit, soft, hard in image.limits:
        with contextlib.suppress(OSError, ValueError):  # a hard limit can't be raised again
            if resource.getrlimit(limit) != (soft, hard):
                resource.setrlimit(limit, (soft, hard))
    ignored = set(image.ignored_signals)
    for signum in signal.valid_signals():
        _reset_signal(signum, ignore=signum in ignored)
    signal.pthread_sigmask(signal.SIG_SETMASK, image.blocked_signals)


def _reset_signal(signum: int, *, ignore: bool) -> None:
    """Give a signal the meaning that it has in a fresh Python interpreter."""
    if ignore:
        meaning: Any = signal.SIG_IGN
    elif signum == signal.SIGINT:
        meaning = signal.default_int_handler
    elif signum in (signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
        meaning = signal.SIG_IGN
    else:
        meaning = signal.SIG_DFL
    with contextlib.suppress(OSError, ValueError):  # SIGKILL, SIGSTOP
        if signal.getsignal(signum) is not meaning:
            signal.signal(signum, meaning)


def enter_interpreter(image: ProcessImage, environment: dict[str, str]) -> None:
    """Take over what an exec would have set: environment, arguments, path, random states."""
    signal.set_wakeup_fd(-1)
    os.environ.clear()
    os.environ.update(environment)
    _set_standard_streams()
    random.seed()
    _reset_libraries(environment)
    _reset_multiprocessing()
    sys.path[:] = image.module_path
    sys.argv[:] = image.argv
    sys.orig_argv[:] = [image.executable, *image.flags, *image.argv]


def make_main(image: ProcessImage) -> types.ModuleType:
    """Install an empty `__main__`, as if the launcher's script were about to run."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if image.main_file is not None:
        main.__file__ = image.main_file
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", image.main_file or "")
    sys.modules["__main__"] = main
    # What multiprocessing calls the main module of a child that it spawned; classes come back
    # under that name.
    sys.modules["__mp_main__"] = main
    return main


def _set_standard_streams() -> None:
    """Line-buffer standard output: whoever dies, the last line printed has gone out."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _reset_libraries(environment: dict[str, str]) -> None:
    numpy_random = sys.modules.get("numpy.random")  # imported by numpy when it is first used
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.random.default_generator.seed()  # a fresh process draws its seed, too
    set_threads(environment)


def set_threads(environment: dict[str, str]) -> None:
    """Set thread counts by call: the runtimes read their variables at import, which is past.

    The preload ran under OPENBLAS_NUM_THREADS=1, since OpenBLAS starts its threads when it
    is loaded.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    wanted = _count(environment.get("OMP_NUM_THREADS"))
    if torch is not None and wanted is not None:
        torch.set_num_threads(wanted)
    blas = _count(environment.get("OPENBLAS_NUM_THREADS")) or wanted or os.cpu_count() or 1
    if numpy is not None and blas > 1:
        said = os.environ.get(_SET_BY_THREADPOOLCTL)
        import threadpoolctl  # noqa: PLC0415 - only where there is something to change

        if said is None:
            os.environ.pop(_SET_BY_THREADPOOLCTL, None)
        threadpoolctl.threadpool_limits(blas, user_api="blas")


def _count(text: str | None) -> int | None:
    """Read a thread count; OMP allows a list by nesting level, of which the first counts."""
    head = (text or "").partition(",")[0].strip()
    return int(head) if head.isdigit() and int(head) > 0 else None


def _reset_multiprocessing() -> None:
    """The authentication key is made at import and must not be the same in all workers.

    A function's worker gets its launcher's key and resource tracker with its payload.
    """
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None:  # the descriptor that a preloaded module had it open is closed
        tracker._resource_tracker._fd = tracker._resource_tracker._pid = None  # noqa: SLF001
    mp_process.current_process().authkey = os.urandom(32)
    mp_process.ORIGINAL_DIR = os.path.abspath(".")  # type: ignore[attr-defined]  # noqa: PTH100

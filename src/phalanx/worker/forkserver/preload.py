"""Imports what workers will need, and checks that forking afterwards is sound.

A child made by fork has only the thread that forked; a lock that another thread held stays
locked for ever, and a CUDA context does not survive. So after each preloaded module the
server looks at itself, and can name the module that broke the rule.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import traceback
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.tensors.sync.shm.backend import register_shm_backend
from phalanx.wire.forking import PreloadFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN_MODULES: Final = (
    "phalanx.worker.bootstrap",
    "phalanx.worker.context",
    "phalanx.wire.payload",
    "mmap",
)
"""What every worker imports first."""

WITH_TORCH: Final = (
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed.rendezvous",
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "phalanx.worker.group",
    "phalanx.tensors.store.client",
    "phalanx.tensors.sync.synchronizer",
    "phalanx.tensors.sync.shm.group",
)
"""What a worker that uses torch.distributed imports next; cheap after torch itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preloaded:
    """What came of the preload: at most one of the two is set."""

    failed: PreloadFailed | None = None
    unfit: str | None = None


def preload(modules: Sequence[str], *, collect: bool) -> Preloaded:
    """Import the modules in order, and ours; blocks for as long as they take.

    Args:
        modules: Their names.
        collect: Let go of what the imports left unreachable. It takes 100 ms after torch.
    """
    # Nothing of what importing allocates is garbage for long: looking for it only takes time.
    gc.disable()
    try:
        return _preload(modules)
    finally:
        if collect:
            gc.collect()
        # Objects that exist now are left out of collections, so that a child's first one does
        # not touch, and thereby copy, every page that it shares with the server.
        gc.freeze()
        gc.enable()


def _preload(modules: Sequence[str]) -> Preloaded:
    for module in OWN_MODULES:
        importlib.import_module(module)
    unfit: str | None = None
    for module in modules:
        extras = WITH_TORCH if module == "torch" else ()
        for name in (module, *extras):
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - user code: anything may come
                return Preloaded(failed=_failure(name, error))
        if module == "torch":
            _give_up_reverse_dns()
            register_shm_backend()
        unfit = unfit or _why_unfit(module)
    _leave_finalizers_to_the_server()
    return Preloaded(unfit=unfit)


def _leave_finalizers_to_the_server() -> None:
    """What was made here is not a worker's to clear away when it exits.

    It could be wrong (a temporary folder that all workers use), and is slow: torch takes its
    operator libraries apart by finalizers, 30 ms and 8,000 page copies in each worker.
    """
    finalizers = list(weakref.finalize._registry)  # type: ignore[attr-defined]  # noqa: SLF001
    for finalizer in finalizers:
        finalizer.atexit = False


def _give_up_reverse_dns() -> None:
    from phalanx.worker.reverse_dns import give_up_reverse_dns  # noqa: PLC0415 - imports torch

    give_up_reverse_dns()


def _failure(module: str, error: BaseException) -> PreloadFailed:
    return PreloadFailed(
        module=module,
        type_name=type(error).__qualname__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _why_unfit(module: str) -> str | None:
    """Say how importing `module` broke the rules of forking, if it did."""
    with contextlib.suppress(OSError):
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only their number
        if threads > 1:
            return f"importing {module!r} started {threads - 1} thread(s)"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"importing {module!r} initialised CUDA"
    return None

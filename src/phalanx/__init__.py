"""Phalanx starts, watches, heals and coordinates the workers of distributed PyTorch programs.

Names only: each is imported when it is first used, so that ``import phalanx`` costs nothing
and our own processes load no more than they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.launcher.api import prewarm, start_processes
    from phalanx.tensors.sync.shm.backend import register_shm_backend
    from phalanx.values.context import RunResult, SubprocessContext, get_context
    from phalanx.values.errors import (
        AgentLostError,
        CallMismatchError,
        GroupError,
        GroupTimeoutError,
        GroupUnsupportedError,
        NotALauncherError,
        NotAWorkerError,
        PayloadError,
        PeerLostError,
        PhalanxError,
        PortInUseError,
        RunDirectoryError,
        RunStoppedError,
        SpecError,
        StoreClosedError,
        StoreError,
        StoreFullError,
        StoreTimeoutError,
        SynchronizeError,
        SynchronizeTimeoutError,
        TensorError,
        WorkerFailedError,
    )
    from phalanx.values.failures import Exited, Failure, Signaled

__version__ = "0.1.0"

_HOMES = {
    "phalanx.launcher.api": ("prewarm", "start_processes"),
    "phalanx.values.context": ("RunResult", "SubprocessContext", "get_context"),
    "phalanx.values.errors": (
        "AgentLostError",
        "CallMismatchError",
        "GroupError",
        "GroupTimeoutError",
        "GroupUnsupportedError",
        "NotALauncherError",
        "NotAWorkerError",
        "PayloadError",
        "PeerLostError",
        "PhalanxError",
        "PortInUseError",
        "RunDirectoryError",
        "RunStoppedError",
        "SpecError",
        "StoreClosedError",
        "StoreError",
        "StoreFullError",
        "StoreTimeoutError",
        "SynchronizeError",
        "SynchronizeTimeoutError",
        "TensorError",
        "WorkerFailedError",
    ),
    "phalanx.values.failures": ("Exited", "Failure", "Signaled"),
    "phalanx.tensors.sync.shm.backend": ("register_shm_backend",),
}

_MODULES = ("errors", "events", "failures")
"""Modules that people may name as a whole: what ``events()`` yields, and what is raised."""

__all__ = [
    "AgentLostError",
    "CallMismatchError",
    "Exited",
    "Failure",
    "GroupError",
    "GroupTimeoutError",
    "GroupUnsupportedError",
    "NotALauncherError",
    "NotAWorkerError",
    "PayloadError",
    "PeerLostError",
    "PhalanxError",
    "PortInUseError",
    "RunDirectoryError",
    "RunResult",
    "RunStoppedError",
    "Signaled",
    "SpecError",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreTimeoutError",
    "SubprocessContext",
    "SynchronizeError",
    "SynchronizeTimeoutError",
    "TensorError",
    "WorkerFailedError",
    "get_context",
    "prewarm",
    "register_shm_backend",
    "start_processes",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    import importlib  # noqa: PLC0415 - not needed before

    if name in _MODULES:
        return importlib.import_module(f"phalanx.values.{name}")
    for module, names in _HOMES.items():
        if name in names:
            value: object = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Offer the public names to completion."""
    return [*__all__, "__version__"]

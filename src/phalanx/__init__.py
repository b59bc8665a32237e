"""Phalanx starts, watches, heals and coordinates the workers of distributed PyTorch programs.

Names only: each is imported when it is first used, so that ``import phalanx`` costs nothing
and our own processes load no more than they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.api import prewarm, start_processes
    from phalanx.context import RunResult, SubprocessContext, get_context
    from phalanx.errors import (
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
    from phalanx.failures import Exited, Failure, Signaled
    from phalanx.sync.shm.backend import register_shm_backend

__version__ = "0.1.0"

_HOMES = {
    "phalanx.api": ("prewarm", "start_processes"),
    "phalanx.context": ("RunResult", "SubprocessContext", "get_context"),
    "phalanx.errors": (
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
    "phalanx.failures": ("Exited", "Failure", "Signaled"),
    "phalanx.sync.shm.backend": ("register_shm_backend",),
}

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

    for module, names in _HOMES.items():
        if name in names:
            value: object = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Offer the public names to completion."""
    return [*__all__, "__version__"]

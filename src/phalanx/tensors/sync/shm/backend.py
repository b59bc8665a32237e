"""The backend named ``shm``: whether there is one here, its registration with torch.

Imports torch only when it is called, so that it can be imported while torch is.
"""

from __future__ import annotations

import platform
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from phalanx.system import kernel
from phalanx.values.errors import GroupUnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

NAME = "shm"


def why_unsupported() -> str | None:
    """Say why this system can have no `shm` group; None if it can."""
    if sys.platform != "linux":
        return f"it needs Linux, not {sys.platform}"
    if platform.machine() != "x86_64":
        return f"it relies on the memory order of x86-64, which {platform.machine()} lacks"
    if sys.maxsize < 2**32:
        return "it needs a 64-bit Python"
    if not kernel.HAS_PIDFD:
        return "this system has no pidfds, by which ranks watch each other"
    return None


def cpu_backend(num_nodes: int) -> str:
    """Return the backend that "auto" takes for CPU tensors on that many machines."""
    return NAME if num_nodes == 1 and why_unsupported() is None else "gloo"


def register_shm_backend() -> None:
    """Make ``init_process_group("shm")`` work in this process. Safe to call again.

    Workers of Phalanx have it already. Costs some microseconds once torch is imported.
    """
    import torch.distributed as dist  # noqa: PLC0415 - only where it is used

    if not dist.is_available():
        return
    # Not through `dist`, which may still be being imported when a worker calls.
    from torch.distributed.distributed_c10d import Backend  # noqa: PLC0415 - as it says

    if NAME not in Backend.backend_list:
        Backend.register_backend(NAME, make_group, devices=["cpu"])


def make_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Make a rank's group; what `torch.distributed` calls. Blocks until every rank is there.

    Raises:
        GroupUnsupportedError: This system has no `shm`, or the ranks can't share memory.
    """
    reason = why_unsupported()
    if reason is not None:
        raise GroupUnsupportedError(
            f'there is no shm backend here: {reason}; use init_process_group("gloo")'
        )
    from phalanx.tensors.sync.shm.group import ShmGroup  # noqa: PLC0415 - only where it is used

    return ShmGroup(store, rank, size, timeout)

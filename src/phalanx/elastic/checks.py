"""What can be told to be wrong before anything is started."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


def check_ranks(by_rank: Mapping[int, object], nprocs: int, what: str) -> None:
    """Check that a mapping has the local ranks as its keys.

    Raises:
        RuntimeError: It has not.
    """
    expected = set(range(nprocs))
    if set(by_rank) != expected:
        raise RuntimeError(
            f"{what} must have the local ranks {sorted(expected)} as keys, one for each entry of "
            f"args, not {sorted(by_rank)}"
        )


def check_program(program: str, environment: Mapping[str, str]) -> None:
    """Say what the kernel would say of a program.

    Raises:
        FileNotFoundError: There is none of this name.
        PermissionError: It may not be executed.
    """
    if os.path.dirname(program):  # noqa: PTH120 - a name without a folder is looked up in PATH
        found, executable = Path(program).exists(), os.access(program, os.X_OK)
    else:
        path = os.pathsep.join(os.get_exec_path(environment))
        found = executable = shutil.which(program, path=path) is not None
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    if not executable:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), program)

"""Starts a fork server's process. Standard library only: it is the agent's first act."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING

from phalanx.system import interpreter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def spawn_fork_server(
    executable: str,
    flags: Sequence[str],
    preload: Sequence[str],
    module_path: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[int, socket.socket]:
    """Start a fork server; return its pid and our end of its socket.

    OpenBLAS starts threads when it is loaded, unless it is told to use one; workers set
    their thread counts by call.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        config = {
            "preload": list(preload),
            "module_path": list(module_path),
            "agent_pid": os.getpid(),
        }
        command = interpreter.command(
            executable,
            tuple(flags),
            "phalanx.worker.forkserver.__main__",
            str(theirs.fileno()),
            json.dumps(config),
        )
        environment = {**environment, "OPENBLAS_NUM_THREADS": "1"}
        pid = os.posix_spawn(executable, command, environment)
    return pid, ours

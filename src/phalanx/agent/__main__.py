"""Entry of the agent's process.

The first fork server is started before anything else is imported: its `import torch` is what
a cold start waits for, and it runs on another core meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from phalanx.agent.spawn import spawn_fork_server


def main(argv: list[str]) -> None:
    """Serve one launcher.

    Args:
        argv: The number of the listening socket's descriptor, the launcher's pid, the key
            of the fork server to start at once, and its module search path (both JSON).
    """
    os.setsid()  # Ctrl-C in the terminal is for the launcher alone, which decides
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    listener_fd, launcher_pid, key_json, module_path = int(argv[0]), int(argv[1]), *argv[2:]
    key = json.loads(key_json)
    early = spawn_fork_server(
        key["executable"], key["flags"], key["preload"], json.loads(module_path), os.environ
    )

    from phalanx.agent.agent import run_agent  # noqa: PLC0415 - see above

    run_agent(listener_fd, launcher_pid, key_json, early)


if __name__ == "__main__":
    main(sys.argv[1:])

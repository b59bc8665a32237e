"""Entry of the fork server's process: preload, serve, and in each child do the job."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import NoReturn

from phalanx.system import kernel
from phalanx.wire.forking import (
    ForkServerOrder,
    MakeSuccessor,
    MakeWorker,
    ServerReady,
    ServerStarted,
)
from phalanx.wire.frames import Channel
from phalanx.worker.forkserver.preload import preload
from phalanx.worker.forkserver.server import ForkServer, Job


def main(argv: list[str]) -> None:
    """Serve the agent.

    Args:
        argv: The number of the socket's descriptor, and a JSON object with ``preload``,
            ``module_path`` and ``agent_pid``.
    """
    config = json.loads(argv[1])
    kernel.die_with_parent(config["agent_pid"])  # while importing, nobody looks at the socket
    # Blocked, not ignored: a child has them blocked too until it has its own dispositions, so a
    # SIGTERM that is meant for a worker a moment after its fork waits for it and is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    kernel.become_subreaper()
    agent_pidfd = kernel.open_pidfd(config["agent_pid"])
    sys.path[:] = config["module_path"]
    channel: Channel[ForkServerOrder] = Channel(socket.socket(fileno=int(argv[0])), ForkServerOrder)
    _serve(channel, agent_pidfd, config["preload"])
    os._exit(0)  # taking torch apart would only take time


def _serve(channel: Channel[ForkServerOrder], agent_pidfd: int | None, modules: list[str]) -> None:
    """Preload and serve; in a child that is to succeed the server, once more from the start."""
    is_successor = False
    while True:
        channel.send(ServerStarted(pid=os.getpid()))
        # Nobody waits for a successor: it can take the time to do it well.
        outcome = preload(modules, collect=is_successor)
        if is_successor:
            kernel.collapse_memory()
        if outcome.failed is not None:
            channel.send(outcome.failed)
            return
        # From here on the loop watches the agent itself. Before the agent hears of it: it may
        # then let the server go that this one succeeds, its parent.
        kernel.outlive_parent()
        channel.send(ServerReady(unfit=outcome.unfit))
        job = ForkServer(channel, agent_pidfd).serve()
        if job is None:
            return
        if not isinstance(job.order, MakeSuccessor):
            _become_child(job)
        channel, agent_pidfd, modules = _become_successor(job, job.order)
        is_successor = True


def _become_successor(
    job: Job, order: MakeSuccessor
) -> tuple[Channel[ForkServerOrder], int | None, list[str]]:
    """Turn a forked child into a fork server that will have imported more."""
    keep = {0, 1, 2, *job.fds}
    if job.agent_pidfd is not None:
        keep.add(job.agent_pidfd)
    kernel.close_all_fds(keep)
    kernel.die_with_parent(job.server_pid)
    kernel.become_subreaper()
    channel: Channel[ForkServerOrder] = Channel(socket.socket(fileno=job.fds[0]), ForkServerOrder)
    return channel, job.agent_pidfd, list(order.preload)


def _become_child(job: Job) -> NoReturn:
    from phalanx.worker import bootstrap  # noqa: PLC0415 - preloaded, and only a child needs it

    if isinstance(job.order, MakeWorker):
        bootstrap.run_forked_worker(job.order, job.fds, job.server_pid)
    assert not isinstance(job.order, MakeSuccessor)  # noqa: S101 - see the caller
    bootstrap.run_forked_store_host(job.order, job.fds, job.server_pid)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Hosts the store of one generation: a TCPStore on the socket that the agent keeps.

It runs in a process of its own, so that the agent needs no torch, and so that a generation's
store ends with it: the next one never reads an address of a fallen worker.
"""

from __future__ import annotations

import signal
import socket
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist


def host_store(listener_fd: int, master_addr: str, master_port: int) -> NoReturn:
    """Serve until killed.

    Args:
        listener_fd: A bound and listening TCP socket; owned from now on.
        master_addr: The address that it is bound to.
        master_port: Its port.
    """
    socket.socket(fileno=listener_fd).detach()  # check that it is one
    store = dist.TCPStore(
        master_addr,
        master_port,
        None,
        is_master=True,
        timeout=timedelta(minutes=30),
        wait_for_workers=False,
        master_listen_fd=listener_fd,
    )
    while store:
        signal.pause()
    raise AssertionError("unreachable")

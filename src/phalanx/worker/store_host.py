"""Hosts the store of one generation: a TCPStore on the socket that the agent keeps.

It runs in a process of its own, so that the agent needs no torch, and so that a generation's
store ends with it: the next one never reads an address of a fallen worker.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from phalanx.system import kernel


def host_store(listener_fd: int, master_addr: str, master_port: int) -> NoReturn:
    """Serve until killed.

    Args:
        listener_fd: A bound and listening TCP socket; owned from now on.
        master_addr: The address that it is bound to.
        master_port: Its port.
    """
    socket.socket(fileno=listener_fd).detach()  # check that it is one
    store = open_store(listener_fd, master_addr, master_port)
    while store:
        signal.pause()
    raise AssertionError("unreachable")


def open_store(listener_fd: int, master_addr: str, master_port: int) -> dist.TCPStore:
    """Open the store, by libuv where that can take a socket over.

    It can't in torch 2.6. The older server can, everywhere, and workers can't tell the two
    apart: clients speak the same to both.
    """
    make = functools.partial(
        dist.TCPStore,
        master_addr,
        master_port,
        None,
        is_master=True,
        timeout=timedelta(minutes=30),
        wait_for_workers=False,
        master_listen_fd=listener_fd,
    )
    try:
        with _hold_back_errors():
            return make()
    except NotImplementedError:  # raised before the descriptor is touched
        return make(use_libuv=False)


@contextlib.contextmanager
def _hold_back_errors() -> Iterator[None]:
    """Keep what native code prints off standard error, unless something else went wrong.

    Torch's C++ prints that it can't, with advice for users, before Python can decide.
    """
    held = kernel.open_anonymous_file("phalanx-store-errors")
    own = os.dup(2)
    os.dup2(held, 2)
    try:
        yield
    except NotImplementedError:
        os.ftruncate(held, 0)
        raise
    finally:
        os.dup2(own, 2)
        os.lseek(held, 0, os.SEEK_SET)
        while text := os.read(held, 1 << 16):
            os.write(2, text)
        os.close(held)
        os.close(own)

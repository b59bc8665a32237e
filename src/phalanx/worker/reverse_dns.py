"""Has torch's sockets give up reverse DNS, in a fork server and so in all its forks.

torch.distributed (c10d) asks for the name of each address that it connects to, only to put it
into its log. For 127.0.0.1, which it sees as ``::ffff:127.0.0.1``, no hosts file has an answer,
so every connection of every worker waits for the name server; and when that loses a packet,
for the resolver's timeout: starts that take 5 s now and then.

c10d stops asking, for the rest of the process, once an answer was an error. So one is brought
about here: a connection with no descriptor left for the resolver's socket.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

_GREETING_LENGTH = 10
"""Bytes: an order and a magic number, then the order to send a nonce back, and the nonce."""
_NONCE_LENGTH = 4
_PATIENCE_S = 2.0
"""The child outlives a parent that was killed by no more than this."""


def give_up_reverse_dns() -> None:
    """Make c10d's one reverse lookup fail, so that it never does another. Takes some 10 ms."""
    if not dist.is_available():
        return
    # The resolver reads its configuration now, not while it can't: it would keep defaults.
    socket.getaddrinfo("localhost", 0)
    with (
        _a_store_that_answers_one_ping() as port,
        _without_standard_error(),
        _one_more_descriptor(),
        contextlib.suppress(dist.DistError, RuntimeError),
    ):
        dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(milliseconds=1))


@contextlib.contextmanager
def _a_store_that_answers_one_ping() -> Iterator[int]:
    """Listen in a child process, as this one has no descriptor left for an accepted connection.

    It has to answer: to a closed port, or one that hangs up, c10d comes back a second later, and
    for a mute one it waits for ever.

    Yields:
        The port.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if child == 0:
            try:
                _answer_one_ping(listener)
            finally:
                os._exit(0)
        try:
            yield listener.getsockname()[1]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _answer_one_ping(listener: socket.socket) -> None:
    """Greet a client of a TCPStore as its server does: what follows its 6th byte comes back."""
    listener.settimeout(_PATIENCE_S)
    connection, _ = listener.accept()
    connection.settimeout(_PATIENCE_S)
    greeting = b""
    while len(greeting) < _GREETING_LENGTH:
        received = connection.recv(_GREETING_LENGTH - len(greeting))
        if not received:
            return
        greeting += received
    connection.sendall(greeting[-_NONCE_LENGTH:])


@contextlib.contextmanager
def _one_more_descriptor() -> Iterator[None]:
    """Allow this process one more open file than it has."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def _without_standard_error() -> Iterator[None]:
    """c10d warns about what is done to it."""
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)

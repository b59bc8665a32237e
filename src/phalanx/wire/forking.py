"""What agent and fork server say to each other: processes to make, processes that ended."""

from __future__ import annotations

from typing import TypeAlias

from phalanx.values.failures import Exit
from phalanx.values.spec import ProcessImage, WorkerSpec
from phalanx.wire.messages import Message

# ── agent → fork server ──────────────────────────────────────────────────────────────────


class MakeWorker(Message, frozen=True, kw_only=True):
    """Make a worker's process.

    fds: its end of the worker socket, standard output, standard error, the control page,
    the payload, the file for native stacks, and standard input if it has one.
    """

    ticket: int
    worker: WorkerSpec
    image: ProcessImage
    environment: dict[str, str]
    fresh_interpreter: bool
    has_stdin: bool = False


class MakeStoreHost(Message, frozen=True, kw_only=True):
    """Make the process that hosts a generation's store.

    fds: the listening socket, the file for its standard error.
    """

    ticket: int
    tag: str
    master_addr: str
    master_port: int
    image: ProcessImage
    fresh_interpreter: bool


class SignalChild(Message, frozen=True, kw_only=True):
    """Send a signal to a child that has not been reaped (where there are no pidfds)."""

    ticket: int
    signum: int


class Sweep(Message, frozen=True, kw_only=True):
    """Kill what the workers with this tag prefix left behind; answered by Swept."""

    tag: str


class MakeSuccessor(Message, frozen=True, kw_only=True):
    """Fork a fork server that imports more; fds: its end of the agent's socket."""

    preload: tuple[str, ...]


ForkServerOrder: TypeAlias = MakeWorker | MakeStoreHost | SignalChild | Sweep | MakeSuccessor

# ── fork server → agent ──────────────────────────────────────────────────────────────────


class ServerStarted(Message, frozen=True, kw_only=True):
    """The server's process exists; its preload begins."""

    pid: int


class ServerReady(Message, frozen=True, kw_only=True):
    """The preload is done.

    Attributes:
        unfit: Why workers can't be forked from it (they are started afresh then), or None.
    """

    unfit: str | None = None


class PreloadFailed(Message, frozen=True, kw_only=True):
    """A module that should be preloaded could not be imported; the server ends."""

    module: str
    type_name: str
    message: str
    traceback: str


class ChildMade(Message, frozen=True, kw_only=True):
    """A process exists; fds: its pidfd, where there are pidfds."""

    ticket: int
    pid: int


class ChildFailed(Message, frozen=True, kw_only=True):
    """A process could not be made."""

    ticket: int
    message: str


class ChildExited(Message, frozen=True, kw_only=True):
    """A process ended. Its pid stays taken until this was sent."""

    ticket: int
    exit: Exit


class Swept(Message, frozen=True, kw_only=True):
    """Nothing with this tag prefix is left (or, after a bounded wait, `left` processes)."""

    tag: str
    left: int = 0


ForkServerReport: TypeAlias = (
    ServerStarted | ServerReady | PreloadFailed | ChildMade | ChildFailed | ChildExited | Swept
)

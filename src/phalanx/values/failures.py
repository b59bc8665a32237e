"""How a worker ended, and the record of a failure: values only, no IO.

A failure is a record, not a number. Several ranks usually fail together when one does:
its peers lose their connections, and those that still run are stopped. `by_cause` puts
the failure that began it first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec


class Exited(msgspec.Struct, frozen=True, tag="exited", tag_field="kind"):
    """The process ended by itself, with this exit code (0–255)."""

    code: int

    def __str__(self) -> str:
        """As a person says it."""
        return f"exit code {self.code}"


class Signaled(msgspec.Struct, frozen=True, tag="signaled", tag_field="kind"):
    """The process was ended by this signal."""

    signum: int
    name: str = ""

    def __str__(self) -> str:
        """As a person says it."""
        return self.name or f"signal {self.signum}"


Exit: TypeAlias = Exited | Signaled
"""How a process ended: never a bare integer."""

Cause: TypeAlias = Literal["exception", "exit", "signal", "startup", "hang", "helper"]
"""What kind of thing a failure was.

``exception``: the user's function raised. ``exit``: the process left with a non-zero code
and no exception was seen. ``signal``: a signal ended it. ``startup``: it never reached the
user's code. ``hang``: it showed no sign of life for ``hang_timeout``, and was killed.
``helper``: a process of Phalanx' own ended that the generation needs; its rank is -1.
"""

Kind: TypeAlias = Literal["primary", "effect", "stopped"]
"""``primary``: began by itself. ``effect``: lost a connection because a peer had died.
``stopped``: ended because Phalanx stopped it."""

_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe"
    r"|connectFullMesh failed|Socket (Timeout|closed)|Read timeout"
    r"|remote process exited or there was a network error|NCCL communicator was aborted"
    r"|Application timeout caused pair closure|failed to recv, got 0 bytes"
    r"|recvValue failed|sendBytes failed|PeerLostError",
    re.IGNORECASE,
)
"""How the loss of a peer reads in Gloo's, NCCL's and TCPStore's errors, and in one of ours that
came through torch's C++ (from a future, under DDP)."""

_LOST_PEER_TYPES = frozenset(
    {
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "EOFError",
        "PeerLostError",
    }
)

_KIND_ORDER: dict[Kind, int] = {"primary": 0, "effect": 1, "stopped": 2}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's failure.

    Attributes:
        rank: Global rank; -1 when it belongs to no single rank (a helper
            that ended).
        node_rank: Node that the rank ran on.
        pid: Process id, or None when there was no process yet.
        generation: Generation (0 is the first) in which it happened.
        cause: See `Cause`.
        kind: See `Kind`.
        exit: How the process ended, once that is known.
        type_name: Qualified name of the exception's class, where there was one.
        message: The exception's text, or a sentence on what happened.
        traceback: The traceback as Python prints it, from the worker; of a hang, the stack that
            the rank was in.
        stacks: Of a hang: the stacks that all ranks were in, equal ones together.
        native_stack: What faulthandler wrote when a fatal signal came.
        log_tail: The last lines that the rank printed.
        at: Seconds since the epoch.
        retry: False where starting again can't help (it failed by itself before it
            reached user code, or its return value can't travel).
        exception: The pickled exception, when it survives the journey.
    """

    rank: int
    cause: Cause
    message: str
    node_rank: int = 0
    pid: int | None = None
    generation: int = 0
    kind: Kind = "primary"
    exit: Exit | None = None
    type_name: str | None = None
    traceback: str | None = None
    stacks: str = ""
    native_stack: str | None = None
    log_tail: str = ""
    at: float = 0.0
    retry: bool = True
    exception: bytes | None = None

    def headline(self) -> str:
        """One line that says what happened, without saying where."""
        if self.type_name is not None:
            first_line = self.message.partition("\n")[0]
            return f"{self.type_name}: {first_line}" if first_line else self.type_name
        return self.message


def by_cause(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Order failures: primary ones, effects, those that we stopped; each as they were seen."""
    return tuple(sorted(failures, key=lambda failure: _KIND_ORDER[failure.kind]))


def kind_of(type_names: Iterable[str], message: str) -> Kind:
    """Tell the effect of a peer's death from a failure of a rank's own.

    Args:
        type_names: Plain names of the exception's class and, where they are known, its bases.
        message: Its text.
    """
    names = frozenset(type_names)
    if names & _LOST_PEER_TYPES or ("RuntimeError" in names and _LOST_PEER.search(message)):
        return "effect"
    return "primary"

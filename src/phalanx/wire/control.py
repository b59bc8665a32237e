"""What a visitor, a command in another process, and the agent of a run say to each other.

A visitor connects to the agent's own socket, which the run's ``control.json`` names. It says
`Visit` first, may then ask for little, gets an `Answered` for each wish, and comes and goes:
unlike a launcher's, its end ends nothing.
"""

from __future__ import annotations

import socket
import struct
from os import getuid
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from phalanx.wire.messages import KillRun, LauncherMessage, Message, StopRun

if TYPE_CHECKING:
    from pathlib import Path

CONTROL_MODE = 0o600
"""Mode of ``control.json``: nobody else needs to know where the agent listens."""


class Visit(Message, frozen=True, kw_only=True):
    """First message of a visitor."""

    protocol: int = 1


class KillRank(Message, frozen=True, kw_only=True):
    """End one worker by SIGKILL; the run treats that as any failure."""

    run_id: str
    rank: int


class ShowStacks(Message, frozen=True, kw_only=True):
    """Say where the workers are, or one of them."""

    run_id: str
    rank: int | None = None


class Answered(Message, frozen=True, kw_only=True):
    """A wish is being carried out, or there is a problem and nothing was done.

    Attributes:
        problem: What is in the way.
        stacks: Where the workers are, by rank, if that was the wish.
    """

    problem: str | None = None
    stacks: dict[int, str] | None = None


Wish: TypeAlias = StopRun | KillRun | KillRank | ShowStacks
VisitorMessage: TypeAlias = Visit | StopRun | KillRun | KillRank | ShowStacks
Request: TypeAlias = LauncherMessage | VisitorMessage
"""Whatever may come in at the agent's socket."""


class ControlFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``control.json``: where a living run's agent listens, and for whom it works.

    Attributes:
        address: Name of the abstract socket, without the zero byte.
        launcher_pid: The process that started the run.
        agent_pid: The agent itself.
    """

    address: str
    launcher_pid: int
    agent_pid: int


def read_control(path: Path) -> ControlFile | None:
    """Return what a run's ``control.json`` says; None where there is none, or no sound one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ControlFile)
    except (OSError, msgspec.MsgspecError):
        return None


def is_own_user(sock: socket.socket) -> bool:
    """Ask the kernel whether this user is at the other end."""
    if not hasattr(socket, "SO_PEERCRED"):  # elsewhere the socket lies in a private folder
        return True
    size = struct.calcsize("3i")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == getuid())

"""What the processes say to each other: values only.

Conversations, each over a stream of frames (`phalanx.wire.frames`):

- launcher ↔ agent: runs, their events, results and console output;
- worker → agent: its own progress, and for `breakpoint()` the answers back;
- agent ↔ fork server: in `phalanx.wire.forking`;
- with the tensor store: in `phalanx.tensors.store.messages`;
- visitors ↔ agent: in `phalanx.wire.control`.

"fds:" in a docstring lists the file descriptors that travel with the message.
"""

from __future__ import annotations

import signal
from typing import Literal, TypeAlias

import msgspec

from phalanx.values.events import EndState, Event
from phalanx.values.failures import Failure
from phalanx.values.spec import LaunchSpec, ProcessImage


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """What all messages have in common."""


# ── launcher → agent ─────────────────────────────────────────────────────────────────────


class Hello(Message, frozen=True, kw_only=True):
    """First message of a connection: which protocol it speaks."""

    protocol: int = 1


class ForkServerKey(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether a warm fork server can serve a launch."""

    executable: str
    flags: tuple[str, ...]
    preload: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


class Prewarm(Message, frozen=True, kw_only=True):
    """Have a fork server ready."""

    key: ForkServerKey
    image: ProcessImage


ConsoleKind: TypeAlias = Literal["descriptor", "relay"]


class ConsoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where console output of the workers goes, and how it may look.

    Attributes:
        out: ``descriptor``: straight to the launcher's own, which travels along; ``relay``:
            through the launcher's `sys.stdout` object (a notebook, a captured test).
        err: The same for `sys.stderr`.
        out_is_terminal: Whether escape sequences make sense there.
        err_is_terminal: The same for `sys.stderr`.
        colour: Whether prefixes may be coloured.
    """

    out: ConsoleKind
    err: ConsoleKind
    out_is_terminal: bool = False
    err_is_terminal: bool = False
    colour: bool = False


class Launch(Message, frozen=True, kw_only=True):
    """Start a run.

    fds: the payload (function and arguments: a file, or a `wire.parcel` of that file and of
    the descriptors that belong to the arguments), the bound and listening socket of the group's
    store, the launcher's standard input if `spec.stdin_ranks` names somebody, then the
    console's descriptors (standard output, standard error) where `ConsoleSpec` says
    ``descriptor``.
    """

    spec: LaunchSpec
    key: ForkServerKey
    image: ProcessImage
    console: ConsoleSpec


class StopRun(Message, frozen=True, kw_only=True):
    """Stop a run; its workers have `grace_s` seconds (None: as the launch said)."""

    run_id: str
    grace_s: float | None = None
    signum: int = signal.SIGTERM.value
    reason: str = "shutdown"


class KillRun(Message, frozen=True, kw_only=True):
    """End a run now."""

    run_id: str
    reason: str = "kill"


class PassSignal(Message, frozen=True, kw_only=True):
    """Pass a signal on to the workers that catch it; if none does, it is a stop."""

    run_id: str
    signum: int


class RestartRun(Message, frozen=True, kw_only=True):
    """Replace a run's generation by a new one."""

    run_id: str
    grace_s: float | None = None


class ConsoleTaken(Message, frozen=True, kw_only=True):
    """The launcher has written this much of what was relayed."""

    run_id: str
    stream: Literal["out", "err"]
    num_bytes: int


class InputLine(Message, frozen=True, kw_only=True):
    """The answer to `InputWanted`; an empty string means end of input."""

    run_id: str
    rank: int
    text: str


class AskForStacks(Message, frozen=True, kw_only=True):
    """Say where the workers are; answered by StacksFound with the same `ticket`."""

    run_id: str
    ticket: int


class OpenStore(Message, frozen=True, kw_only=True):
    """Converse with a run's tensor store (`tensors.store.messages`); fds: the agent's end."""

    run_id: str
    pid: int


class CloseStore(Message, frozen=True, kw_only=True):
    """A run that has ended is of no interest any more: its tensors can go."""

    run_id: str


LauncherMessage: TypeAlias = (
    Hello
    | Prewarm
    | Launch
    | StopRun
    | KillRun
    | PassSignal
    | RestartRun
    | ConsoleTaken
    | InputLine
    | AskForStacks
    | OpenStore
    | CloseStore
)

# ── agent → launcher ─────────────────────────────────────────────────────────────────────


class Happened(Message, frozen=True, kw_only=True):
    """An event of a run."""

    run_id: str
    event: Event


class Result(Message, frozen=True, kw_only=True):
    """What a rank returned, pickled; fds: one holding it when `data` is None."""

    run_id: str
    rank: int
    data: bytes | None


class ConsoleText(Message, frozen=True, kw_only=True):
    """Output of workers for the launcher's `sys.stdout` or `sys.stderr` object."""

    run_id: str
    stream: Literal["out", "err"]
    data: bytes


class InputWanted(Message, frozen=True, kw_only=True):
    """A debugger on a rank wants a line from the launcher's standard input."""

    run_id: str
    rank: int
    prompt: str


class Prompt(Message, frozen=True, kw_only=True):
    """A rank wants to read from the terminal (answer: InputLine without text), or has read."""

    run_id: str
    rank: int
    opens: bool


class StacksFound(Message, frozen=True, kw_only=True):
    """Where the workers are, by rank: stacks as text, the innermost call last."""

    run_id: str
    ticket: int
    stacks: dict[int, str]


class RunFinished(Message, frozen=True, kw_only=True):
    """The last word on a run: everything it printed and reported was sent before."""

    run_id: str
    state: EndState
    restart_count: int
    duration_s: float
    failures: tuple[Failure, ...]


AgentMessage: TypeAlias = (
    Happened | Result | ConsoleText | InputWanted | Prompt | StacksFound | RunFinished
)

# ── worker → agent ───────────────────────────────────────────────────────────────────────


class Entered(Message, frozen=True, kw_only=True):
    """The worker is about to call the user's function."""


class Returned(Message, frozen=True, kw_only=True):
    """The function returned; the value pickled, or in a file (fds: one) when `data` is None."""

    data: bytes | None


class Raised(Message, frozen=True, kw_only=True):
    """The function raised, or the worker failed before it."""

    failure: Failure


class Reported(Message, frozen=True, kw_only=True):
    """`context.report(**metrics)`."""

    metrics: dict[str, float | int | str | bool | None]


class StoreOpened(Message, frozen=True, kw_only=True):
    """The worker, or a fork of it, will converse with the tensor store; fds: the agent's end."""

    pid: int


class Remarked(Message, frozen=True, kw_only=True):
    """Something that a person should know about how the worker was started."""

    message: str


class DebuggerText(Message, frozen=True, kw_only=True):
    """Output of `context.breakpoint()`, for the console as it is."""

    text: str


class DebuggerInput(Message, frozen=True, kw_only=True):
    """`context.breakpoint()` wants a line; answered by InputLine."""

    prompt: str


class Turn(Message, frozen=True, kw_only=True):
    """It wants to read from the terminal (answer: InputLine without text), or has read."""

    begins: bool


WorkerMessage: TypeAlias = (
    Entered
    | Returned
    | Raised
    | Reported
    | StoreOpened
    | Remarked
    | DebuggerText
    | DebuggerInput
    | Turn
)

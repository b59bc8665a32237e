"""The agent's heart: an event loop, the launchers it listens to, the runs it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys

import msgspec

from phalanx.agent.connection import Connection
from phalanx.agent.consoles import Consoles
from phalanx.agent.forkservers import ForkServers
from phalanx.agent.run import Run
from phalanx.agent.tensors import RunTensors
from phalanx.agent.visitors import Visitors
from phalanx.system import kernel
from phalanx.values import events as ev
from phalanx.values.errors import FrameError
from phalanx.wire.control import KillRank, Request, ShowStacks, Visit, is_own_user
from phalanx.wire.messages import (
    AskForStacks,
    CloseStore,
    ConsoleTaken,
    ForkServerKey,
    Hello,
    InputLine,
    KillRun,
    Launch,
    LauncherMessage,
    OpenStore,
    PassSignal,
    Prewarm,
    RestartRun,
    StacksFound,
    StopRun,
)

PROTOCOL = 1


def run_agent(
    listener_fd: int, launcher_pid: int, key_json: str, early: tuple[int, socket.socket]
) -> None:
    """Serve until the launcher is gone.

    Args:
        listener_fd: A listening socket that the launcher made and has connected to.
        launcher_pid: The launcher, this process' parent.
        key_json: Key of the fork server that runs already.
        early: That server's pid and our end of its socket.
    """
    kernel.become_subreaper()
    _allow_many_files()
    loop = _new_loop()
    agent = Agent(loop, socket.socket(fileno=listener_fd), launcher_pid)
    agent.servers.take_over(msgspec.json.decode(key_json, type=ForkServerKey), *early)
    try:
        agent.open()
        loop.run_forever()
    finally:
        agent.die()


def _allow_many_files() -> None:
    """Each large value in a tensor store is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a limit below its hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _new_loop() -> asyncio.AbstractEventLoop:
    """Uvloop answers in half the time; plain asyncio does where it is missing."""
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Agent:
    """Accepts launchers of its own user, and keeps their runs."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, listener: socket.socket, launcher_pid: int
    ) -> None:
        """Keep what is needed; `open` starts to listen."""
        self._loop = loop
        self._listener = listener
        self._launcher_pid = launcher_pid
        self._runs: dict[str, Run] = {}
        self._tensors: dict[str, RunTensors] = {}
        self._connections: set[Connection[Request]] = set()
        self._visitors = Visitors(listener.getsockname(), launcher_pid, self._runs)
        self.servers = ForkServers(loop)
        self._consoles = Consoles(loop)

    def open(self) -> None:
        """Listen for launchers, and for the end of the one that started this process."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        self._loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        pidfd = kernel.open_pidfd(self._launcher_pid)
        if pidfd is not None:
            self._loop.add_reader(pidfd, self.die)
        if os.getppid() != self._launcher_pid:
            self.die()

    def die(self) -> None:
        """End at once, and everything with it: the fork servers follow."""
        for run in list(self._runs.values()):
            run.kill_now()
            self._visitors.disinvite(run)
        self.servers.end()
        os._exit(0)

    # ── launchers ────────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        if not is_own_user(sock):
            sock.close()
            return
        connection: Connection[Request] = Connection(
            self._loop,
            sock,
            Request,
            on_message=lambda message, fds: self._on_message(connection, message, fds),
            on_close=lambda error: self._on_close(connection, error),
        )
        self._connections.add(connection)

    def _on_close(self, connection: Connection[Request], error: FrameError | None) -> None:
        """A launcher hung up, or sent what is no message: its runs end, others go on."""
        self._connections.discard(connection)
        if error is not None:
            print(f"phalanx agent: a connection was closed: {error}", file=sys.stderr)  # noqa: T201
        if connection in self._visitors:
            self._visitors.forget(connection)
            return
        for run in list(self._runs.values()):
            if run.belongs_to(connection):
                run.feed(ev.KillRequested(reason="the launcher hung up"))
        if not self._connections:
            self.die()

    def _on_message(
        self, connection: Connection[Request], message: Request, fds: list[int]
    ) -> None:
        if isinstance(message, Visit):
            self._connections.discard(connection)
            self._visitors.welcome(connection)
        if connection in self._visitors:
            self._on_visitor(connection, message, fds)
        elif isinstance(message, Visit | KillRank | ShowStacks):
            self._hang_up(connection)
        else:
            self._on_launcher(connection, message, fds)

    def _on_visitor(
        self, connection: Connection[Request], message: Request, fds: list[int]
    ) -> None:
        for fd in fds:
            os.close(fd)
        self._visitors.on_message(connection, message, lambda: self._hang_up(connection))

    def _hang_up(self, connection: Connection[Request]) -> None:
        connection.close()
        self._on_close(connection, FrameError("it wants what is not for its kind"))

    def _on_launcher(
        self, connection: Connection[Request], message: LauncherMessage, fds: list[int]
    ) -> None:
        match message:
            case Hello():
                pass
            case Prewarm(key=key, image=image):
                server = self.servers.get(key, image)
                server.when_ready(lambda: self.servers.improve(key))
            case Launch():
                self._launch(connection, message, fds)
            case OpenStore(run_id=run_id, pid=pid):
                self._open_store(run_id, pid, *fds)
            case CloseStore(run_id=run_id):
                self._close_store(run_id)
            case _:
                run = self._runs.get(message.run_id)
                if run is not None:  # else it has ended meanwhile
                    _pass_on(run, message)

    def _launch(self, connection: Connection[Request], launch: Launch, fds: list[int]) -> None:
        run = Run(
            self._loop, self.servers, self._consoles, connection, launch, fds, self._on_finished
        )
        self._runs[run.spec.run_id] = run
        self._tensors[run.spec.run_id] = run.tensors
        self._visitors.invite(run)
        run.begin()

    def _on_finished(self, run: Run) -> None:
        """What it put is still there, until the launcher says that it has read enough."""
        del self._runs[run.spec.run_id]
        self._visitors.disinvite(run)
        run.tensors.store.end_run()

    def _open_store(self, run_id: str, pid: int, fd: int) -> None:
        if run_id in self._tensors:
            self._tensors[run_id].connect(fd, "the launcher", pid)
        else:  # it hears the end of the conversation
            os.close(fd)

    def _close_store(self, run_id: str) -> None:
        tensors = self._tensors.pop(run_id, None)
        if tensors is not None:
            tensors.close()

    def _on_sigterm(self) -> None:
        for run in list(self._runs.values()):
            run.stop("SIGTERM to the agent")


def _pass_on(
    run: Run,
    message: StopRun | KillRun | PassSignal | RestartRun | ConsoleTaken | InputLine | AskForStacks,
) -> None:
    match message:
        case StopRun(grace_s=grace_s, reason=reason, signum=signum):
            run.stop(reason, grace_s, signum)
        case KillRun(reason=reason):
            run.kill(reason)
        case PassSignal(signum=signum):
            run.pass_signal(signum)
        case RestartRun(grace_s=grace_s):
            grace_s = run.spec.grace_s if grace_s is None else grace_s
            run.feed(ev.RestartRequested(grace_s=grace_s))
        case ConsoleTaken(stream=stream, num_bytes=num_bytes):
            run.output.taken(stream, num_bytes)
        case InputLine(rank=rank, text=text):
            run.answer(rank, text)
        case AskForStacks(run_id=run_id, ticket=ticket):
            run.ask_for_stacks(
                lambda stacks: run.tell(StacksFound(run_id=run_id, ticket=ticket, stacks=stacks))
            )

"""One generation's processes: its workers and its store host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from phalanx.agent.records import record_of_helper
from phalanx.agent.worker import WorkerOwner, WorkerProcess, forget_error_file
from phalanx.system import kernel
from phalanx.values import events as ev
from phalanx.values.spec import error_file, worker_environment, worker_spec
from phalanx.wire.forking import MakeStoreHost

if TYPE_CHECKING:
    import asyncio

    from phalanx.agent.forkserver import ForkServer, NotMade
    from phalanx.agent.forkservers import ForkServers
    from phalanx.agent.output import RunOutput
    from phalanx.values.failures import Exit, Failure
    from phalanx.values.spec import LaunchSpec
    from phalanx.wire.messages import Launch

_SWEEP_POLL_S = 0.002
_SWEEP_PATIENCE_S = 3.0
_MAX_LAST_WORDS = 64 * 1024
_STORE = "The store of the group"


class StoreHost:
    """The process that hosts a generation's TCPStore."""

    def __init__(self, server: ForkServer, ticket: int, on_lost: Callable[[Failure], None]) -> None:
        """Keep what is needed; `start` makes the process."""
        self._server = server
        self._ticket = ticket
        self._on_lost = on_lost
        self._on_gone: Callable[[], None] | None = None
        self._pidfd: int | None = None
        self._pid: int | None = None
        self._last_words = kernel.open_anonymous_file("phalanx-store-host")
        self._ended = False

    def start(self, order: MakeStoreHost, listener: int) -> None:
        """Order the process; the descriptor is borrowed."""
        self._server.make(order, [os.dup(listener), os.dup(self._last_words)], self)

    def close(self, then: Callable[[], None]) -> None:
        """End it, and call back when it is gone: the next one must not meet it."""
        if self._ended:
            then()
            return
        if self._server.cancel(self._ticket):
            self._let_go()
            then()
            return
        self._on_gone = then
        self._server.insist(lambda: not self._ended)
        self.kill()

    def kill(self) -> None:
        """End it now."""
        if self._pidfd is not None:
            kernel.signal_pidfd(self._pidfd, signal.SIGKILL)
        elif self._pid is not None:
            self._server.signal(self._ticket, signal.SIGKILL)

    def on_made(self, pid: int, pidfd: int | None) -> None:
        """See `ProcessOwner`."""
        self._pid, self._pidfd = pid, pidfd
        if self._on_gone is not None:
            self.kill()

    def on_not_made(self, failure: NotMade) -> None:
        """See `ProcessOwner`."""
        how = f"could not be started: {failure.message}"
        self._end(record_of_helper(_STORE, self._pid, None, how=how))

    def on_exited(self, exit_: Exit) -> None:
        """See `ProcessOwner`."""
        words = os.pread(self._last_words, _MAX_LAST_WORDS, 0).decode(errors="replace")
        self._end(record_of_helper(_STORE, self._pid, exit_, last_words=words))

    def _end(self, record: Failure) -> None:
        self._let_go()
        if self._on_gone is not None:
            self._on_gone()
        else:
            self._on_lost(record)

    def _let_go(self) -> None:
        self._ended = True
        os.close(self._last_words)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResources:
    """What belongs to a run and outlives its generations. The descriptors are borrowed."""

    spec: LaunchSpec
    launch: Launch
    servers: ForkServers
    output: RunOutput
    payload: int
    listener: int
    stdin: int | None
    page_fd: int
    news: WorkerOwner


class GenerationOwner(Protocol):
    """Hears what happens in a generation."""

    def feed(self, event: ev.Event) -> None:
        """A fact for the lifecycle."""

    def feed_warning(self, message: str) -> None:
        """Something that a person should know."""


class Generation:
    """Starts the processes of a generation, and sees that nothing of it stays."""

    def __init__(
        self,
        run: RunResources,
        owner: GenerationOwner,
        number: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Keep what is needed; `open` and `start_worker` make processes."""
        self.number = number
        self.workers: dict[int, WorkerProcess] = {}
        self._run = run
        self._owner = owner
        self._loop = loop
        self._spec = run.spec
        self._tag = f"{run.spec.run_id}/{number}"
        self._store_host: StoreHost | None = None
        self._servers: list[ForkServer] = []
        self._gpus = kernel.visible_gpus(run.launch.image.environment)
        self._listening = False
        self._is_closing = False

    def open(self) -> None:
        """Start the store host, or wait until somebody wants one.

        Workers that are started again one by one share no process group; if they make one
        all the same, their first connection to the store tells. And where torch is not
        preloaded it may not be used, so a host, which has to import it, would be for nothing.
        """
        if self._spec.restart == "group" and "torch" in self._spec.preload:
            self._start_store_host()
        else:
            self._listening = True
            self._loop.add_reader(self._run.listener, self._on_store_contact)

    def start_worker(self, rank: int, restart_count: int) -> None:
        """Order one worker."""
        spec, launch = worker_spec(self._spec, rank, self.number, restart_count), self._run.launch
        server = self._server()
        worker = WorkerProcess(
            self._loop, server, spec, self._run.news, self._run.servers.new_ticket()
        )
        self.workers[rank] = worker
        forget_error_file(error_file(self._spec, spec))
        out, err = self._run.output.begin(rank, self.number)
        worker.start(
            launch.image,
            worker_environment(self._spec, spec, launch.image.environment, self._gpus),
            fresh_interpreter=self._spec.start_method == "spawn",
            out=out,
            err=err,
            page=self._run.page_fd,
            payload=self._run.payload,
            stdin=self._run.stdin if rank in self._spec.stdin_ranks else None,
        )

    def close(self, then: Callable[[], None]) -> None:
        """Every worker is gone: end the store host, sweep, drain; then call back."""
        self._close_ears()
        if self._store_host is None:
            self._sweep(then)
        else:
            self._store_host.close(lambda: self._sweep(then))

    def kill_rank(self, rank: int) -> str | None:
        """End one worker by SIGKILL; return what is in the way, or None."""
        problem = self.why_no_process(rank)
        if problem is None:
            self.workers[rank].signal(signal.SIGKILL)
        return problem

    def why_no_process(self, rank: int) -> str | None:
        """Return why a rank can't be asked for anything, or None."""
        size = self._spec.world_size
        if not 0 <= rank < size:
            return f"there is no rank {rank} among {size}: they are 0–{size - 1}"
        if rank not in self.workers or not self.workers[rank].exists:
            return f"rank {rank} has no process at the moment"
        return None

    def kill_now(self) -> None:
        """End everything without waiting."""
        self._close_ears()
        for worker in self.workers.values():
            worker.signal(signal.SIGKILL)
        if self._store_host is not None:
            self._store_host.kill()

    def release(self) -> None:
        """Let go of what is held."""
        self._close_ears()
        for worker in self.workers.values():
            worker.abandon()

    # ── inside ───────────────────────────────────────────────────────────────────────────

    def _server(self) -> ForkServer:
        server = self._run.servers.get(self._run.launch.key, self._run.launch.image)
        if server not in self._servers:
            self._servers.append(server)
            server.when_lost(self._on_helper_lost)
            if self.number == 0:
                server.when_ready(lambda: self._warn_if_unfit(server))
        return server

    def _warn_if_unfit(self, server: ForkServer) -> None:
        if server.unfit is not None:
            self._owner.feed_warning(
                f"{server.unfit}, so workers can't be forked and are started as fresh "
                "interpreters (slower). Leave the module out of preload=…, or import it "
                "inside the function"
            )

    def _start_store_host(self) -> None:
        server, launch = self._server(), self._run.launch
        ticket = self._run.servers.new_ticket()
        self._store_host = StoreHost(server, ticket, self._on_store_host_lost)
        # Not ``<generation>/…``: it is no worker, and must be sweepable with them all the same.
        order = MakeStoreHost(
            ticket=ticket,
            tag=f"{self._tag}/store",
            master_addr=self._spec.master_addr,
            master_port=self._spec.master_port,
            image=launch.image,
            fresh_interpreter=self._spec.start_method == "spawn",
        )
        self._store_host.start(order, self._run.listener)

    def _on_store_host_lost(self, record: Failure) -> None:
        # Later: if it could not be started, the workers' starts may fail and have more to say.
        self._loop.call_soon(self._on_helper_lost, record)

    def _on_helper_lost(self, record: Failure) -> None:
        if not self._is_closing:
            self._owner.feed(ev.HelperExited(failure=record))

    def _on_store_contact(self) -> None:
        self._stop_listening()
        self._start_store_host()
        self._owner.feed(ev.StoreContacted())

    def _close_ears(self) -> None:
        """What ends from now on is ended on purpose."""
        self._is_closing = True
        for server in self._servers:
            server.spare(self._on_helper_lost)
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._run.listener)

    def _sweep(self, then: Callable[[], None]) -> None:
        remaining = len(self._servers)

        def swept() -> None:
            nonlocal remaining
            remaining -= 1
            if remaining <= 0:
                self._sweep_bereaved(self._loop.time() + _SWEEP_PATIENCE_S, then)

        if not self._servers:
            swept()
        for server in self._servers:
            server.sweep(self._tag, swept)

    def _sweep_bereaved(self, until_s: float, then: Callable[[], None]) -> None:
        """If a fork server died, what it left came to this process."""
        died = any(server.gone for server in self._servers)
        clean = not died or self._run.servers.sweep_bereaved(self._tag)
        if clean or self._loop.time() > until_s:
            self._run.servers.close_retired()
            then()
        else:
            self._loop.call_later(_SWEEP_POLL_S, self._sweep_bereaved, until_s, then)

"""One run: feeds what happens to the lifecycle, and carries out what it orders.

This is the only place where a run's state is kept, and `feed` the only place where it
changes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from phalanx import lifecycle
from phalanx.agent.generation import Generation, RunResources
from phalanx.agent.hangs import HangWatch
from phalanx.agent.news import WorkerNews
from phalanx.agent.output import RunOutput
from phalanx.agent.passing import PassedSignals
from phalanx.agent.prompts import Prompts
from phalanx.agent.recorder import Recorder
from phalanx.agent.stacks import Roundup
from phalanx.agent.tensors import RunTensors
from phalanx.system import kernel
from phalanx.system.page import ControlPage, prepare
from phalanx.system.paths import RunPaths
from phalanx.values import commands as do
from phalanx.values import events as ev
from phalanx.values.failures import Failure, by_cause
from phalanx.wire.messages import Happened, RunFinished

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.agent.connection import Connection
    from phalanx.agent.consoles import Consoles
    from phalanx.agent.forkservers import ForkServers
    from phalanx.agent.worker import WorkerProcess
    from phalanx.wire.control import Request
    from phalanx.wire.messages import AgentMessage, Launch

_IDLE_S = 0.25
"""How long after a group's start its fork server may be improved: not in the way of its first
collective."""


class Run:
    """A run from its launch to its last word."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        servers: ForkServers,
        consoles: Consoles,
        launcher: Connection[Request],
        launch: Launch,
        fds: list[int],
        on_finished: Callable[[Run], None],
    ) -> None:
        """Take over a launch and its descriptors; `begin` starts it."""
        self.spec = launch.spec
        self._launch = launch
        self._servers = servers
        self._loop = loop
        self._launcher = launcher
        self._on_finished = on_finished
        self._payload, self._listener, *console_fds = fds
        self._stdin = console_fds.pop(0) if self.spec.stdin_ranks else None
        self._page_fd = kernel.open_anonymous_file("phalanx-page")
        prepare(self._page_fd, self.spec.world_size)
        self._page = ControlPage(self._page_fd, self.spec.world_size)
        self._paths = RunPaths(root=_path(self.spec.run_dir))
        self._recorder = Recorder(self._paths.events, self._warn_later)
        self.output = RunOutput(
            loop, self.spec, launch.console, console_fds, consoles,
            self.tell, self._warn_later, self._stop_unread,
        )  # fmt: skip
        self.tensors = RunTensors(
            loop, self.spec.world_size, self.spec.store_limit, self._who_is_alive
        )
        self._started_s = loop.time()
        self._inbox: deque[ev.Event] = deque()
        self._feeding = False
        self._timer: asyncio.TimerHandle | None = None
        self._generation: Generation | None = None
        self._state: lifecycle.GroupState | None = None
        self._hang_watch = HangWatch(
            loop,
            self.spec.hang_timeout_s,
            self._page,
            self.output,
            lambda: self._workers,
            self.feed,
        )
        self._prompts = Prompts(loop, self.spec.run_id, self.output, self._hang_watch, self.tell)
        self._passed = PassedSignals(
            loop, lambda: self._workers, self._prompts, self._hang_watch, self._all_run, self.stop
        )
        self._news = WorkerNews(
            self.spec, launcher, servers, self.output, self.tensors, self._hang_watch,
            self._prompts, self.feed, self._announce,
        )  # fmt: skip

    # ── in ───────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Start the first generation."""
        self._announce(
            ev.RunStarted(
                run_id=self.spec.run_id,
                world_size=self.spec.world_size,
                function=self.spec.function,
            )
        )
        self._state, orders = lifecycle.begin(self.spec.policy, self._loop.time())
        self._carry_out(orders)
        self._set_timer()

    def feed(self, event: ev.Event) -> None:
        """Take in a fact: record it, let the lifecycle decide, carry out its orders.

        Facts that come while orders are being carried out wait their turn.
        """
        self._inbox.append(msgspec.structs.replace(event, at=time.time()))
        if self._feeding or self._state is None:
            return
        self._feeding = True
        try:
            while self._inbox:
                self._digest(self._inbox.popleft())
        except Exception:  # noqa: BLE001 - a bug of ours must not leave workers behind
            self._break_down(traceback.format_exc())
        finally:
            self._feeding = False
        self._set_timer()

    def _digest(self, event: ev.Event) -> None:
        assert self._state is not None  # noqa: S101 - see feed
        self._publish(event)
        if self._state.ended:
            return
        if isinstance(event, ev.WorkerEntered):
            self._passed.worker_entered()
        self._state, orders = lifecycle.step(self._state, event, self._loop.time())
        self._carry_out(orders)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._state is None:
            return
        self._hang_watch.follow(self._state)
        due_s = lifecycle.next_deadline(self._state)
        if due_s is not None:
            self._timer = self._loop.call_at(due_s, self.feed, ev.TimePassed())

    # ── out ──────────────────────────────────────────────────────────────────────────────

    def tell(self, message: AgentMessage) -> None:
        """Send something to the launcher."""
        self._launcher.send(message)

    def _publish(self, event: ev.Event) -> None:
        self._recorder.record(event)
        if not isinstance(event, ev.TimePassed):
            self.tell(Happened(run_id=self.spec.run_id, event=event))

    def _announce(self, event: ev.Event) -> None:
        self._publish(msgspec.structs.replace(event, at=time.time()))

    def feed_warning(self, message: str) -> None:
        """Say something that a person should know."""
        self._announce(ev.Warned(message=message))

    def _warn_later(self, message: str) -> None:
        """From deep inside the output or the log: not in the middle of something else."""
        self._loop.call_soon(self.feed_warning, message)

    def _stop_unread(self) -> None:
        """As a program ends that prints to a closed pipe."""
        self._loop.call_soon(self.stop, "SIGPIPE (nobody reads the output any more)")

    # ── orders ───────────────────────────────────────────────────────────────────────────

    def _carry_out(self, orders: tuple[do.Command, ...]) -> None:
        for order in orders:
            self._carry_out_one(order)

    def _carry_out_one(self, order: do.Command) -> None:  # noqa: PLR0912 - one arm per order
        match order:
            case do.Announce(event=event):
                self._announce(event)
                if isinstance(event, ev.GroupRan) and self._may_start_again:
                    self._loop.call_later(_IDLE_S, self._servers.improve, self._launch.key)
                elif isinstance(event, ev.RunEnded):
                    self.output.when_flushed(self._finish)
            case do.OpenGeneration(generation=number):
                self._open_generation(number)
            case do.AnnounceStop():
                self._passed.close()
                self._page.ask_to_stop()
            case do.AnnounceAbort(rank=rank):
                self._page.abort(rank)
            case do.CloseGeneration():
                self._group.close(lambda: self.feed(self._closed()))
            case do.StartWorker(rank=rank):
                assert self._state is not None  # noqa: S101 - orders come from it
                self._page.clear_line(rank)
                self._passed.worker_starts(rank)
                self._group.start_worker(rank, self._state.restart_count)
            case do.CancelStart(rank=rank):
                if self._group.workers[rank].cancel():
                    self.feed(ev.StartCancelled(rank=rank))
            case do.StopWorker(rank=rank, polite=polite, signum=signum):
                self._stop_worker(self._group.workers[rank], signum, polite=polite)
            case do.KillWorker(rank=rank):
                self._group.workers[rank].signal(signal.SIGKILL)
            case do.AbandonWorker(rank=rank):
                self._group.workers[rank].abandon()
                self.output.end(rank)

    def _all_run(self) -> bool:
        state = self._state
        return (
            state is not None
            and state.phase == "running"
            and not any(worker.phase in ("pending", "starting") for worker in state.workers)
        )

    @property
    def _may_start_again(self) -> bool:
        """Whether there may be another start: a command without restarts starts once."""
        return self.spec.program is None or self.spec.max_restarts > 0

    @property
    def _workers(self) -> dict[int, WorkerProcess]:
        return {} if self._generation is None else self._generation.workers

    @property
    def _group(self) -> Generation:
        assert self._generation is not None  # noqa: S101 - opened by the first order
        return self._generation

    def _open_generation(self, number: int) -> None:
        self._page.clear()
        self.tensors.store.begin_generation()
        resources = RunResources(
            spec=self.spec,
            launch=self._launch,
            servers=self._servers,
            output=self.output,
            payload=self._payload,
            listener=self._listener,
            stdin=self._stdin,
            page_fd=self._page_fd,
            news=self._news,
        )
        self._generation = Generation(resources, self, number, self._loop)
        self._generation.open()

    def _closed(self) -> ev.GenerationClosed:
        return ev.GenerationClosed(generation=self._group.number)

    def _stop_worker(self, worker: WorkerProcess, signum: int, *, polite: bool) -> None:
        polite = polite and signum == signal.SIGTERM
        if polite and self._page.polls_stop(worker.rank) and not worker.catches(signal.SIGTERM):
            return  # it has been told by the page, and SIGTERM would only cut it short
        worker.signal(signum)

    # ── what others ask ──────────────────────────────────────────────────────────────────

    def _who_is_alive(self) -> str:
        """Say who could still put something into the tensor store."""
        if self._state is None or self._state.ended:
            return "the run has ended"
        alive = [rank for rank, worker in enumerate(self._state.workers) if worker.alive]
        return f"alive: rank(s) {', '.join(map(str, alive)) or 'none'} of {self.spec.world_size}"

    def answer(self, rank: int, text: str) -> None:
        """Pass a line on to the debugger of a rank."""
        if rank != self._prompts.current:  # who reads from the terminal says when it has read
            self._hang_watch.debugger_goes_on(rank)
        if rank in self._workers:
            self._workers[rank].answer(text)

    def belongs_to(self, launcher: Connection[Request]) -> bool:
        """Whether this connection asked for the run."""
        return self._launcher is launcher

    def pass_signal(self, signum: int) -> None:
        """Give a signal to the workers that it is for; if there are none, it is a stop."""
        self._passed.pass_on(signum)

    def stop(
        self, reason: str, grace_s: float | None = None, signum: int = signal.SIGTERM.value
    ) -> None:
        """End it in order; None: with the grace that the launch asked for."""
        grace_s = self.spec.grace_s if grace_s is None else grace_s
        self.feed(ev.StopRequested(grace_s=grace_s, reason=reason, signum=signum))

    def kill(self, reason: str) -> None:
        """End it now, without waiting for a console that does not read."""
        self.output.give_up()
        self.feed(ev.KillRequested(reason=reason))

    def kill_rank(self, rank: int) -> str | None:
        """End one worker by SIGKILL; return what is in the way, or None."""
        return self._group.kill_rank(rank)

    def ask_for_stacks(self, then: Callable[[dict[int, str]], None]) -> None:
        """Call back, within about half a second, with where each living worker is."""
        Roundup(
            self._loop,
            self._page,
            self._workers.values(),
            lambda stacks: then({rank: stack.text for rank, stack in stacks.items()}),
        )

    def why_no_process(self, rank: int) -> str | None:
        """Return why a rank can't be asked for anything, or None."""
        return self._group.why_no_process(rank)

    # ── its end ──────────────────────────────────────────────────────────────────────────

    def _finish(self) -> None:
        assert self._state is not None  # noqa: S101 - only a run that began can end
        if self._news.dropped_reports:
            count = (
                f"{self._news.dropped_reports:,} reports were dropped: the launcher did not keep up"
            )
            self._announce(ev.Warned(message=count))
        phase = self._state.phase
        self.tell(
            RunFinished(
                run_id=self.spec.run_id,
                state=phase if phase in ("succeeded", "stopped") else "failed",
                restart_count=self._state.restart_count,
                duration_s=self._loop.time() - self._started_s,
                failures=() if phase == "succeeded" else by_cause(self._state.failures),
            )
        )
        self._release()

    def kill_now(self) -> None:
        """The launcher is gone: end the workers without ceremony."""
        self._recorder.record(ev.KillRequested(at=time.time(), reason="the launcher ended"))
        if self._generation is not None:
            self._generation.kill_now()

    def _break_down(self, why: str) -> None:
        """A bug in Phalanx itself: end the run, and say so."""
        self.kill_now()
        failure = Failure(
            rank=-1,
            cause="exit",
            message="Phalanx itself failed; please report this with the run's events.jsonl",
            traceback=why,
            retry=False,
        )
        self.tell(
            RunFinished(
                run_id=self.spec.run_id,
                state="failed",
                restart_count=self._state.restart_count if self._state else 0,
                duration_s=self._loop.time() - self._started_s,
                failures=(failure,),
            )
        )
        self._inbox.clear()
        self._state = None
        self._release()

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._hang_watch.stop()
        self._passed.close()
        if self._generation is not None:
            self._generation.release()
        self._recorder.close()
        self.output.close()
        self._page.close()
        for fd in (self._payload, self._listener, self._page_fd, self._stdin):
            if fd is not None:
                os.close(fd)
        self._on_finished(self)


def _path(text: str) -> Path:
    from pathlib import Path  # noqa: PLC0415 - not needed for types alone

    return Path(text)

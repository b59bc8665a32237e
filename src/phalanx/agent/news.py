"""What a run's workers say, and how they end: facts for the lifecycle, words for the launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.agent.records import record_of_error_file, record_of_no_start
from phalanx.values import events as ev
from phalanx.values.failures import Exited
from phalanx.wire.messages import (
    DebuggerInput,
    DebuggerText,
    Entered,
    InputWanted,
    Raised,
    Remarked,
    Reported,
    Result,
    Returned,
    StoreOpened,
    Turn,
)

if TYPE_CHECKING:
    from phalanx.agent.connection import Connection
    from phalanx.agent.forkserver import NotMade
    from phalanx.agent.forkservers import ForkServers
    from phalanx.agent.hangs import HangWatch
    from phalanx.agent.output import RunOutput
    from phalanx.agent.prompts import Prompts
    from phalanx.agent.tensors import RunTensors
    from phalanx.agent.worker import WorkerProcess
    from phalanx.values.failures import Exit
    from phalanx.values.spec import LaunchSpec
    from phalanx.wire.control import Request
    from phalanx.wire.messages import WorkerMessage

_MAX_BACKLOG = 16 * 1024 * 1024
"""Bytes that may wait for a launcher that does not read; beyond, reports are dropped."""


class WorkerNews:
    """Hears all workers of a run; a `WorkerOwner`.

    Attributes:
        dropped_reports: How many the launcher did not get, since it did not keep up.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        launcher: Connection[Request],
        servers: ForkServers,
        output: RunOutput,
        tensors: RunTensors,
        hang_watch: HangWatch,
        prompts: Prompts,
        feed: Callable[[ev.Event], None],
        announce: Callable[[ev.Event], None],
    ) -> None:
        """Keep whom things are told to.

        Args:
            spec: Of the run.
            launcher: Gets results and questions.
            servers: Must know which processes are workers.
            output: Of the workers.
            tensors: Workers open connections to it.
            hang_watch: Excuses who sits in a debugger.
            prompts: Says whose turn it is to read.
            feed: Takes facts for the lifecycle.
            announce: Takes what only people want to know.
        """
        self._spec = spec
        self._launcher = launcher
        self._servers = servers
        self._output = output
        self._tensors = tensors
        self._hang_watch = hang_watch
        self._prompts = prompts
        self._feed = feed
        self._announce = announce
        self.dropped_reports = 0

    def on_worker_made(self, worker: WorkerProcess) -> None:
        """See `WorkerOwner`."""
        assert worker.pid is not None  # noqa: S101 - it has just been made
        self._servers.note_worker(worker.pid, worker.spec.tag)
        self._feed(ev.WorkerStarted(rank=worker.rank, pid=worker.pid))

    def on_worker_not_made(self, worker: WorkerProcess, failure: NotMade) -> None:
        """See `WorkerOwner`."""
        self._output.end(worker.rank)
        record = record_of_no_start(worker.spec, failure)
        self._feed(ev.StartFailed(rank=worker.rank, failure=record))

    def on_worker_message(
        self, worker: WorkerProcess, message: WorkerMessage, fds: list[int]
    ) -> None:
        """See `WorkerOwner`."""
        rank, run_id = worker.rank, self._spec.run_id
        match message:
            case Entered():
                self._feed(ev.WorkerEntered(rank=rank))
            case Returned(data=data):
                self._launcher.send(Result(run_id=run_id, rank=rank, data=data), fds)
                self._feed(ev.WorkerReturned(rank=rank))
            case Raised(failure=failure):
                worker.has_failed = True
                self._feed(ev.WorkerRaised(rank=rank, failure=failure))
            case Reported(metrics=metrics):
                self._report(ev.WorkerReported(rank=rank, metrics=metrics))
            case StoreOpened(pid=pid):
                self._tensors.connect(fds[0], f"rank {rank}", pid)
            case Remarked(message=text):
                self._announce(ev.Warned(message=text))
            case DebuggerText(text=text):
                self._output.write_plain(text)
            case DebuggerInput(prompt=prompt):
                self._hang_watch.debugger_waits(rank)
                self._launcher.send(InputWanted(run_id=run_id, rank=rank, prompt=prompt))
            case Turn(begins=True):
                self._prompts.want(rank)
            case Turn():
                self._prompts.over(rank)

    def on_worker_exited(self, worker: WorkerProcess, exit_: Exit) -> None:
        """See `WorkerOwner`."""
        self._prompts.over(worker.rank)
        self._output.drain(worker.rank)
        if exit_ != Exited(0) and not worker.has_failed:
            self._read_error_file(worker)
        log_tail = self._output.tail(worker.rank) if exit_ != Exited(0) else ""
        self._output.end(worker.rank)  # before the news: the rank may be started again at once
        native_stack = worker.native_stack()
        self._feed(
            ev.WorkerExited(
                rank=worker.rank, exit=exit_, log_tail=log_tail, native_stack=native_stack
            )
        )

    def _read_error_file(self, worker: WorkerProcess) -> None:
        """Code under torchelastic's ``@record`` has said there what went wrong."""
        failure = record_of_error_file(self._spec, worker.spec, worker.pid)
        if failure is not None:
            self._feed(ev.WorkerRaised(rank=worker.rank, failure=failure))

    def _report(self, event: ev.WorkerReported) -> None:
        if self._launcher.pending > _MAX_BACKLOG:
            self.dropped_reports += 1
        else:
            self._announce(event)

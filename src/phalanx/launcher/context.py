"""The context as the launcher sees it: one run's mailbox, and what can be asked of it."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from phalanx.launcher import exit as launcher_exit
from phalanx.launcher.callbacks import Callbacks
from phalanx.launcher.outcome import failure_of, load_return
from phalanx.launcher.progress import Progress
from phalanx.launcher.prompts import prompts
from phalanx.launcher.report import log_event
from phalanx.launcher.signals import NAP_S, stop_signals
from phalanx.launcher.stacks import StackQuestions
from phalanx.launcher.tensors import StoreAccess
from phalanx.system.kernel import visible_gpus
from phalanx.tensors.sync.shm.backend import cpu_backend
from phalanx.values import events as ev
from phalanx.values.context import RunResult, SubprocessContext
from phalanx.values.errors import AgentLostError, RunStoppedError
from phalanx.values.spec import to_seconds
from phalanx.wire.messages import (
    ConsoleText,
    Happened,
    InputLine,
    InputWanted,
    KillRun,
    PassSignal,
    Prompt,
    RestartRun,
    Result,
    RunFinished,
    StacksFound,
    StopRun,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Self

    from phalanx.launcher.console import Console
    from phalanx.launcher.link import AgentLink
    from phalanx.tensors.store.client import TensorClient
    from phalanx.values.events import GroupPhase
    from phalanx.values.failures import Failure
    from phalanx.values.spec import Duration, LaunchSpec
    from phalanx.wire.messages import AgentMessage

R = TypeVar("R")
_KILL_MARGIN_S = 10.0
"""How much longer than its grace a shutdown may take before the run is killed."""


class LauncherContext(SubprocessContext[R]):
    """One run. Its methods may be called from any thread, its mailbox from the link's."""

    def __init__(
        self,
        spec: LaunchSpec,
        link: AgentLink,
        console: Console,
        on_event: Callable[[ev.Event], None] | None,
        on_ended: Callable[[LauncherContext[Any]], None],
    ) -> None:
        """Keep what is needed; `start_processes` sends the launch."""
        self.spec = spec
        self._link = link
        self._console = console
        self._on_ended = on_ended
        self._owner_pid = os.getpid()
        self._changed = threading.Condition()
        self._events: list[ev.Event] = []
        self._progress = Progress()
        self._results: dict[int, bytes | int] = {}
        self._finished: RunFinished | None = None
        self._agent_lost = False
        self._questions: list[InputWanted] = []
        self._callbacks = None if on_event is None else Callbacks(on_event)
        self._returns: tuple[Any, ...] | None = None
        self._launched = False
        self._early: list[StopRun | KillRun | PassSignal] = []
        self._stack_questions = StackQuestions(spec.run_id, link.send)
        self.looked_at = False
        # The store outlives the run, but not this object.
        self._store = StoreAccess(spec.run_id, link)
        self._release_store = weakref.finalize(self, self._store.release)
        self._release_store.atexit = False  # the agent ends with this process anyway

    def __repr__(self) -> str:
        """Say what runs, and how it stands."""
        spec = self.spec
        return f"<{spec.world_size} workers of {spec.function}, run {spec.run_id}, {self.state}>"

    # ── the surface ──────────────────────────────────────────────────────────────────────

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self.spec.run_id

    def get_world_size(self) -> int:
        """Return the number of workers."""
        return self.spec.world_size

    def get_backend(self) -> str:
        """Return the name of the backend that the workers' group has."""
        if self.spec.backend != "auto":
            return self.spec.backend
        return "nccl" if visible_gpus(dict(os.environ)) else cpu_backend(self.spec.num_nodes)

    @property
    def restart_count(self) -> int:
        """How often the group or a worker was started again so far."""
        return self._progress.restart_count

    @property
    def state(self) -> GroupPhase:
        """Where the run stands."""
        return self._progress.state

    @property
    def ended(self) -> bool:
        """Whether nothing of the run is alive any more."""
        return self._finished is not None or self._agent_lost

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What failed or was stopped, the root cause first; empty until the run has ended."""
        return () if self._finished is None else self._finished.failures

    def pids(self) -> dict[int, int]:
        """Return the process ids of the living workers, by rank."""
        with self._changed:
            return dict(sorted(self._progress.pids.items()))

    def dump_stacks(self) -> dict[int, str]:
        """Return where the living workers are, by rank."""
        if self.ended or os.getpid() != self._owner_pid:
            return {}
        return self._stack_questions.ask()

    def wait(self, timeout: Duration | None = None) -> RunResult[R]:
        """Wait until the run has ended."""
        deadline = None
        if timeout is not None:
            deadline = time.monotonic() + to_seconds("timeout", timeout)
        self._wait_until_ended(deadline)
        self.looked_at = True
        launcher_exit.forget(self)  # what failed was told to the caller
        stop_signals.restore_if_idle()
        return self._result()

    def shutdown(self, grace: Duration | None = None, *, signum: int = signal.SIGTERM) -> None:
        """Stop the run, by this signal, and wait until nothing of it is alive."""
        if os.getpid() != self._owner_pid:
            return
        grace_s = self.spec.grace_s if grace is None else to_seconds("grace", grace)
        self.looked_at = True
        if not self.ended:
            self._link.send(StopRun(run_id=self.run_id, grace_s=grace_s, signum=int(signum)))
            try:
                self._wait_until_ended(time.monotonic() + grace_s + _KILL_MARGIN_S)
            except TimeoutError:
                self._kill("shutdown took too long")
        stop_signals.restore_if_idle()

    def _kill(self, reason: str) -> None:
        """End it now, and wait; an agent that does not even do that is stopped."""
        self.request_kill(reason)
        try:
            self._wait_until_ended(time.monotonic() + _KILL_MARGIN_S)
        except TimeoutError:
            self._link.kill_agent()
            self._wait_until_ended(None)

    def restart(self, grace: Duration | None = None) -> None:
        """Replace the workers by a new generation."""
        if self.ended:
            raise RunStoppedError(
                f"run {self.run_id} has {self.state} already; call start_processes again"
            )
        grace_s = None if grace is None else to_seconds("grace", grace)
        self._link.send(RestartRun(run_id=self.run_id, grace_s=grace_s))

    def events(self) -> Iterator[ev.Event]:
        """Yield the run's events from the first on, until `RunEnded`."""
        position = 0
        while True:
            with self._changed:
                while position >= len(self._events) and not self.ended:
                    self._changed.wait(NAP_S)
                fresh = self._events[position:]
            position += len(fresh)
            yield from fresh
            if not fresh:
                return

    def close(self) -> None:
        """Stop the run if it still runs, and let go of its tensors."""
        if os.getpid() != self._owner_pid:
            return
        if not self.ended:
            self.shutdown()
        if "_tensors" in self.__dict__:
            self._tensors.close()
        self._release_store()

    def __enter__(self) -> Self:
        """Enter a block that owns the run."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the run, or shut it down if the block ended by an exception."""
        try:
            if exc_type is None and not (self.ended and self.looked_at):
                self.wait()
        finally:
            self.close()

    # ── tensors ──────────────────────────────────────────────────────────────────────────

    @cached_property
    def _tensors(self) -> TensorClient:
        from phalanx.tensors.store.client import TensorClient  # noqa: PLC0415 - imports torch

        return TensorClient(self._store.open)

    @property
    def _own_rank(self) -> int:
        return self.get_rank()

    @property
    def _rank_to_read(self) -> int:
        return 0

    # ── for signal handlers: only enqueue ────────────────────────────────────────────────

    def request_stop(self, reason: str) -> None:
        """Stop, with the run's grace; does not wait."""
        self._send_after_launch(StopRun(run_id=self.run_id, reason=reason))

    def request_kill(self, reason: str) -> None:
        """End now; does not wait."""
        self._send_after_launch(KillRun(run_id=self.run_id, reason=reason))

    def pass_signal(self, signum: int) -> None:
        """Have workers that catch a signal get it, or the run stopped; does not wait."""
        self._send_after_launch(PassSignal(run_id=self.run_id, signum=signum))

    def launched(self) -> None:
        """The launch has been sent: a wish that came before it can follow it now."""
        self._launched = True
        while self._early:
            self._link.send(self._early.pop(0))

    def _send_after_launch(self, wish: StopRun | KillRun | PassSignal) -> None:
        """The agent knows no run that it was not told of."""
        if self._launched:
            self._link.send(wish)
        else:
            self._early.append(wish)

    # ── the mailbox: called by the link's thread ─────────────────────────────────────────

    def on_message(self, message: AgentMessage, fds: list[int]) -> None:
        """Take in what the agent says."""
        match message:
            case Happened(event=event):
                self._take_event(event)
            case Result(rank=rank, data=data):
                self._results[rank] = fds[0] if data is None else data
            case ConsoleText(stream=stream, data=data):
                self._console.write(stream, data)
            case InputWanted():
                with self._changed:
                    self._questions.append(message)
                    self._changed.notify_all()
            case Prompt(rank=rank, opens=True):
                line = InputLine(run_id=self.run_id, rank=rank, text="")
                prompts.begin(self.run_id, rank, lambda: self._link.send(line))
            case Prompt(rank=rank):
                prompts.end(self.run_id, rank)
            case StacksFound():
                self._stack_questions.answer(message)
            case RunFinished():
                self._end(message)

    def on_agent_lost(self) -> None:
        """The agent is gone, and with it everything that it had started."""
        if not self.ended:
            self._end(None)

    def _take_event(self, event: ev.Event) -> None:
        log_event(event, self.spec)
        with self._changed:
            self._events.append(event)
            self._progress.follow(event)
            if isinstance(event, ev.GenerationStarted):
                self._drop_results()
            self._changed.notify_all()
        if self._callbacks is not None:
            self._callbacks.put(event)

    def _drop_results(self) -> None:
        """What an earlier generation returned counts for nothing."""
        for value in self._results.values():
            if isinstance(value, int):
                os.close(value)
        self._results.clear()

    def _end(self, finished: RunFinished | None) -> None:
        stop_signals.run_ended(self)  # before anybody wakes: see StopSignals
        with self._changed:
            self._finished = finished
            self._agent_lost = finished is None
            self._progress.end(agent_lost=finished is None)
            self._changed.notify_all()
        if self._callbacks is not None:
            self._callbacks.close()
        self._stack_questions.close()
        self._link.unsubscribe(self.run_id)
        self._on_ended(self)

    # ── waiting ──────────────────────────────────────────────────────────────────────────

    def _wait_until_ended(self, deadline: float | None) -> None:
        if os.getpid() != self._owner_pid:
            raise RunStoppedError("this is a fork of the launcher: only the launcher can wait")
        while True:
            with self._changed:
                while not self.ended and not self._questions:
                    left_s = None if deadline is None else deadline - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        raise TimeoutError(self._still_running())
                    self._changed.wait(NAP_S if left_s is None else min(NAP_S, left_s))
                if self.ended:
                    return
                question = self._questions.pop(0)
            self._link.send(
                InputLine(run_id=self.run_id, rank=question.rank, text=_read_line(question.prompt))
            )

    def _still_running(self) -> str:
        ranks = ", ".join(map(str, self.pids())) or "none yet"
        return (
            f"run {self.run_id} is still {self.state} (ranks with a process: {ranks}); it goes "
            "on: wait() again, or shutdown()"
        )

    def _result(self) -> RunResult[R]:
        finished = self._finished
        if finished is None:
            raise AgentLostError(
                f"the agent of run {self.run_id} (process {self._link.agent_pid}) "
                f"{self._link.how_agent_ended}, and the workers with it; what "
                f"happened until then is in {self.spec.run_dir}/events.jsonl"
            )
        if finished.state == "failed":
            raise failure_of(self.spec, finished)
        whole = len(self._results) == self.spec.world_size
        if finished.state == "stopped" and not whole:
            missing = [r for r in range(self.spec.world_size) if r not in self._results]
            raise RunStoppedError(
                f"run {self.run_id} was stopped before rank(s) {', '.join(map(str, missing))} "
                "returned"
            )
        if self._returns is None:
            self._returns = tuple(
                load_return(self._results.pop(rank, None)) for rank in range(self.spec.world_size)
            )
        return RunResult(
            run_id=self.run_id,
            returns=cast("tuple[R, ...]", self._returns),
            restart_count=finished.restart_count,
            duration_s=finished.duration_s,
        )


def _read_line(prompt: str) -> str:
    """Read a line for a debugger on a worker; empty at end of input."""
    try:
        return input(prompt) + "\n"
    except (EOFError, OSError):
        return ""

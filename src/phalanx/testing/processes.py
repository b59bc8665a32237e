"""Workers that exist on paper: they carry out the lifecycle's orders and report events."""

from __future__ import annotations

import signal
from collections import deque

from phalanx import lifecycle
from phalanx.testing.clock import FakeClock
from phalanx.values import commands as do
from phalanx.values import events as ev
from phalanx.values.failures import Exit, Exited, Failure, Signaled

_FIRST_PID = 100


class FakeProcesses:
    """Plays a run through the real lifecycle, without a process.

    Obedient by default: an ordered worker starts and reaches the user's code, SIGTERM and
    SIGKILL end it, a closed generation is closed. Ranks in `stubborn` ignore SIGTERM, ranks
    in `unkillable` SIGKILL too, ranks in `slow` don't start until `start` is called.

    Example:
        >>> from phalanx.lifecycle import Policy
        >>> run = FakeProcesses(Policy(world_size=2, max_restarts=1))
        >>> run.begin()
        >>> run.die(1, signal.SIGKILL)
        >>> run.state.generation, run.state.phase
        (1, 'running')
    """

    def __init__(
        self,
        policy: lifecycle.Policy,
        *,
        clock: FakeClock | None = None,
        stubborn: frozenset[int] = frozenset(),
        unkillable: frozenset[int] = frozenset(),
        slow: frozenset[int] = frozenset(),
    ) -> None:
        """Keep what was given; `begin` starts the run."""
        self.policy = policy
        self.clock = clock or FakeClock()
        self.stubborn = stubborn
        self.unkillable = unkillable
        self.slow = slow
        self.orders: list[do.Command] = []
        self.announced: list[ev.Event] = []
        self.fed: list[ev.Event] = []
        self._inbox: deque[ev.Event] = deque()
        self._next_pid = _FIRST_PID
        self._feeding = False
        self.state = lifecycle.GroupState(policy=policy)

    def begin(self) -> None:
        """Start the first generation."""
        self.state, orders = lifecycle.begin(self.policy, self.clock.now)
        self._obey(orders)
        self._digest()

    def feed(self, event: ev.Event) -> None:
        """Report something to the lifecycle, and carry out what it orders."""
        self._inbox.append(event)
        self._digest()

    def start(self, rank: int) -> None:
        """A slow rank's process comes into being and reaches the user's code."""
        self._inbox.append(ev.WorkerStarted(rank=rank, pid=self._new_pid()))
        self._inbox.append(ev.WorkerEntered(rank=rank))
        self._digest()

    def finish(self, rank: int, exit_: Exit = Exited(0)) -> None:  # noqa: B008 - frozen
        """A rank's function returns, and its process ends."""
        self._inbox.append(ev.WorkerReturned(rank=rank))
        self._inbox.append(ev.WorkerExited(rank=rank, exit=exit_))
        self._digest()

    def fail(self, rank: int, failure: Failure | None = None) -> None:
        """A rank's function raises, and its process ends."""
        record = failure or Failure(
            rank=rank, cause="exception", type_name="ValueError", message="boom"
        )
        self.feed(ev.WorkerRaised(rank=rank, failure=record))
        if self.state.workers[rank].alive:
            self.feed(ev.WorkerExited(rank=rank, exit=Exited(1)))

    def die(self, rank: int, signum: int) -> None:
        """A signal ends a rank's process."""
        self.feed(ev.WorkerExited(rank=rank, exit=_signaled(signum)))

    def hang(self, rank: int) -> None:
        """A rank has shown no sign of life for too long."""
        pid = self.state.workers[rank].pid
        failure = Failure(rank=rank, pid=pid, cause="hang", message="no sign of life")
        self.feed(ev.WorkerHung(rank=rank, failure=failure))

    def lose_helper(self, exit_: Exit) -> None:
        """The store host ends, or a fork server."""
        failure = Failure(rank=-1, cause="helper", message="the store ended", exit=exit_)
        self.feed(ev.HelperExited(failure=failure))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, from deadline to deadline."""
        until = self.clock.now + seconds
        while (due := lifecycle.next_deadline(self.state)) is not None and due <= until:
            self.clock.advance(max(0.0, due - self.clock.now))
            self.feed(ev.TimePassed())
        self.clock.advance(until - self.clock.now)

    # ── obedience ────────────────────────────────────────────────────────────────────────

    def _digest(self) -> None:
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._inbox:
                event = self._inbox.popleft()
                self.fed.append(event)
                self.state, orders = lifecycle.step(self.state, event, self.clock.now)
                self._obey(orders)
        finally:
            self._feeding = False

    def _obey(self, orders: tuple[do.Command, ...]) -> None:
        for order in orders:
            self.orders.append(order)
            self._inbox.extend(self._answer(order))

    def _answer(self, order: do.Command) -> tuple[ev.Event, ...]:
        match order:
            case do.Announce(event=event):
                self.announced.append(event)
            case do.StartWorker(rank=rank) if rank not in self.slow:
                started = ev.WorkerStarted(rank=rank, pid=self._new_pid())
                return (started, ev.WorkerEntered(rank=rank))
            case do.CancelStart(rank=rank):
                return (ev.StartCancelled(rank=rank),)
            case do.StopWorker(rank=rank) if rank not in self.stubborn | self.unkillable:
                return self._end(rank, signal.SIGTERM)
            case do.KillWorker(rank=rank) if rank not in self.unkillable:
                return self._end(rank, signal.SIGKILL)
            case do.CloseGeneration():
                return (ev.GenerationClosed(generation=self.state.generation),)
            case _:
                pass
        return ()

    def _end(self, rank: int, signum: int) -> tuple[ev.Event, ...]:
        return (ev.WorkerExited(rank=rank, exit=_signaled(signum)),)

    def _new_pid(self) -> int:
        self._next_pid += 1
        return self._next_pid


def _signaled(signum: int) -> Signaled:
    return Signaled(int(signum), signal.Signals(signum).name)

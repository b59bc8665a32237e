"""Watches for ranks that show no sign of life any more (``hang_timeout``).

Workers note on the control page that they got on, and what they print is seen here anyhow. So
nobody is asked anything: one timer looks, when the rank that was silent longest could be overdue.
Only then are stacks collected, and judged by `phalanx.lifecycle.hangs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.agent.stacks import Roundup, Stack
from phalanx.lifecycle.hangs import Sighting, find_hung, next_look, silent_ranks
from phalanx.system import kernel
from phalanx.system.whereabouts import STOPPED, as_text, describe_state, grouped, own_frame
from phalanx.values import events as ev
from phalanx.values.failures import Failure

if TYPE_CHECKING:
    import asyncio

    from phalanx.agent.output import RunOutput
    from phalanx.agent.worker import WorkerProcess
    from phalanx.lifecycle import GroupState
    from phalanx.system.page import ControlPage

_MARGIN_S = 0.01
"""A timer may be early by a moment, and would look in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    """A process that is being watched, and since when."""

    pid: int | None
    since_s: float


class HangWatch:
    """One run's watch."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float | None,
        page: ControlPage,
        output: RunOutput,
        workers: Callable[[], Mapping[int, WorkerProcess]],
        feed: Callable[[ev.Event], None],
    ) -> None:
        """Watch nobody yet; see `follow`.

        Args:
            loop: The agent's loop.
            timeout_s: How long a rank may be silent; None: for ever.
            page: Where workers note that they got on.
            output: Knows when they printed something.
            workers: Returns the workers of the moment, by rank.
            feed: Takes the fact that one hangs.
        """
        self._loop = loop
        self._is_on = timeout_s is not None
        self._timeout_s = timeout_s or 0.0
        self._page = page
        self._output = output
        self._workers = workers
        self._feed = feed
        self._watched: dict[int, _Watched] = {}
        self._in_debugger: set[int] = set()
        self._is_paused = False
        self._stopped_s: dict[int, float] = {}
        self._group_s = 0.0
        self._excused_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._roundup: Roundup | None = None

    def follow(self, state: GroupState) -> None:
        """Watch whoever runs user code, once all do, and nobody while the group is stopping."""
        if not self._is_on:
            return
        running = (
            {worker.rank: worker.pid for worker in state.workers if worker.phase == "running"}
            if state.phase == "running"
            else {}
        )
        if running == {rank: watched.pid for rank, watched in self._watched.items()}:
            return
        self._group_s = time.monotonic()
        before, self._watched = self._watched, {}
        for rank, pid in running.items():
            known = before.get(rank)
            if known is None or known.pid != pid:
                known = _Watched(pid=pid, since_s=self._group_s)
            self._watched[rank] = known
        self._in_debugger &= set(running)
        self._stopped_s.clear()
        if running:
            self._look_later()
        else:
            self.stop()

    def stop(self) -> None:
        """Watch nobody."""
        self._watched.clear()
        self._in_debugger.clear()
        self._forget_plans()

    def debugger_waits(self, rank: int) -> None:
        """Somebody is in a debugger on a rank: the others will wait for it."""
        self._in_debugger.add(rank)

    def debugger_goes_on(self, rank: int) -> None:
        """It was told something. All clocks start anew."""
        self._in_debugger.discard(rank)
        self._excuse()

    def pause(self, *, paused: bool) -> None:
        """All ranks were stopped, or go on: nobody is to blame for that time."""
        self._is_paused = paused
        self._stopped_s.clear()
        self._excuse()

    # ── looking ──────────────────────────────────────────────────────────────────────────

    def _excuse(self) -> None:
        self._excused_s = time.monotonic()

    def _forget_plans(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._roundup is not None:
            self._roundup.cancel()
            self._roundup = None

    def _look_later(self) -> None:
        self._forget_plans()
        now = time.monotonic()
        delay_s = next_look(self._sightings({}), self._timeout_s, now) + _MARGIN_S
        self._due_s = now + delay_s
        self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        # If this process was stopped, or starved, so were they: nobody can be blamed for that.
        if self._is_paused or self._in_debugger or now - self._due_s > self._timeout_s / 2:
            self._excuse()
        if silent_ranks(self._sightings({}), self._timeout_s, now):
            workers = self._workers()
            watched = [workers[rank] for rank in self._watched if rank in workers]
            self._roundup = Roundup(self._loop, self._page, watched, self._judge)
        else:
            self._look_later()

    def _sightings(self, stacks: Mapping[int, Stack]) -> list[Sighting]:
        last = {rank: self._last_sign(rank) for rank in self._watched}
        num_signs = {rank: self._page.num_signs(rank) for rank in self._watched}
        group_s = max(self._group_s, *last.values())
        return [
            Sighting(
                rank=rank,
                since_s=max(
                    last[rank] if num_signs[rank] else self._silent_since(rank, group_s),
                    watched.since_s,
                    self._excused_s,
                ),
                num_signs=num_signs[rank],
                is_stuck=rank in stacks and stacks[rank].is_stuck,
                waits=rank in stacks and stacks[rank].waits,
            )
            for rank, watched in self._watched.items()
        ]

    def _last_sign(self, rank: int) -> float:
        """Return when a rank gave its last sign of life; 0: it never did."""
        _, noted_ns = self._page.progress(rank)
        return max(noted_ns / 1e9, self._output.heard_s(rank) or 0.0)

    def _silent_since(self, rank: int, group_s: float) -> float:
        """Return since when a rank that notes nothing has been silent.

        It may be a server, or one that only prints, once: it is as alive as its group, unless
        it was stopped.
        """
        pid = self._watched[rank].pid
        if pid is None or kernel.process_state(pid) != STOPPED:
            self._stopped_s.pop(rank, None)
            return group_s
        return min(group_s, self._stopped_s.setdefault(rank, time.monotonic()))

    # ── judging ──────────────────────────────────────────────────────────────────────────

    def _judge(self, stacks: dict[int, Stack]) -> None:
        self._roundup = None
        if self._is_paused or self._in_debugger or any(stack.is_held for stack in stacks.values()):
            self._excuse()
        hung = find_hung(self._sightings(stacks), self._timeout_s, time.monotonic())
        worker = None if hung is None else self._workers().get(hung.rank)
        if worker is not None:
            self._feed(ev.WorkerHung(rank=worker.rank, failure=self._failure(worker, stacks)))
        if self._watched and self._timer is None:
            self._look_later()

    def _failure(self, worker: WorkerProcess, stacks: dict[int, Stack]) -> Failure:
        own = stacks.get(worker.rank, Stack(frames=(), state=""))
        texts = {rank: stack.text for rank, stack in stacks.items()}
        all_wait = len(stacks) > 1 and all(stack.waits for stack in stacks.values())
        return Failure(
            rank=worker.rank,
            node_rank=worker.spec.node_rank,
            pid=worker.pid,
            generation=worker.spec.generation,
            cause="hang",
            message=f"no sign of life for {self._timeout_s:g} s{_where(own, all_wait=all_wait)}",
            traceback=as_text(own.frames, own.state) if own.frames else None,
            stacks=grouped(texts, first=worker.rank),
            at=time.time(),
        )


def _where(stack: Stack, *, all_wait: bool) -> str:
    if not stack.frames:
        return f"; the process {describe_state(stack.state)}"
    if all_wait:
        return "; all ranks wait for each other, so they don't agree on what they are doing"
    frame = own_frame(stack.frames) or stack.frames[0]
    return f"; it is in {frame.removeprefix('File ')}"

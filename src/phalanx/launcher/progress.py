"""How a run stands, as its events tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.values import events as ev

if TYPE_CHECKING:
    from phalanx.values.events import GroupPhase


class Progress:
    """What a launcher knows of its run: it is told each event, in order.

    Attributes:
        state: Where the run stands.
        restart_count: How often the group or a worker was started again so far.
        pids: Processes of the living workers, by rank.
    """

    def __init__(self) -> None:
        """Begin before the first event."""
        self.state: GroupPhase = "starting"
        self.restart_count = 0
        self.pids: dict[int, int] = {}

    def follow(self, event: ev.Event) -> None:
        """Take in what has happened."""
        match event:
            case ev.GenerationStarted(generation=generation):
                self.state = "starting"
                self.restart_count += generation > 0
            case ev.GroupRan():
                self.state = "running"
            case ev.GroupFell(restarting=restarting):
                self.state = "restarting" if restarting else "stopping"
            case ev.StopRequested() | ev.KillRequested():
                self.state = "stopping"
            case ev.RestartRequested():
                self.state = "restarting"
            case ev.WorkerRestarted():
                self.restart_count += 1
            case ev.WorkerStarted(rank=rank, pid=pid):
                self.pids[rank] = pid
            case ev.WorkerExited(rank=rank):
                self.pids.pop(rank, None)
            case ev.RunEnded(state=state, restart_count=count):
                self.state, self.restart_count = state, count
            case _:
                pass

    def end(self, *, agent_lost: bool) -> None:
        """Nothing of the run is alive any more, and no event will come."""
        self.pids.clear()
        if agent_lost:
            self.state = "failed"

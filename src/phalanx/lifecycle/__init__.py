"""The lifecycle of a run: one pure function decides, from one visible table.

`step(state, event, now) -> (state, commands)` is told facts and answers with orders. It does
no IO, reads no clock and starts nothing; the agent carries the orders out and reports what
came of them. So a whole run, crash and restart included, is a unit test without a process,
and a recorded event log replays as one.

Two rules:

1. State changes only here. An event that `TRANSITIONS` has no place for raises
   `IllegalTransitionError` with the story so far, and changes nothing.
2. Time is an argument. `next_deadline(state)` says when `TimePassed` is due; whoever runs
   the lifecycle sets one timer to it.

Source of the idea: h11's ``_state.py`` (a table and two rules) and dask.distributed's
``worker_state_machine.py`` (events in, instructions out, an error that carries the story).
"""

from phalanx.lifecycle.moves import Step
from phalanx.lifecycle.state import (
    ABORT_GRACE_S,
    UNKILLABLE_S,
    VERDICT_S,
    Goal,
    GroupState,
    WorkerPhase,
    WorkerState,
    next_deadline,
)
from phalanx.lifecycle.table import TRANSITIONS, begin, step, table_as_markdown
from phalanx.values.events import GroupPhase
from phalanx.values.policy import Policy

__all__ = [
    "ABORT_GRACE_S",
    "TRANSITIONS",
    "UNKILLABLE_S",
    "VERDICT_S",
    "Goal",
    "GroupPhase",
    "GroupState",
    "Policy",
    "Step",
    "WorkerPhase",
    "WorkerState",
    "begin",
    "next_deadline",
    "step",
    "table_as_markdown",
]

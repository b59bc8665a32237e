"""Faults on order: at a rank, at a step, in a generation.

Source:
    The shape is that of torchft's ``EventInjector`` (faults enter at a seam that the code
    under test calls, not by patching); here it also travels to the workers, and knows
    generations, so that a fault does not repeat after the restart that it caused.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing import Self

Way = Literal["exception", "signal", "hang"]


class InjectedFaultError(RuntimeError):
    """Raised by a `FaultInjector` where it was told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    rank: int
    step: int
    by: Way
    signum: int
    generation: int


@dataclass(slots=True)
class FaultInjector:
    """Makes a worker fail. Pass it to the workers, and call `check` at each step.

    Example:
        >>> injector = FaultInjector().fail_at(rank=2, step=5, by="signal")
        >>> def train(rank, world_size, injector):
        ...     for step in range(10):
        ...         injector.check(step)
    """

    _faults: list[_Fault] = field(default_factory=list)

    def fail_at(
        self,
        rank: int,
        step: int,
        *,
        by: Way = "exception",
        signum: int = signal.SIGKILL,
        generation: int = 0,
    ) -> Self:
        """Order a fault; returns self, so that calls chain.

        Args:
            rank: Global rank that is to fail.
            step: The step, as given to `check`.
            by: ``exception``: raise `InjectedFaultError`; ``signal``: send `signum` to
                itself; ``hang``: sleep for ever.
            signum: The signal for ``by="signal"``.
            generation: After how many restarts (0: in the first generation).

        Raises:
            ValueError: `by` is none of the three.
        """
        if by not in ("exception", "signal", "hang"):
            raise ValueError(f"by must be 'exception', 'signal' or 'hang', not {by!r}")
        fault = _Fault(rank=rank, step=step, by=by, signum=int(signum), generation=generation)
        self._faults.append(fault)
        return self

    def check(self, step: int, *, rank: int | None = None, generation: int | None = None) -> None:
        """Fail here, if that was ordered for this rank, step and generation.

        Args:
            step: Where the worker is.
            rank: Who it is; None: what its context says.
            generation: In which generation; None: what its context says.

        Raises:
            InjectedFaultError: It was ordered.
            NotAWorkerError: Called outside a worker without `rank` and `generation`.
        """
        if rank is None or generation is None:
            from phalanx.launcher.api import get_context  # noqa: PLC0415 - not needed in unit tests

            context = get_context()
            rank = context.get_rank() if rank is None else rank
            generation = context.restart_count if generation is None else generation
        for fault in self._faults:
            if (fault.rank, fault.step, fault.generation) == (rank, step, generation):
                _commit(fault)


def _commit(fault: _Fault) -> None:
    if fault.by == "exception":
        raise InjectedFaultError(f"injected at rank {fault.rank}, step {fault.step}")
    if fault.by == "signal":
        os.kill(os.getpid(), fault.signum)
    while fault.by == "hang":
        time.sleep(3600)

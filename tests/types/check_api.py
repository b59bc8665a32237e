"""Read by the type checker only: what `start_processes` promises about types."""

from __future__ import annotations

from typing_extensions import assert_type

from phalanx import RunResult, SubprocessContext, start_processes


def measure(rank: int, world_size: int, scale: float) -> float:
    """A main function with a return type of its own."""
    return scale * rank / world_size


def check_return_type() -> None:
    """The function's return type reaches `returns`."""
    context = start_processes(measure, 2, args=(1.0,))
    assert_type(context, SubprocessContext[float])
    result = context.wait()
    assert_type(result, RunResult[float])
    assert_type(result.returns[0], float)

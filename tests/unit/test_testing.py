from __future__ import annotations

import doctest
import pickle

import pytest

from phalanx import NotAWorkerError
from phalanx.testing import FakeClock, FaultInjector, InjectedFaultError, processes


def test_a_clock_goes_only_forward():
    clock = FakeClock(5.0)
    clock.advance(2.5)
    assert clock.now == 7.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def test_a_fault_comes_at_its_rank_step_and_generation_only():
    injector = pickle.loads(pickle.dumps(FaultInjector().fail_at(1, 5).fail_at(0, 2, generation=1)))
    for rank, step, generation in [(1, 4, 0), (0, 5, 0), (1, 5, 1), (0, 2, 0)]:
        assert injector.check(step, rank=rank, generation=generation) is None
    for rank, step, generation in [(1, 5, 0), (0, 2, 1)]:
        with pytest.raises(InjectedFaultError, match=f"rank {rank}, step {step}"):
            injector.check(step, rank=rank, generation=generation)


def test_faults_are_checked_when_they_are_ordered():
    with pytest.raises(ValueError, match="'exception', 'signal' or 'hang'"):
        FaultInjector().fail_at(0, 0, by="magic")  # type: ignore[arg-type]
    with pytest.raises(NotAWorkerError):
        FaultInjector().check(0)


def test_the_examples_in_the_documentation_run():
    assert doctest.testmod(processes).failed == 0
    assert doctest.testmod(processes).attempted > 0

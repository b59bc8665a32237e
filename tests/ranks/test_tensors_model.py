"""The tensor store against a plain dict, with readers that keep what they got, and are killed.

The launcher writes, and knows from its model what must be there. Readers are the ranks of one
run: they do what they are told through the store itself, keep tensors mapped, write into them,
and are killed in between; the next process then takes the rank.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from phalanx import StoreTimeoutError, get_context, start_processes
from tests.conftest import wait_until

torch = pytest.importorskip("torch")

NUM_READERS = 2
LIMIT = 48 << 20
KEYS = st.sampled_from(["a", "b", "c"])
NUM_BYTES = st.sampled_from([0, 40, 300_000, 1 << 20, (1 << 20) + 4])
VALUES = st.integers(0, 99)
READERS = st.integers(0, NUM_READERS - 1)


def read_as_told(rank, world_size):
    """Do what comes under "to <rank>/<serial>", one after another."""
    context = get_context()
    serial = 0 if context.restart_count == 0 else int(context.get_tensor(f"next {rank}").item())
    kept = []
    while True:
        order = context.get_tensors(f"to {rank}/{serial}", timeout=None)
        answer = None
        if order["do"] == "end":
            return
        if order["do"] == "get":
            tensor = context.get_tensor(order["key"])
            kept.append(tensor)
        elif order["do"] == "write":
            kept[order["which"]] += 1000  # private
        elif order["do"] == "tell":
            answer = [[len(tensor), tensor.unique().tolist()] for tensor in kept]
        context.put_tensors(f"from {rank}/{serial}", answer)
        serial += 1


class Readers:
    """The run, and what was asked of each reader so far."""

    def __init__(self):
        self.context = start_processes(
            read_as_told, NUM_READERS, restart="worker", max_restarts=10_000, store_limit=LIMIT
        )
        self.serials = [0] * NUM_READERS

    def tell(self, rank, **order):
        serial = self.serials[rank]
        self.serials[rank] += 1
        self.context.put_tensors(f"to {rank}/{serial}", order)
        answer = self.context.get_tensors(f"from {rank}/{serial}", timeout=60)
        self.context.delete_tensor(f"to {rank}/{serial}")
        self.context.delete_tensor(f"from {rank}/{serial}")
        return answer

    def kill(self, rank):
        self.context.put_tensor(f"next {rank}", torch.tensor(self.serials[rank]))
        wait_until(lambda: rank in self.context.pids(), 60)
        pid = self.context.pids()[rank]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.context.pids().get(rank, pid) != pid, 30)

    def end(self):
        for rank, serial in enumerate(self.serials):
            self.context.put_tensors(f"to {rank}/{serial}", {"do": "end"})
        with self.context:
            self.context.wait()


class StoreMachine(RuleBasedStateMachine):
    """What the store does, and what a dict would."""

    readers: Readers

    def __init__(self):
        super().__init__()
        self.model = {}
        self.kept = [[] for _ in range(NUM_READERS)]
        self.context = self.readers.context

    @initialize()
    def begin_empty(self):
        for rank in range(NUM_READERS):
            self.kill(rank)
        for key in "abc":
            self.context.delete_tensor(key)

    @rule(key=KEYS, num_bytes=NUM_BYTES, value=VALUES)
    def put(self, key, num_bytes, value):
        self.context.put_tensor(key, torch.full((num_bytes // 4,), float(value)))
        self.model[key] = (num_bytes // 4, float(value))

    @rule(key=KEYS, value=VALUES)
    def add(self, key, value):
        length, old = self.model.get(key, (5, 0.0))
        total = self.context.add_tensor(key, torch.full((length,), float(value)))
        self.model[key] = (length, old + value)
        assert_is(total, self.model[key])

    @rule(key=KEYS)
    def delete(self, key):
        assert self.context.delete_tensor(key) is (key in self.model)
        self.model.pop(key, None)

    @rule(key=KEYS)
    def get(self, key):
        if key in self.model:
            assert_is(self.context.get_tensor(key), self.model[key])
        else:
            with pytest.raises(StoreTimeoutError):
                self.context.get_tensor(key, timeout=0)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), rank=READERS)
    def read_and_keep(self, data, rank):
        if len(self.kept[rank]) >= 8:
            self.kill(rank)
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.readers.tell(rank, do="get", key=key)
        self.kept[rank].append(self.model[key])

    @precondition(lambda self: any(self.kept))
    @rule(data=st.data())
    def write_into_what_was_read(self, data):
        rank = data.draw(st.sampled_from([r for r in range(NUM_READERS) if self.kept[r]]))
        which = data.draw(st.integers(0, len(self.kept[rank]) - 1))
        self.readers.tell(rank, do="write", which=which)
        length, value = self.kept[rank][which]
        self.kept[rank][which] = (length, value + 1000)

    @rule(rank=READERS)
    def all_is_as_it_was_read(self, rank):
        for told, (length, value) in zip(
            self.readers.tell(rank, do="tell"), self.kept[rank], strict=True
        ):
            assert told == [length, [value] if length else []]

    @rule(rank=READERS)
    def kill(self, rank):
        self.readers.kill(rank)
        self.kept[rank] = []

    @invariant()
    def the_keys_are_right(self):
        assert [key for key in self.context.keys() if key in "abc"] == sorted(self.model)

    def teardown(self):
        for rank in range(NUM_READERS):
            self.all_is_as_it_was_read(rank)


def assert_is(tensor, expected):
    length, value = expected
    assert len(tensor) == length
    assert tensor.unique().tolist() == ([value] if length else [])


@pytest.mark.timeout(300)
def test_it_is_a_dict_whoever_reads_and_dies():
    StoreMachine.readers = Readers()
    try:
        run_state_machine_as_test(
            StoreMachine,
            settings=settings(
                max_examples=12,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        StoreMachine.readers.end()

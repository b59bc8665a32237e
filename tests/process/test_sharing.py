"""What multiprocessing may pass to its children goes to workers as well, and stays shared."""

from __future__ import annotations

import multiprocessing as mp
import os
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from phalanx import PayloadError, get_context, start_processes

SPAWN = mp.get_context("spawn")
TORCH = torch.multiprocessing.get_context("spawn")
METHODS = ("forkserver", "spawn")


def use_everything(rank, world_size, shared):
    """Leave a trace in each object; the first generation fails half way."""
    context = get_context()
    if rank == 0:
        assert shared["end"].recv() == "hello"
    with shared["lock"], shared["rlock"], shared["semaphore"]:
        shared["value"].value += 1
        shared["array"][rank] += 10 + rank
    shared["barrier"].wait(30)
    shared["tensor"][rank] += 1
    shared["segment"].buf[rank] += 1
    if rank == 0:  # reading and writing are two messages to the manager
        shared["namespace"].ranks += 1
    if context.restart_count == 0 and rank == 0:
        assert shared["ready"][0].recv() == "ready"  # who is ended now holds no lock
        shared["end"].send("again")
        raise RuntimeError("once more")
    if context.restart_count == 0:
        shared["ready"][1].send("ready")
        shared["never"].wait()
    with shared["condition"]:
        shared["condition"].notify_all()
    shared["queue"].put(("queue", rank))
    shared["simple"].put(("simple", rank))
    shared["joinable"].put(("joinable", rank))
    shared["tensors"].put(torch.full((3,), float(rank)))
    shared["done"].wait()  # a tensor on its way is its sender's
    return rank, shared["held"]()


@pytest.fixture(scope="module")
def manager():
    with SPAWN.Manager() as manager:
        yield manager


@pytest.mark.parametrize("start_method", METHODS)
def test_all_of_it_is_shared_by_all_ranks_of_all_generations(start_method, manager):
    ours, theirs = SPAWN.Pipe()
    segment = shared_memory.SharedMemory(create=True, size=16)
    inner = SPAWN.Value("i", 7)
    try:
        shared = {
            "lock": SPAWN.Lock(), "rlock": SPAWN.RLock(), "semaphore": SPAWN.Semaphore(2),
            "condition": SPAWN.Condition(), "barrier": SPAWN.Barrier(2), "end": theirs,
            "value": SPAWN.Value("i", 0), "array": SPAWN.Array("i", 2), "segment": segment,
            "tensor": torch.zeros(2).share_memory_(), "namespace": manager.Namespace(ranks=0),
            "queue": SPAWN.Queue(), "simple": SPAWN.SimpleQueue(), "done": SPAWN.Event(),
            "joinable": SPAWN.JoinableQueue(), "tensors": TORCH.Queue(), "never": SPAWN.Event(),
            "ready": SPAWN.Pipe(duplex=False), "held": lambda: inner.value,
        }  # fmt: skip
        ours.send("hello")
        context = start_processes(
            use_everything, 2, args=(shared,), max_restarts=1, start_method=start_method,
            console="none",
        )  # fmt: skip
        assert ours.poll(20)
        assert ours.recv() == "again"
        ours.send("hello")
        for name in ("queue", "joinable"):
            assert sorted(shared[name].get(timeout=30) for _ in range(2)) == [(name, 0), (name, 1)]
        assert sorted(shared["simple"].get() for _ in range(2)) == [("simple", 0), ("simple", 1)]
        received = sorted(shared["tensors"].get().tolist() for _ in range(2))
        assert received == [[0.0] * 3, [1.0] * 3]
        shared["done"].set()
        assert context.wait(60).returns == ((0, 7), (1, 7))
        assert shared["value"].value == 4
        assert list(shared["array"]) == [20, 22]
        assert shared["tensor"].tolist() == [2, 2]
        assert shared["namespace"].ranks == 2
        assert list(segment.buf[:2]) == [2, 2]
        shared_memory.SharedMemory(segment.name).close()  # no worker's end has removed it
        for name in ("queue", "joinable", "tensors"):
            shared[name].close()
            shared[name].join_thread()
    finally:
        for end in (ours, theirs, *shared["ready"]):
            end.close()
        segment.close()
        segment.unlink()


def add_one(rank, world_size, tensors):
    for tensor in tensors:
        tensor += 1
    return len(os.listdir("/proc/self/fd"))


def test_more_tensors_than_fit_into_one_message_and_no_descriptor_stays():
    shared = [torch.zeros(1).share_memory_() for _ in range(520)]
    own = torch.zeros(1)
    counts = start_processes(add_one, 2, args=([*shared, own],), console="none").wait(60).returns
    assert {int(tensor) for tensor in shared} == {2}
    assert int(own) == 0, "what is not in shared memory is each rank's own"
    assert max(counts) < 520 + 40, "torch keeps one descriptor for each"


def put_one(rank, world_size, queue):
    queue.put(rank)


def test_an_object_that_only_the_call_holds_lives_as_long_as_the_run():
    queue = SPAWN.SimpleQueue()
    start_processes(hold, 1, args=(SPAWN.Event(),), console="none").wait(60)
    start_processes(put_one, 1, args=(queue,), console="none").wait(60)
    assert queue.get() == 0
    queue.close()


def hold(rank, world_size, event):
    event.set()


def test_an_object_for_forked_children_says_where_to_make_it():
    lock = mp.get_context("fork").Lock()
    with pytest.raises(PayloadError, match=r'make it from multiprocessing.get_context\("spawn"\)'):
        start_processes(hold, 1, args=([lock],))


def return_lock(rank, world_size, what):
    return SPAWN.Lock() if what == "lock" else SPAWN.Pipe()[0]


@pytest.mark.parametrize("what", ["lock", "pipe"])
def test_such_objects_do_not_come_home(what):
    with pytest.raises(Exception, match="can't travel to the launcher"):
        start_processes(return_lock, 1, args=(what,), console="none").wait(60)


MAIN = """
import multiprocessing as mp
from phalanx import start_processes
queue = mp.get_context("spawn").SimpleQueue()
def work(rank, world_size):
    queue.put(rank)
start_processes(work, 2, preload=()).wait(60)
print(sorted([queue.get(), queue.get()]))
"""


def test_a_global_of_a_script_is_shared(run_script, tmp_path: Path):
    done = run_script(MAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 1]\n"
    assert "resource_tracker" not in done.stderr

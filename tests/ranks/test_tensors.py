"""The tensor store with real workers: what is shared, what is kept, what outlives whom."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from phalanx import (
    NotAWorkerError,
    SpecError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreTimeoutError,
    TensorError,
    get_context,
    start_processes,
)
from tests.conftest import wait_until

torch = pytest.importorskip("torch")

MIB = 1 << 20
LARGE = 3 * MIB  # bytes: through shared memory
SMALL = 64  # bytes: in the message
BOTH_SIZES = pytest.mark.parametrize("num_bytes", [SMALL, LARGE], ids=["small", "large"])


def floats(num_bytes: int, value: float) -> torch.Tensor:
    return torch.full((num_bytes // 4,), float(value))


@contextlib.contextmanager
def idle_run(**options):
    """A run whose workers do nothing but live until the block ends."""
    context = start_processes(wait_for_stop, 1, preload=(), **options)
    try:
        yield context
    finally:
        context.put_tensor("enough", torch.zeros(1))
        context.wait()
        context.close()


def wait_for_stop(rank, world_size):
    while not get_context().has_tensor("enough"):
        time.sleep(0.01)


# ── between ranks ────────────────────────────────────────────────────────────────────────


def pass_around(rank, world_size, num_bytes):
    context = get_context()
    context.put_tensor(f"from {rank}", floats(num_bytes, rank))
    got = context.get_tensor(f"from {(rank + 1) % world_size}")
    return got.dtype, tuple(got.shape), got.unique().tolist()


@BOTH_SIZES
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_every_rank_reads_what_another_put(num_bytes, start_method):
    result = start_processes(pass_around, 3, args=(num_bytes,), start_method=start_method).wait()
    shape = (num_bytes // 4,)
    assert result.returns == tuple((torch.float32, shape, [float((n + 1) % 3)]) for n in range(3))


def add_many_times(rank, world_size, num_bytes, times):
    context = get_context()
    for _ in range(times):
        context.add_tensor("sum", floats(num_bytes, rank + 1))


@BOTH_SIZES
def test_no_addition_is_lost(num_bytes):
    times = 50 if num_bytes == LARGE else 300
    with start_processes(add_many_times, 4, args=(num_bytes, times)) as context:
        context.wait()
        assert context.get_tensor("sum").unique().tolist() == [times * (1 + 2 + 3 + 4)]


def double_in_turn(rank, world_size, num_bytes):
    context = get_context()

    def one_more(tensor):
        seen = tensor[0].item()
        time.sleep(0.01)  # long enough for the others to come
        tensor += 1  # private, and returned
        assert tensor[0].item() == seen + 1
        return tensor

    for _ in range(5):
        context.update_tensor("counter", one_more)


@BOTH_SIZES
def test_updates_of_a_key_follow_each_other(num_bytes):
    context = start_processes(double_in_turn, 4, args=(num_bytes,))
    context.put_tensor("counter", floats(num_bytes, 0))
    with context:
        context.wait()
        assert context.get_tensor("counter").unique().tolist() == [20]


def die_inside_an_update(rank, world_size, num_bytes, by):
    context = get_context()
    if rank == 0 and context.restart_count == 0:

        def fall(tensor):
            tensor.fill_(-1)
            context.put_tensor("inside", torch.ones(1))
            if by == "exception":
                raise ValueError("on purpose")
            os.kill(os.getpid(), signal.SIGKILL)

        context.update_tensor("key", fall)
    if context.restart_count == 0 and rank == 1:
        context.get_tensor("inside")
        before = context.get_tensor("key").clone()  # readers never wait for a holder
        context.put_tensor("seen", before)
    return context.update_tensor("key", lambda old: old + 1).unique().tolist()


@BOTH_SIZES
@pytest.mark.parametrize("by", ["exception", "signal"])
def test_who_falls_inside_an_update_leaves_the_old_value_and_a_free_key(num_bytes, by):
    options = {"restart": "worker", "max_restarts": 1}
    context = start_processes(die_inside_an_update, 2, args=(num_bytes, by), **options)
    context.put_tensor("key", floats(num_bytes, 10))
    with context:
        returns = context.wait().returns
        assert sorted(map(tuple, returns)) == [(11.0,), (12.0,)]
        assert context.get_tensor("seen").unique().tolist() in ([10.0], [11.0])


def keep_what_was_got(rank, world_size):
    context = get_context()
    if rank == 0:
        for version in range(20):
            context.put_tensor("value", floats(LARGE, version))
            context.put_tensor(f"put {version}", torch.ones(1))
            context.get_tensor(f"got {version}")
        return True
    kept = []
    for version in range(20):
        context.get_tensor(f"put {version}")
        kept.append(context.get_tensor("value"))
        context.put_tensor(f"got {version}", torch.ones(1))
    # Pages are touched only now, long after the values were replaced.
    return all(tensor.unique().tolist() == [version] for version, tensor in enumerate(kept))


def test_a_reader_keeps_what_it_got_whatever_is_put_later():
    assert start_processes(keep_what_was_got, 2).wait().returns == (True, True)


def write_into_it(rank, world_size, num_bytes):
    context = get_context()
    got = context.get_tensor("value")
    got += rank + 1
    context.barrier()
    return got.unique().tolist(), context.get_tensor("value").unique().tolist()


@BOTH_SIZES
def test_a_reader_may_write_into_what_it_got_and_nobody_sees_it(num_bytes):
    context = start_processes(write_into_it, 3, args=(num_bytes,))
    context.put_tensor("value", floats(num_bytes, 1))
    returns = context.wait().returns
    assert returns == (([2.0], [1.0]), ([3.0], [1.0]), ([4.0], [1.0]))


def rewrite_a_tree(rank, world_size):
    context = get_context()
    if rank == 0:
        for version in range(60):
            tree = {"a": floats(LARGE // 4, version), 7: [floats(SMALL, version), version]}
            context.put_tensors("tree", tree)
        context.put_tensor("over", torch.ones(1))
        return True
    versions = []
    while not context.has_tensor("over"):
        tree = context.get_tensors("tree")
        assert tree["a"].unique().tolist() == tree[7][0].unique().tolist() == [tree[7][1]]
        versions.append(tree[7][1])
    return versions == sorted(versions)


def test_a_tree_is_read_whole_and_never_backwards():
    assert start_processes(rewrite_a_tree, 3).wait().returns == (True, True, True)


# ── with the launcher ────────────────────────────────────────────────────────────────────


def answer(rank, world_size):
    context = get_context()
    question = context.get_tensor("question")
    context.put_tensors("answer", {"twice": question * 2, "by": rank})


def test_the_launcher_puts_inputs_and_reads_results_until_it_closes():
    with start_processes(answer, 1) as context:
        context.put_tensor("question", torch.arange(5))
        result = context.get_tensors("answer")
        assert result["twice"].tolist() == [0, 2, 4, 6, 8]
        context.wait()
        assert context.keys() == ["answer", "question"]
        assert context.get_tensors("answer")["by"] == 0
        context.put_tensor("after", torch.ones(2))
        assert context.get_tensor("after").tolist() == [1, 1]
        assert context.delete_tensor("after") is True
        assert context.delete_tensor("after") is False
        assert not context.has_tensor("after")
    with pytest.raises(StoreClosedError, match="closed with its context"):
        context.get_tensor("answer")
    context.close()  # harmless


def test_what_was_got_outlives_the_context():
    with start_processes(answer, 1) as context:
        context.put_tensor("question", floats(LARGE, 3))
        got = context.get_tensors("answer")["twice"]
    assert got.unique().tolist() == [6]


def test_a_context_that_is_collected_gives_its_memory_back(script):
    """Seen from outside, in a process of its own: the agent's shared memory shrinks."""
    program = script(
        """
import gc, os, time, phalanx, psutil, torch

def work(rank, world_size):
    pass

def shared():  # bytes of shared memory that the agent has open
    (agent,) = [p for p in psutil.Process().children() if "phalanx.agent" in " ".join(p.cmdline())]
    files = [f"/proc/{agent.pid}/fd/{n}" for n in os.listdir(f"/proc/{agent.pid}/fd")]
    blocks = [os.stat(f).st_blocks for f in files if "phalanx-tensors" in os.readlink(f)]
    return 512 * sum(blocks)

gc.disable()  # the last reference is enough
context = phalanx.start_processes(work, 1, preload=())
context.put_tensor("large", torch.ones(8 << 20))
context.wait()
assert shared() >= 32 << 20, shared()
del context
until = time.monotonic() + 10
while shared() and time.monotonic() < until:
    time.sleep(0.01)
print("left", shared())
"""
    )
    assert program.finish().stdout.strip() == "left 0"


def test_deleting_gives_memory_back_to_the_system():
    limit = 64 * MIB
    with idle_run(store_limit=limit) as context:
        for number in range(6):
            context.put_tensor(f"key {number}", floats(8 * MIB, number))
        for number in range(6):
            context.delete_tensor(f"key {number}")
        assert shared_bytes_of_agent() <= limit // 4


def shared_bytes_of_agent() -> int:
    total = 0
    for child in psutil.Process().children():
        if "phalanx.agent" not in " ".join(child.cmdline()):
            continue
        folder = f"/proc/{child.pid}/fd"
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if "phalanx-tensors" in os.readlink(f"{folder}/{name}"):
                    total += 512 * os.stat(f"{folder}/{name}").st_blocks
    return total


def test_a_second_run_has_a_store_of_its_own():
    with idle_run() as first, idle_run() as second:
        first.put_tensor("key", torch.ones(1))
        assert second.keys() == []


# ── what outlives a worker ───────────────────────────────────────────────────────────────


def count_through_crashes(rank, world_size, num_bytes):
    context = get_context()
    context.add_tensor(f"lives of {rank}", floats(num_bytes, 1))
    if rank == 1 and context.restart_count < 3:
        os.kill(os.getpid(), signal.SIGKILL)


@BOTH_SIZES
@pytest.mark.parametrize("restart", ["group", "worker"])
def test_values_survive_a_worker(num_bytes, restart):
    args = (num_bytes,)
    context = start_processes(count_through_crashes, 2, args=args, restart=restart, max_restarts=3)
    with context:
        context.wait()
        assert context.get_tensor("lives of 1").unique().tolist() == [4]
        others = context.get_tensor("lives of 0").unique().tolist()
    assert others == [1] if restart == "worker" else 1 <= others[0] <= 4


def commit_and_fall(rank, world_size):
    context = get_context()
    found = context.get_committed_tensors("state")
    first = 0 if found is None else found[0] + 1
    for step in range(first, 10):
        if (rank, step, context.restart_count) == (1, 6, 0):
            while context.get_committed_tensors("state") is None:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)  # rank 0 may have committed step 6
        tree = {"weights": floats(LARGE, step), "rank": rank, "step": step}
        context.commit_tensors("state", tree, version=step)
    return first, found if found is None else (found[1]["rank"], found[1]["step"])


def test_resuming_from_the_newest_version_that_all_ranks_have_committed():
    with start_processes(commit_and_fall, 2, max_restarts=1) as context:
        (first, found), (other_first, other_found) = context.wait().returns
        assert first == other_first
        assert 1 <= first <= 6
        assert found == (0, first - 1)
        assert other_found == (1, first - 1)
        version, tree = context.get_committed_tensors("state", rank=1)
        assert (version, tree["rank"], tree["step"]) == (9, 1, 9)
        assert context.keys() == ["state"]


def commit_an_old_version(rank, world_size):
    context = get_context()
    context.commit_tensors("state", {"step": 3}, version=3)
    with pytest.raises(StoreError, match="not newer than version 3"):
        context.commit_tensors("state", {"step": 3}, version=3)
    for bad in (-1, 1.5, True, "4"):
        with pytest.raises(TensorError, match="whole number"):
            context.commit_tensors("state", {}, version=bad)


def test_versions_only_rise():
    context = start_processes(commit_an_old_version, 1)
    context.wait()
    with pytest.raises(NotAWorkerError):
        context.commit_tensors("state", {}, version=7)


# ── who uses it ──────────────────────────────────────────────────────────────────────────


class FromTheStore:
    """A dataset whose items DataLoader workers, forks of the worker, read from the store."""

    def __init__(self, context, num_bytes):
        self.context = context
        self.num_bytes = num_bytes

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.context.add_tensor("loads", torch.ones(1))
        self.context.put_tensor(f"loaded {index}", floats(self.num_bytes, index))
        return self.context.get_tensor("data")[index]


def load_from_forks(rank, world_size, num_bytes):
    context = get_context()
    if rank == 0:
        context.put_tensor(
            "data", torch.arange(8.0).repeat_interleave(num_bytes // 4).reshape(8, -1)
        )
    context.barrier()
    before = context.get_tensor("data")
    items = torch.utils.data.DataLoader(FromTheStore(context, num_bytes), num_workers=2)
    rows = torch.cat(list(items))
    assert rows.equal(before)
    context.put_tensor(f"mine {rank}", rows)  # the parent's own segments are still its own
    return context.get_tensor(f"mine {rank}").equal(before)


@BOTH_SIZES
def test_forked_loader_workers_use_it(num_bytes):
    with start_processes(load_from_forks, 2, args=(num_bytes,)) as context:
        assert context.wait().returns == (True, True)
        assert context.get_tensor("loads").item() == 16
        assert context.get_tensor("loaded 5").unique().tolist() == [5]


def use_from_threads(rank, world_size, num_bytes):
    context = get_context()
    wrong = []

    def work(thread):
        for turn in range(20):
            key = f"{rank}/{thread}"
            value = 100 * rank + 10 * thread + turn
            context.put_tensor(key, floats(num_bytes, value))
            if context.get_tensor(key).unique().tolist() != [value]:
                wrong.append((thread, turn))
            context.add_tensor("sum", torch.ones(3))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return wrong


@BOTH_SIZES
def test_several_threads_use_it(num_bytes):
    with start_processes(use_from_threads, 2, args=(num_bytes,)) as context:
        assert context.wait().returns == ([], [])
        assert context.get_tensor("sum").tolist() == [240, 240, 240]


def use_while_updating(rank, world_size):
    context = get_context()
    context.put_tensor("a", torch.ones(1))
    context.put_tensor("b", torch.ones(1))

    def nested(tensor):
        assert context.get_tensor("a").item() == 1  # reading is fine
        context.update_tensor("b", lambda b: b + 1)  # another key, too
        for use in (context.put_tensor, context.add_tensor):
            with pytest.raises(StoreError, match="by this very thread"):
                use("a", torch.ones(1))
        with pytest.raises(StoreError, match="by this very thread"):
            context.delete_tensor("a")
        return tensor + context.get_tensor("b")

    return context.update_tensor("a", nested).item(), context.get_tensor("b").item()


def test_inside_an_update_other_keys_work_and_the_same_says_why_not():
    assert start_processes(use_while_updating, 1).wait().returns == ((3.0, 2.0),)


def leave_mapped_and_fall(rank, world_size):
    context = get_context()
    if context.restart_count < 3:
        kept = [context.get_tensor("value") for _ in range(5)]
        pid = os.fork()  # a child that holds the mappings after its parent's end
        if pid == 0:
            time.sleep(60)
        assert kept[0][0] == context.restart_count
        context.put_tensor("value", floats(LARGE, context.restart_count + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return context.get_tensor("value").unique().tolist()


def test_readers_that_fall_and_their_forks_leave_no_memory_behind():
    options = {"max_restarts": 3, "store_limit": 8 * MIB}
    with start_processes(leave_mapped_and_fall, 1, **options) as context:
        context.put_tensor("value", floats(LARGE, 0))
        assert context.wait().returns == ([3.0],)
        for turn in range(20):  # all of the store is there for others again
            context.put_tensor("value", floats(LARGE, turn))


def without_leases(rank, world_size):
    context = get_context()
    kept = []
    for turn in range(10):
        context.put_tensor(f"{rank}", floats(LARGE, turn))
        kept.append(context.get_tensor(f"{rank}"))
    return [tensor.unique().tolist() for tensor in kept]


def test_a_kernel_without_leases_reuses_nothing(run_script):
    """The fallback, with the Linux way switched off, in an agent of its own."""
    done = run_script(
        """
import phalanx
from tests.ranks.test_tensors import without_leases
with phalanx.start_processes(without_leases, 2, store_limit=64 << 20) as context:
    print(context.wait().returns)
""",
        env={"PHALANX_WITHOUT_LEASES": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.strip() == str(([[float(n)] for n in range(10)],) * 2), done.stderr


# ── bad input ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "1 to 1,024 bytes, not 0"),
        ("x" * MIB, r"not 1,048,576 \('xxxx"),
        ("ü" * 513, "not 1,026"),
        (7, "must be a string, not 7"),
        (None, "must be a string, not None"),
        (b"key", "must be a string, not b'key'"),
        ("\ud800", "no valid text"),
    ],
)
def test_a_key_that_is_no_key(key, message):
    one = torch.ones(1)
    with idle_run() as context:
        for use in (
            lambda: context.put_tensor(key, one),
            lambda: context.get_tensor(key),
            lambda: context.update_tensor(key, lambda old: old),
            lambda: context.add_tensor(key, one),
            lambda: context.delete_tensor(key),
            lambda: context.has_tensor(key),
            lambda: context.put_tensors(key, {}),
            lambda: context.get_tensors(key),
            lambda: context.get_committed_tensors(key),
        ):
            with pytest.raises(TensorError, match=message):
                use()
        assert context.keys() == []


def test_a_tensor_that_has_no_plain_bytes():
    with idle_run() as context:
        for tensor, message in (
            ([1.0], "no torch.Tensor"),
            (torch.eye(3).to_sparse(), r"sparse: put to_dense\(\)"),
            (torch.ones(2, device="meta"), "meta device"),
        ):
            with pytest.raises(TensorError, match=message):
                context.put_tensor("key", tensor)
            with pytest.raises(TensorError, match=message):
                context.add_tensor("key", tensor)
        with pytest.raises(TensorError, match=r"\['a'\]\[1\] is a set"):
            context.put_tensors("key", {"a": [1, set()]})
        assert context.keys() == []


def test_what_nobody_puts_times_out_and_tells_what_is_there():
    with idle_run() as context:
        context.put_tensor("weights/layer-1", torch.ones(1))
        with pytest.raises(StoreTimeoutError) as caught:
            context.get_tensor("weights/layer_1", timeout=0.05)
        text = str(caught.value)
        assert "nobody has put 'weights/layer_1' within 0.05 s" in text
        assert "keys like it: 'weights/layer-1'" in text
        assert "alive: rank(s) 0 of 1" in text
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(StoreTimeoutError):
            context.update_tensor("nothing", lambda old: old, timeout=0)
        for bad in (-1, float("nan"), "soon", True):
            with pytest.raises(SpecError, match="timeout"):
                context.get_tensor("key", timeout=bad)


def wait_for_nothing(rank, world_size):
    pass


def test_after_the_run_nobody_waits_for_a_worker():
    with start_processes(wait_for_nothing, 1, preload=()) as context:
        waiting = threading.Timer(0, lambda: None)
        waiting.start()
        with pytest.raises(StoreTimeoutError, match="nobody has put 'result'"):
            context.get_tensor("result")  # however long it would have waited
        waiting.join()


def test_a_full_store_says_so_and_loses_nothing():
    with idle_run(store_limit=16 * MIB) as context:
        context.put_tensor("kept", floats(7 * MIB, 1))
        for put in (
            lambda: context.put_tensor("more", floats(12 * MIB, 2)),
            lambda: context.put_tensor("huge", torch.zeros(1).expand(1 << 40)),  # 4 TiB
            lambda: context.put_tensors("tree", [floats(12 * MIB, 2)]),
            lambda: context.add_tensor("sum", floats(12 * MIB, 2)),
            lambda: context.put_tensor("kept", floats(12 * MIB, 2)),
        ):
            with pytest.raises(StoreFullError, match=r"limit is 16,777,216 bytes"):
                put()
        assert context.keys() == ["kept"]
        assert context.get_tensor("kept").unique().tolist() == [1]
        context.delete_tensor("kept")
        context.put_tensor("more", floats(12 * MIB, 2))
        assert context.get_tensor("more").unique().tolist() == [2]


def sizes_by_turns(rank, world_size):
    context = get_context()
    for turn in range(30):
        num_bytes = [LARGE // 8, LARGE // 8, LARGE // 16, SMALL][turn % 4]
        key = f"{rank}/{turn % 3}"
        context.put_tensor(key, floats(num_bytes, turn))
        got = context.get_tensor(key)
        assert got.unique().tolist() == [turn]
        assert got.nbytes == num_bytes
    return len(os.listdir("/proc/self/fd"))


def test_puts_of_several_sizes_by_turns():
    one, other = start_processes(sizes_by_turns, 2).wait().returns
    assert max(one, other) < 40, "descriptors don't pile up"


def test_more_values_than_descriptors(run_script):
    """The store is full then, but what is there can be read, and workers start again."""
    done = run_script(
        """
import os, resource, phalanx, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
def work(rank, world_size):
    context = phalanx.get_context()
    if context.restart_count:
        return len(context.keys()), context.get_tensor("0").sum().item()
    try:
        for number in range(400):
            context.put_tensor(str(number), torch.ones(17_000))
    except phalanx.StoreFullError as error:
        assert "file descriptors" in str(error), error
    assert context.get_tensor("100").sum() == 17_000
    context.put_tensor("small", torch.ones(1))
    os._exit(3)
print(phalanx.start_processes(work, 1, max_restarts=1).wait().returns)
"""
    )
    assert done.stdout.strip() == "((201, 17000.0),)", done.stderr


def put_many(context):
    for number in range(10_000):
        context.put_tensor(f"key {number}", floats(2048, number))


def test_many_small_values_fill_it_too():
    with idle_run(store_limit=MIB) as context:
        with pytest.raises(StoreFullError):
            put_many(context)
        assert 100 < len(context.keys()) < 512
        assert context.get_tensor("key 99").unique().tolist() == [99]


@pytest.mark.parametrize("limit", [0, -5, 1000, "2 GB", True, 1.5])
def test_a_limit_that_is_none(limit):
    with pytest.raises(SpecError, match="store_limit"):
        start_processes(wait_for_nothing, 1, store_limit=limit)


@pytest.mark.parametrize("wrong", [None, 7, "tensor", {"a": 1}])
def test_an_update_must_return_a_tensor(wrong):
    with idle_run() as context:
        context.put_tensor("key", torch.ones(2))
        with pytest.raises(TensorError, match=r"update_tensor\('key'\): the function returned"):
            context.update_tensor("key", lambda _: wrong)
        with pytest.raises(ZeroDivisionError):
            context.update_tensor("key", lambda _: 1 / 0)
        with pytest.raises(TensorError, match="sparse"):
            context.update_tensor("key", lambda old: old.to_sparse())
        assert context.get_tensor("key").tolist() == [1, 1]
        assert context.update_tensor("key", lambda old: old + 1).tolist() == [2, 2]


def test_what_can_not_be_added():
    with idle_run() as context:
        context.put_tensor("key", torch.ones(2, dtype=torch.int64))
        context.put_tensors("tree", {"a": torch.ones(1)})
        with pytest.raises(TensorError, match=r"shape \(3,\) can't be added to the \(2,\)"):
            context.add_tensor("key", torch.ones(3))
        with pytest.raises(TensorError, match="does not fit into"):
            context.add_tensor("key", torch.ones(2))
        for use in (
            lambda: context.add_tensor("tree", torch.ones(1)),
            lambda: context.get_tensor("tree"),
            lambda: context.update_tensor("tree", lambda old: old),
        ):
            with pytest.raises(TensorError, match="tree of tensors"):
                use()
        assert context.get_tensor("key").tolist() == [1, 1]
        assert context.add_tensor("key", torch.ones(2, dtype=torch.int8)).dtype == torch.int64
        assert context.get_tensors("key").tolist() == [2, 2]


def use_after_the_end(rank, world_size):
    get_context().put_tensor("mine", torch.ones(1))
    thread = threading.Thread(target=ask_until_closed, args=(get_context(),), daemon=True)
    thread.start()


def ask_until_closed(context):
    with contextlib.suppress(StoreClosedError):
        get_for_ever(context, "mine")


def get_for_ever(context, key):
    while True:
        context.get_tensor(key)


def test_a_worker_that_ends_while_its_threads_ask_harms_nothing():
    with start_processes(use_after_the_end, 3) as context:
        context.wait()
        assert context.get_tensor("mine").item() == 1


def test_an_interrupted_wait_leaves_the_next_answer_to_the_next_question():
    """Ctrl-C while waiting for a tensor must not shift answers by one."""
    with idle_run() as context:
        context.put_tensor("there", torch.ones(1))
        main = threading.main_thread().ident
        assert main is not None
        raise_async = ctypes.pythonapi.PyThreadState_SetAsyncExc
        caught = []

        def wait():
            try:
                context.get_tensor("missing", timeout=2)
            except KeyboardInterrupt:
                caught.append("interrupted")
            except StoreTimeoutError:
                caught.append("late")

        thread = threading.Thread(target=wait)
        thread.start()
        raise_async(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
        thread.join(60)
        context.put_tensor("missing", torch.zeros(1))
        assert context.get_tensor("there").item() == 1
        assert context.get_tensor("missing").item() == 0
        assert caught


def test_a_killed_agent_is_told():
    context = start_processes(wait_for_stop, 1, preload=())
    context.put_tensor("key", floats(LARGE, 5))
    kept = context.get_tensor("key")
    (agent,) = {
        child.pid
        for child in psutil.Process().children()
        if "phalanx.agent" in " ".join(child.cmdline())
    }
    os.kill(agent, signal.SIGKILL)
    with pytest.raises(StoreClosedError, match="the agent has ended"):
        get_for_ever(context, "key")
    assert kept.unique().tolist() == [5]
    with pytest.raises(Exception, match="agent"):
        context.wait()
    del context
    gc.collect()
    wait_until(lambda: not any(map(is_ours, psutil.Process().children(recursive=True))))


def is_ours(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        ours = "phalanx." in " ".join(process.cmdline())  # not multiprocessing's tracker
        return ours and process.status() != psutil.STATUS_ZOMBIE
    return False

"""The shm backend: every collective against what it must give, and what happens when it can't."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from phalanx import WorkerFailedError, get_context, start_processes
from phalanx.tensors.sync.shm.backend import why_unsupported

pytestmark = pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported()))

SIZES = (0, 1, 7, 1000, 65_537, 1_000_003)


def init(**options):
    import torch.distributed as dist

    dist.init_process_group("shm", **options)
    return dist


def values(rank, numel, dtype):
    """Small whole numbers, so that sums are exact in every dtype."""
    import torch

    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randint(0, 4, (numel,), generator=generator).to(dtype)


def reduced(name, inputs):
    import torch

    total = inputs[0].clone()
    for other in inputs[1:]:
        operation = {
            "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum,
            "MAX": torch.maximum, "BAND": torch.bitwise_and, "BOR": torch.bitwise_or,
            "BXOR": torch.bitwise_xor,
        }[name]  # fmt: skip
        total = operation(total, other)
    if name == "AVG":
        exact = total.to(torch.float64) / len(inputs)
        total = (exact if total.is_floating_point() else exact.trunc()).to(total.dtype)
    return total


def reductions(rank, world_size):
    import torch

    dist = init()
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    wholes = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    cases = [(dtype, name) for dtype in floats for name in ("SUM", "AVG", "PRODUCT", "MAX")]
    cases += [(dtype, name) for dtype in wholes for name in ("SUM", "MIN", "BAND", "BOR", "BXOR")]
    cases += [(torch.complex64, "SUM"), (torch.bool, "MAX"), (torch.bool, "SUM")]
    cases += [(torch.int32, "AVG"), (torch.float32, "MIN")]
    for dtype, name in cases:
        operation = getattr(dist.ReduceOp, name)
        for numel in SIZES if dtype in (torch.float32, torch.bfloat16) else SIZES[:5]:
            inputs = [values(r, numel, dtype) for r in range(world_size)]
            expected = reduced(name, inputs)
            told = (dtype, name, numel)
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, op=operation)
            assert tensor.equal(expected), told
            root = numel % world_size
            tensor = inputs[rank].clone()
            dist.reduce(tensor, root, op=operation)
            assert tensor.equal(expected if rank == root else inputs[rank]), told
            parts = [values(10 * rank + i, numel, dtype) for i in range(world_size)]
            output = torch.empty_like(parts[0])
            dist.reduce_scatter(output, parts, op=operation)
            mine = [values(10 * r + rank, numel, dtype) for r in range(world_size)]
            assert output.equal(reduced(name, mine)), told
            output.zero_()
            dist.reduce_scatter_tensor(output, torch.cat(parts), op=operation)
            assert output.equal(reduced(name, mine)), told
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_reductions(world_size):
    start_processes(reductions, world_size).wait()


def movements(rank, world_size):
    import torch

    dist = init()
    ranks = range(world_size)
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16):
        for numel in SIZES:
            inputs = [values(r, numel, torch.float32).to(dtype) for r in ranks]
            raw = lambda tensor: tensor.contiguous().view(torch.uint8)  # noqa: E731
            told, root = (dtype, numel), numel % world_size
            tensor = inputs[rank].clone()
            dist.broadcast(tensor, root)
            assert raw(tensor).equal(raw(inputs[root])), told
            outputs = [torch.empty(numel, dtype=dtype) for _ in ranks]
            dist.all_gather(outputs, inputs[rank])
            assert all(raw(a).equal(raw(b)) for a, b in zip(outputs, inputs, strict=True)), told
            flat = torch.empty(numel * world_size, dtype=dtype)
            dist.all_gather_into_tensor(flat, inputs[rank])
            assert raw(flat).equal(torch.cat([raw(tensor) for tensor in inputs])), told
            outputs = [torch.empty(numel, dtype=dtype) for _ in ranks]
            dist.gather(inputs[rank], outputs if rank == root else None, root)
            if rank == root:
                assert all(raw(a).equal(raw(b)) for a, b in zip(outputs, inputs, strict=True))
            output = torch.empty(numel, dtype=dtype)
            dist.scatter(output, inputs if rank == root else None, root)
            assert raw(output).equal(raw(inputs[rank])), told
    for numel in (0, 1, 5, 70_001):
        counts = [[numel * (i + 2 * j) for j in ranks] for i in ranks]  # [source][destination]
        sent = [torch.full((counts[rank][j], 2), 10.0 * rank + j) for j in ranks]
        got = [torch.empty(counts[i][rank], 2) for i in ranks]
        dist.all_to_all(got, sent)
        assert all((got[i] == 10 * i + rank).all() for i in ranks)
        whole = torch.empty(sum(counts[i][rank] for i in ranks), 2)
        dist.all_to_all_single(
            whole, torch.cat(sent), [counts[i][rank] for i in ranks], counts[rank]
        )
        assert whole.equal(torch.cat(got))
        equal = torch.empty(numel * world_size)
        dist.all_to_all_single(equal, torch.arange(world_size).repeat_interleave(numel) + 0.0)
        assert (equal == rank).all()
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in ranks]
    box = ["from the root"] if rank == world_size - 1 else [None]
    dist.broadcast_object_list(box, src=world_size - 1)
    assert box == ["from the root"]
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_movements(world_size):
    start_processes(movements, world_size).wait()


def odd_tensors(rank, world_size):
    import torch

    dist = init()
    for shape in ((3, 5), (300, 500)):
        base = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + rank
        expected = sum(base - rank + r for r in range(world_size)).t()
        tensor = base.clone().t()
        dist.all_reduce(tensor)
        assert tensor.equal(expected)
        assert not tensor.is_contiguous()
        tensor = base.clone().t()
        dist.broadcast(tensor, 1)
        assert tensor.equal((base - rank + 1).t())
        outputs = [torch.empty(shape).t() for _ in range(world_size)]
        dist.all_gather(outputs, base.t())
        assert all(o.equal((base - rank + r).t()) for r, o in enumerate(outputs))
        strided = torch.empty(shape[0], 2 * shape[1])[:, ::2]
        dist.reduce_scatter(strided, [base] * world_size)
        assert strided.t().equal(expected)
    conjugate = torch.full((4,), 1j * (rank + 1)).conj()
    outputs = [torch.empty(4, dtype=conjugate.dtype) for _ in range(world_size)]
    dist.group.WORLD.allgather([outputs], [conjugate]).wait()  # dist.all_gather takes none
    assert outputs[1].equal(torch.full((4,), -2j))
    parameter = torch.nn.Parameter(torch.full((70_000,), float(rank)))
    dist.all_reduce(parameter)
    dist.broadcast(parameter, 0)
    assert (parameter == 1).all()
    with torch.inference_mode():
        inferred = torch.full((10,), float(rank))
    dist.all_reduce(inferred)
    assert (inferred == 1).all()
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == 1
    both = [torch.ones(3), torch.ones(200_000)]
    dist.all_reduce_coalesced(both)
    assert all((tensor == 2).all() for tensor in both)
    dist.destroy_process_group()


def test_strides_conjugates_parameters_inference_tensors():
    start_processes(odd_tensors, 2).wait()


def what_it_lacks(rank, world_size):
    import torch

    dist = init()
    told = []
    for attempt in (
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
        lambda: dist.all_reduce(torch.ones(2).to_sparse()),
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)),
        lambda: dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(2.0)),
    ):
        with pytest.raises(NotImplementedError) as caught:
            attempt()
        told.append(str(caught.value))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # the group is as good as before
    dist.destroy_process_group()
    return told, tensor.sum().item()


def test_what_it_lacks_it_says_and_names_gloo():
    for told, total in start_processes(what_it_lacks, 2).wait().returns:
        assert all("gloo" in text for text in told)
        assert total == 4


def many_asynchronous(rank, world_size):
    import torch

    dist = init()
    tensor = torch.ones(1, dtype=torch.int64)
    works, gathered = [], []
    for step in range(50):
        works.append(dist.all_reduce(tensor, async_op=True))  # each depends on the one before
        if step % 10 == 0:
            gathered.append([torch.empty(100_000) for _ in range(world_size)])
            source = torch.full((100_000,), float(rank + step))
            works.append(dist.all_gather(gathered[-1], source, async_op=True))
        if step % 20 == 0:
            dist.barrier()
            assert all(work.is_completed() for work in works), "a blocking one came before"
        tensor = tensor.remainder_(1009) if step % 20 == 0 else tensor
    for work in works:
        work.wait()
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    (result,) = future.wait()
    assert result.tolist() == [world_size] * 3
    for step, parts in zip(range(0, 50, 10), gathered, strict=True):
        assert [part[0].item() for part in parts] == [r + step for r in range(world_size)]
    dist.destroy_process_group()
    return tensor.item()


def test_asynchronous_ones_run_in_the_order_of_their_issue():
    assert len(set(start_processes(many_asynchronous, 3).wait().returns)) == 1


def messages(rank, world_size):
    import torch

    dist = init()
    peer = 1 - rank
    for numel in (0, 1, 100_000, 1_000_000):
        mine = torch.full((numel,), float(rank))
        theirs = torch.empty(numel)
        # Both send first, and more than the mailbox holds.
        works = [dist.isend(mine, peer), dist.irecv(theirs, peer)]
        for work in works:
            work.wait()
        assert (theirs == peer).all()
        theirs.zero_()
        order = [
            dist.P2POp(dist.irecv, theirs, peer),
            dist.P2POp(dist.isend, mine, peer),
        ]
        for work in dist.batch_isend_irecv(order):
            work.wait()
        assert (theirs == peer).all()
    first, second = torch.empty(10), torch.empty(300_000)
    if rank == 0:
        dist.send(torch.ones(300_000), 1, tag=1)
        dist.send(torch.zeros(10), 1, tag=2)
    else:
        dist.recv(first, 0, tag=2)  # overtakes
        dist.recv(second, 0, tag=1)
        assert not first.any()
        assert second.all()
    if rank == 0:
        assert dist.recv(first) == 1
        assert (first == 5).all()
        with pytest.raises(ValueError, match="rank 1 sent 12 bytes where rank 0 receives 40"):
            dist.recv(first, 1)
    else:
        dist.send(torch.full((10,), 5.0), 0)
        dist.send(torch.ones(3), 0)
    send = dist.isend(torch.ones(1_000_000), peer)
    dist.barrier()  # a collective does not wait for a message that nobody takes yet
    got = torch.empty(1_000_000)
    dist.recv(got, peer)
    send.wait()
    dist.destroy_process_group()


def own_backend(rank, world_size):
    import torch

    dist = init()
    group = dist.group.WORLD
    for device in (torch.device("cpu"), "cpu"):
        backend = group._get_backend(device)
        assert not backend.supports_coalescing
        assert not backend.supports_splitting
    with pytest.raises(RuntimeError, match="CPU tensors"):
        group._get_backend(torch.device("cuda"))
    dist.destroy_process_group()


def test_torch_may_ask_the_group_for_its_backend():
    """Torch 2.14 does, before a batch of messages, and of each device when a group ends."""
    start_processes(own_backend, 2).wait()


def test_messages():
    start_processes(messages, 2).wait()


def random_operations(rank, world_size, seed):
    import torch

    dist = init()
    gloo = dist.new_group(backend="gloo")
    dice = random.Random(seed)
    for _ in range(60):
        numel = dice.choice((1, 3, 100, 16_384, 16_385, 40_000, 300_000))
        root, kind = dice.randrange(world_size), dice.randrange(6)
        dtype = dice.choice((torch.float32, torch.int32, torch.float64))
        tensors = []
        for group in (dist.group.WORLD, gloo):
            generator = torch.Generator().manual_seed(dice.randrange(1000) if not tensors else 0)
            if not tensors:
                source = torch.randint(-50, 50, (numel,), generator=generator).to(dtype) * (
                    rank + 1
                )
            tensor = source.clone()
            output = torch.zeros(numel * world_size, dtype=dtype)
            if kind == 0:
                dist.all_reduce(tensor, group=group)
            elif kind == 1:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
            elif kind == 2:
                dist.broadcast(tensor, root, group=group)
            elif kind == 3:
                dist.all_gather_into_tensor(output, tensor, group=group)
            elif kind == 4:
                dist.reduce_scatter_tensor(tensor, source.repeat(world_size), group=group)
            else:
                dist.all_to_all_single(output, source.repeat(world_size), group=group)
            tensors.append(torch.cat([tensor, output]))
        assert tensors[0].equal(tensors[1]), (kind, numel, dtype)
    dist.destroy_process_group()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_sequence_gives_what_gloo_gives(seed):
    start_processes(random_operations, 3, args=(seed,)).wait()


def more_ranks_than_cores(rank, world_size):
    import torch

    dist = init()
    total = 0.0
    for step in range(30):
        tensor = torch.full((1 + 20_000 * (step % 4),), float(rank + step))
        dist.all_reduce(tensor)
        total += tensor[-1].item()
    bits = torch.randn(100_001, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(bits)
    dist.destroy_process_group()
    return total, bits.sum().item()


def test_more_ranks_than_cores_and_the_same_bits_on_all():
    returns = start_processes(more_ranks_than_cores, 8).wait().returns
    assert len(set(returns)) == 1
    assert returns[0][0] == sum(8 * step + 28 for step in range(30))
    assert start_processes(more_ranks_than_cores, 8).wait().returns == returns


def subgroups(rank, world_size):
    import torch

    dist = init()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = dist.new_group([3, 1])
    mine = halves[rank // 2]
    for step in range(20):
        small, large = torch.full((3,), float(rank)), torch.full((100_000,), float(rank))
        works = [
            dist.all_reduce(large, group=mine, async_op=True),
            dist.all_reduce(small, async_op=True),
        ]
        if rank in (1, 3):
            other = torch.full((3,), float(step))
            dist.broadcast(other, 3, group=crossed)
        for work in works:
            work.wait()
        assert (large == (1 if rank < 2 else 5)).all()
        assert (small == 6).all()
    dist.destroy_process_group(mine)
    dist.barrier()
    dist.destroy_process_group()


def test_subgroups_at_once():
    start_processes(subgroups, 4).wait()


def again_and_again(rank, world_size):
    import threading

    import torch

    before = None
    for _ in range(5):
        dist = init()
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
        work.wait()
        dist.destroy_process_group()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("phalanx-")], names
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        held = [os.readlink(link) for link in links if os.path.lexists(link)]
        assert not [name for name in held if "phalanx-group" in name or "pidfd" in name], held
        mapped = sum("phalanx-group" in line for line in open("/proc/self/maps"))
        before = mapped if before is None else before
        assert mapped <= before
    return mapped


def test_a_destroyed_group_leaves_nothing_and_the_next_one_works():
    shared = set(os.listdir("/dev/shm"))
    assert start_processes(again_and_again, 2).wait().returns == (0, 0)
    assert set(os.listdir("/dev/shm")) <= shared


def train_ddp(rank, world_size, backend):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(backend)
    torch.manual_seed(rank)  # DDP broadcasts rank 0's
    layers = [torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.BatchNorm1d(300)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(300, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 20)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    del model, optimizer  # after its group is gone, DDP over Gloo can hang in its destructor
    dist.destroy_process_group()
    return weights


def test_ddp_gives_what_it_gives_over_gloo():
    shm = start_processes(train_ddp, 2, args=("shm",)).wait().returns
    gloo = start_processes(train_ddp, 2, args=("gloo",)).wait().returns
    assert shm[0].equal(shm[1])
    assert shm[0].equal(gloo[0])


def train_fsdp(rank, world_size, backend):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 33), torch.nn.ReLU(), torch.nn.Linear(33, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 10)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    dist.destroy_process_group()
    return weights


def test_fsdp2_runs_and_all_ranks_agree():
    import torch

    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("this torch, as 2.6, has no FSDP2 on the CPU, over Gloo neither")
    shm = start_processes(train_fsdp, 2, args=("shm",)).wait().returns
    gloo = start_processes(train_fsdp, 2, args=("gloo",)).wait().returns
    assert shm[0].equal(shm[1])
    assert shm[0].allclose(gloo[0])


def loader_workers(rank, world_size):
    import torch

    dist = init()
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2)
    seen = 0
    for batch in loader:  # forks, while the group has a thread
        work = dist.all_reduce(batch, async_op=True)
        work.wait()
        seen += batch.item()
    if os.fork() == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            os._exit(7 if "forked process" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    dist.barrier()
    dist.destroy_process_group()
    return seen


def test_forked_children_do_not_disturb():
    assert start_processes(loader_workers, 2).wait().returns == (56, 56)


# ── when something goes wrong ────────────────────────────────────────────────────────────


def die_in_the_middle(rank, world_size, way, numel):
    import torch

    dist = init()
    tensor = torch.ones(numel)
    dist.all_reduce(tensor)
    if rank == 1:
        if way == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the cause")
    try:
        work = dist.all_reduce(tensor, async_op=way == "async")
        if work is not None:
            work.wait()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("numel", [10, 1_000_000])
@pytest.mark.parametrize("way", ["signal", "exception", "async"])
def test_the_dead_rank_is_the_cause_and_the_others_are_effects(way, numel):
    with pytest.raises(WorkerFailedError) as caught:
        start_processes(die_in_the_middle, 3, args=(way, numel)).wait()
    root, *others = caught.value.failures
    assert root.rank == 1
    assert root.kind == "primary"
    assert {failure.kind for failure in others} <= {"effect", "stopped"}


def survive_a_peer(rank, world_size, way):
    """Rank 2 is a plain child of rank 0's, so that nobody stops the others."""
    import torch
    import torch.multiprocessing as mp

    queue = mp.get_context("spawn").SimpleQueue()
    port = os.environ["MASTER_PORT"]
    mp.spawn(_survivor, args=(port, way, queue), nprocs=3, join=False)
    told = [queue.get() for _ in range(2)]
    torch.zeros(1)
    return told


def _survivor(rank, port, way, queue):
    import torch
    import torch.distributed as dist

    from phalanx import register_shm_backend

    register_shm_backend()
    register_shm_backend()
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("shm", store=store, rank=rank, world_size=3)
    dist.all_reduce(torch.ones(1))
    if rank == 2:
        if way == "left":
            dist.destroy_process_group()
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if way == "recv":
            dist.recv(torch.ones(1), 2)
        else:
            dist.all_reduce(torch.ones(1_000_000 if way == "large" else 1))
    except RuntimeError as error:
        queue.put(f"{type(error).__name__}: {error}")
    try:
        dist.barrier()
    except RuntimeError:
        return
    raise AssertionError("a broken group went on")


@pytest.mark.parametrize("way", ["small", "large", "left", "recv"])
def test_the_error_names_the_rank_that_is_gone(way):
    (told,) = start_processes(survive_a_peer, 1, args=(way,)).wait().returns
    for text in told:
        assert text.startswith("PeerLostError: rank 2 (pid ")
        assert ("left the group" if way == "left" else "died") in text
        assert ("recv" if way == "recv" else "all_reduce") in text


def call_wrongly(rank, world_size, case):
    import torch

    dist = init()
    dist.barrier()
    odd = rank == 1
    try:
        if case == "operation" and odd:
            dist.broadcast(torch.ones(4), 0)
        elif case == "root":
            dist.broadcast(torch.ones(4), int(odd))
        elif case == "size":
            dist.all_reduce(torch.ones(100_000 if odd else 4))
        elif case == "dtype":
            dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32))
        else:
            dist.all_reduce(torch.ones(4))
    except ValueError as error:
        told = str(error)
    with pytest.raises(RuntimeError):
        dist.barrier()
    get_context().barrier() if False else None
    return told


@pytest.mark.parametrize("case", ["operation", "root", "size", "dtype"])
def test_a_mismatch_is_named_on_every_rank(case):
    words = {"operation": "broadcast", "root": "root 1", "size": "100,000", "dtype": "int32"}
    for rank, told in enumerate(start_processes(call_wrongly, 3, args=(case,)).wait().returns):
        assert words[case] in told
        assert "rank 1 called" in told or (rank == 1 and "where rank 1 called" in told)


def never_come(rank, world_size):
    from datetime import timedelta

    import torch

    dist = init(timeout=timedelta(seconds=1))
    dist.barrier()
    told = None
    if rank != 2:
        with pytest.raises(TimeoutError) as caught:
            dist.all_reduce(torch.ones(4))
        told = str(caught.value)
    else:
        time.sleep(2)
    return told


def test_a_timeout_names_the_rank_that_did_not_come():
    first, second, _ = start_processes(never_come, 3).wait().returns
    for told in (first, second):
        assert "rank 2 (pid " in told
        assert "all_reduce(SUM, 4 elements, float32) timed out" in told


def use_after_destruction(rank, world_size):
    import torch

    dist = init()
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    options = dist.AllreduceOptions()
    with pytest.raises(RuntimeError, match="destroyed"):
        group.allreduce([torch.ones(1)], options)
    dist.destroy_process_group()


def test_a_destroyed_group_says_so():
    start_processes(use_after_destruction, 2).wait()


OUTSIDE = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import phalanx

def work(rank, size):
    phalanx.register_shm_backend()
    dist.init_process_group("shm", init_method="file://" + sys.argv[1], rank=rank, world_size=size)
    tensor = torch.full((200_000,), float(rank))
    dist.all_reduce(tensor)
    assert (tensor == 3).all()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (3,), nprocs=3)
    print("done")
"""


def test_it_works_outside_phalanx(tmp_path):
    path = tmp_path / "outside.py"
    path.write_text(OUTSIDE)
    done = subprocess.run(
        [sys.executable, str(path), str(tmp_path / "store")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stderr


def uses_the_contexts_group(rank, world_size):
    context = get_context()
    for _ in range(3):
        context.barrier()
        assert not context.should_stop()
    return context.get_backend()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_auto_takes_it_on_one_machine(start_method):
    context = start_processes(uses_the_contexts_group, 2, start_method=start_method)
    assert context.wait().returns == ("shm", "shm")
    context = start_processes(uses_the_contexts_group, 2, 1, start_method=start_method)
    assert context.wait().returns == ("gloo", "gloo"), "two emulated machines"


def import_torch_late(rank, world_size):
    assert "torch" not in sys.modules
    import torch.distributed as dist

    dist.init_process_group("shm")
    dist.barrier()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_worker_that_imports_torch_late_has_it(start_method):
    start_processes(import_torch_late, 2, preload=(), start_method=start_method).wait()

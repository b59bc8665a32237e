"""Real process groups: torch's own, and the context's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from phalanx import WorkerFailedError, get_context, start_processes
from phalanx.testing import FaultInjector
from phalanx.values import events as ev

BOTH = pytest.mark.parametrize("start_method", ["forkserver", "spawn"])


def torchs_own_group(rank, world_size):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    assert dist.is_torchelastic_launched()
    dist.destroy_process_group()
    return tensor.item()


@BOTH
@pytest.mark.parametrize("world_size", [1, 4])
def test_init_process_group_just_works(start_method, world_size):
    result = start_processes(torchs_own_group, world_size, start_method=start_method).wait()
    assert set(result.returns) == {float(sum(range(world_size)))}


def both_groups(rank, world_size, order):
    import torch
    import torch.distributed as dist

    context = get_context()
    if order == "context first":
        context.barrier()
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo")
        context.barrier()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert not context.should_stop()
    assert context.get_backend() == "gloo"
    assert context.device == torch.device("cpu")
    return tensor.item()


@pytest.mark.parametrize("order", ["context first", "torch first"])
def test_the_contexts_group_and_torchs_do_not_collide(order):
    assert start_processes(both_groups, 2, args=(order,)).wait().returns == (2.0, 2.0)


def arrive_late(rank, world_size):
    time.sleep(0.3 * rank)
    before = time.monotonic()
    get_context().barrier()
    return before, time.monotonic()


def test_a_barrier_lets_nobody_through_before_all_have_come():
    times = start_processes(arrive_late, 3).wait().returns
    assert min(after for _, after in times) >= max(before for before, _ in times)


def loop_until_stopped(rank, world_size):
    context = get_context()
    step = 0
    while not context.should_stop():
        step += 1
        if step == 20:
            context.report(step=step)
    return step


def test_all_ranks_stop_at_the_same_step():
    context = start_processes(loop_until_stopped, 3)
    reports = 0
    for event in context.events():
        reports += isinstance(event, ev.WorkerReported)
        if reports == 3:
            context.shutdown()
            break
    steps = context.wait().returns
    assert len(set(steps)) == 1
    assert steps[0] >= 20


def ddp_with_loader_workers(rank, world_size):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(32, 2))
    sampler = torch.utils.data.DistributedSampler(data, world_size, rank)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    dist.destroy_process_group()
    return weights


def test_ddp_and_loader_workers_run_unchanged():
    first, second = start_processes(ddp_with_loader_workers, 2).wait().returns
    assert first.equal(second)


def reduce_for_ever(rank, world_size, injector):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        tensor = torch.ones(1)
        for step in range(10 if get_context().restart_count else 10_000_000):
            injector.check(step)
            dist.all_reduce(tensor)
    finally:
        dist.destroy_process_group()
    return get_context().restart_count


@pytest.mark.parametrize("by", ["exception", "signal"])
@pytest.mark.parametrize("culprit", [0, 2])
def test_the_culprit_is_named_not_its_victims(by, culprit):
    injector = FaultInjector().fail_at(culprit, 5, by=by)
    with pytest.raises(WorkerFailedError) as caught:
        start_processes(reduce_for_ever, 4, args=(injector,)).wait()
    root, *others = caught.value.failures
    assert root.rank == culprit
    assert root.kind == "primary"
    assert root.cause == by
    assert {failure.kind for failure in others} <= {"effect", "stopped"}


def test_the_group_comes_back_again_and_again():
    injector = FaultInjector()
    for generation in range(8):
        injector.fail_at(generation % 4, 5, by="signal", generation=generation)
    context = start_processes(reduce_for_ever, 4, args=(injector,), max_restarts=8)
    assert context.wait().returns == (8, 8, 8, 8)


def test_a_rank_that_hangs_is_stopped_with_the_run():
    injector = FaultInjector().fail_at(1, 3, by="hang")
    context = start_processes(reduce_for_ever, 2, args=(injector,))
    with pytest.raises(TimeoutError):
        context.wait(timeout=2)
    context.shutdown(grace=1)
    assert context.state == "stopped"


def make_a_group_and_fall(rank, world_size):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_restart_worker_with_a_group_says_to_use_group():
    context = start_processes(make_a_group_and_fall, 2, restart="worker", max_restarts=3)
    with pytest.raises(WorkerFailedError, match='restart="group"'):
        context.wait()
    assert context.restart_count == 0


def use_the_contexts_group(rank, world_size):
    get_context().barrier()


def test_restart_worker_has_no_barrier():
    with pytest.raises(WorkerFailedError, match='restart="worker" is for workers that share no'):
        start_processes(use_the_contexts_group, 2, restart="worker", max_restarts=3).wait()


def read_store(rank, world_size):
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    old = store.num_keys()
    store.set(f"key-{rank}-{get_context().restart_count}", "x")
    if get_context().restart_count == 0:
        get_context().barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return old


def test_every_generation_has_a_fresh_store_on_the_same_port():
    (old,) = start_processes(read_store, 1, max_restarts=1).wait().returns
    assert old <= 1, "torch's own key at most"


def record_decorated(rank, world_size):
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def inner():
        raise ValueError("recorded")

    try:
        inner()
    except ValueError:
        os._exit(1)  # as a script that handles it badly


def test_torchelastics_error_file_is_read():
    with pytest.raises(WorkerFailedError, match="recorded"):
        start_processes(record_decorated, 1).wait()


def torn_error_file(rank, world_size):
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    path.write_text('{"message": {"mess')
    os._exit(4)


def test_a_torn_error_file_harms_nothing():
    with pytest.raises(WorkerFailedError, match="exit code 4"):
        start_processes(torn_error_file, 1, preload=()).wait()


def name_the_backend(rank, world_size):
    return get_context().get_backend()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "shm"),
        ({"backend": "gloo"}, "gloo"),
        ({"backend": "shm"}, "shm"),
        ({"num_processes_per_machine": 1}, "gloo"),
    ],
)
def test_launcher_and_workers_name_the_same_backend(options, expected):
    context = start_processes(name_the_backend, 2, **options)
    assert context.get_backend() == expected
    assert context.wait().returns == (expected, expected)

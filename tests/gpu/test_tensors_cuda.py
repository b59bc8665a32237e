"""The tensor store with CUDA tensors; skipped where there is no GPU."""

from __future__ import annotations

import pytest

from phalanx import get_context, start_processes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")


def share_from_the_device(rank, world_size, numel):
    context = get_context()
    mine = torch.full((numel,), float(rank), device=context.device)
    context.put_tensor(f"from {rank}", mine)
    context.add_tensor("sum", mine + 1)
    context.put_tensors(f"tree {rank}", {"weights": mine.reshape(2, -1).t(), "step": rank})
    other = (rank + 1) % world_size
    got = context.get_tensor(f"from {other}", device=context.device)
    assert got.device == context.device
    assert context.get_tensor(f"from {other}").device.type == "cpu"
    tree = context.get_tensors(f"tree {other}")
    assert tree["weights"].shape == (numel // 2, 2)
    assert tree["weights"].unique().tolist() == [other]
    return got.unique().tolist()


@pytest.mark.parametrize("numel", [8, 1 << 20])
def test_cuda_tensors_are_staged_and_come_back_on_the_readers_device(numel):
    count = max(2, torch.cuda.device_count())  # two ranks may share a device
    with start_processes(share_from_the_device, count, args=(numel,)) as context:
        returns = context.wait().returns
        assert returns == tuple([float((rank + 1) % count)] for rank in range(count))
        assert context.get_tensor("sum").unique().tolist() == [sum(range(1, count + 1))]


def update_on_the_device(rank, world_size):
    context = get_context()
    for _ in range(10):
        context.update_tensor("counter", lambda old: old.to(context.device) + 1)


def test_an_update_may_return_a_cuda_tensor():
    with start_processes(update_on_the_device, 2) as context:
        context.put_tensor("counter", torch.zeros(100_000))
        context.wait()
        assert context.get_tensor("counter").unique().tolist() == [20]

"""What needs a GPU; skipped where there is none."""

from __future__ import annotations

import pytest

from phalanx import get_context, start_processes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")


def use_the_device(rank, world_size):
    import os

    import torch
    import torch.distributed as dist

    context = get_context()
    dist.init_process_group(context.get_backend(), device_id=context.device)
    tensor = torch.full((4,), float(rank), device=context.device)
    dist.all_reduce(tensor)
    stop = context.should_stop()
    dist.destroy_process_group()
    return tensor.sum().item(), str(context.device), os.environ.get("CUDA_VISIBLE_DEVICES"), stop


def test_each_rank_has_a_device_and_the_group_uses_nccl():
    count = torch.cuda.device_count()
    context = start_processes(use_the_device, count)
    assert context.get_backend() == "nccl"
    result = context.wait()
    assert [device for _, device, _, _ in result.returns] == [f"cuda:{n}" for n in range(count)]
    assert {total for total, _, _, _ in result.returns} == {4.0 * sum(range(count))}
    assert not any(stop for _, _, _, stop in result.returns)


def test_emulated_machines_share_the_gpus_out():
    count = torch.cuda.device_count()
    context = start_processes(use_the_device, count, num_processes_per_machine=1)
    assert [visible for _, _, visible, _ in context.wait().returns] == [
        str(n) for n in range(count)
    ]


def test_the_fork_server_has_no_cuda_context():
    for _ in range(2):  # the second run is a fork of the same server
        assert start_processes(use_the_device, 1).wait().returns[0][1] == "cuda:0"

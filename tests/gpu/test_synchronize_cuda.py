"""`synchronize()` of CUDA gradients over NCCL; skipped where there are not two GPUs."""

from __future__ import annotations

import pytest

from phalanx import get_context, start_processes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")


def average_on_the_device(rank, world_size, backend):
    context = get_context()
    torch.manual_seed(0)
    on_gpu = torch.nn.Linear(300, 200).to(context.device)
    on_cpu = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*on_gpu.parameters(), *on_cpu.parameters()], lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (sum(p.sum() for p in on_gpu.parameters()) * (rank + 1)).backward()
        (sum(p.sum() for p in on_cpu.parameters()) * (rank + 1)).backward()
        context.synchronize()
        mean = sum(range(1, world_size + 1)) / world_size
        for parameter in [*on_gpu.parameters(), *on_cpu.parameters()]:
            assert parameter.grad.unique().tolist() == [mean]
        optimizer.step()
    return on_gpu.weight.detach().cpu()


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_gradients_on_gpu_and_cpu_are_averaged(backend):
    count = torch.cuda.device_count()
    returns = (
        start_processes(average_on_the_device, count, args=(backend,), backend=backend)
        .wait()
        .returns
    )
    assert all(weight.equal(returns[0]) for weight in returns)

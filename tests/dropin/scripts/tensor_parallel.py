"""Tensor and sequence parallelism on a device mesh, and DTensors made by hand."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def main(out):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))  # makes the group, too
    torch.manual_seed(0)
    model = FeedForward()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        x = torch.randn(4, 8)
        loss = (model(x) - x.flip(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    table = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)])
    product = (table @ table.T).redistribute(mesh, [Replicate()]).to_local()
    weights = {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        result = {"losses": losses, "weights": weights, "product": product.tolist()}
        with open(out, "w") as file:
            json.dump({**result, "backend": dist.get_backend()}, file)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])

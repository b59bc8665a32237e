"""Two ways to share out a model over ranks: FSDP2, and tensor parallelism on a device mesh."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(8) for _ in range(3)), nn.Linear(8, 1))


def train(model, seed):
    assert all(isinstance(p, DTensor) for block in model[:3] for p in block.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    torch.manual_seed(seed)
    losses = []
    for _ in range(5):
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "weights": {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
            for name, value in model.state_dict().items()
        },
    }


def fsdp(mesh):
    model = make_model()
    for block in model[:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, seed=100 + dist.get_rank())  # each rank has its own data


def tensor_parallel(mesh):
    model = make_model()
    for block in model[:3]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, seed=100)  # all have the same


def matrices(mesh):
    table = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)])
    return (table @ table.T).redistribute(mesh, [Replicate()]).to_local().tolist()


def main(out):
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))  # makes the group, too
    result = {
        "fsdp": fsdp(mesh),
        "tensor parallel": tensor_parallel(mesh),
        "matrices": matrices(mesh),
        "backend": dist.get_backend(),
        "elastic": dist.is_torchelastic_launched(),
        "threads": torch.get_num_threads(),
        "environment": [None] * dist.get_world_size(),
    }
    names = [
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "OMP_NUM_THREADS"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    ]
    own = {name: os.environ.get(name) for name in names}
    dist.all_gather_object(result["environment"], own)
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(result, file)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])

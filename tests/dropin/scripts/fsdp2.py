"""FSDP2: parameters and optimizer state are sharded over the ranks by `fully_shard`."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def main(out):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(8) for _ in range(3)), nn.Linear(8, 1))
    for block in model[:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    torch.manual_seed(100 + rank)  # each rank has its own data
    losses = []
    for _ in range(5):
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    weights = {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}
    if rank == 0:
        with open(out, "w") as file:
            json.dump({"losses": losses, "weights": weights}, file)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])

"""RPC: rank 0 serves parameters, rank 1 trains on them by distributed autograd."""

import json
import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer


class Server(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        return torch.relu(self.layer(x))

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def weights(self):
        return {name: value.tolist() for name, value in self.state_dict().items()}


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.server = rpc.remote("server", Server)
        torch.manual_seed(1)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.server.rpc_sync().forward(x))


def train():
    model = Trainer()
    parameters = model.server.rpc_sync().parameter_rrefs()
    parameters += [rpc.RRef(parameter) for parameter in model.head.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    torch.manual_seed(2)
    losses = []
    for _ in range(5):
        x = torch.randn(16, 4)
        with dist_autograd.context() as context_id:
            loss = (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    head = {name: value.tolist() for name, value in model.head.state_dict().items()}
    return {"losses": losses, "server": model.server.rpc_sync().weights(), "head": head}


def main(out):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = "server" if rank == 0 else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size)
    if rank == 1:
        with open(out, "w") as file:
            json.dump(train(), file)
    rpc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

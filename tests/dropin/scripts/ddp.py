"""DistributedDataParallel with all that goes with it: sampler, accumulation, metrics.

torchrun --standalone --nproc-per-node 2 ddp.py --out weights.json
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data():
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(64, 10, generator=generator)
    labels = images[:, :3].argmax(dim=1)
    return TensorDataset(images, labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    dist.init_process_group(backend="gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    losses = []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for number, (images, labels) in enumerate(loader):
            if number % 2 == 0:  # gradients of two batches make one step
                optimizer.zero_grad()
                with ddp.no_sync():
                    loss = F.cross_entropy(ddp(images), labels)
                    loss.backward()
            else:
                loss = F.cross_entropy(ddp(images), labels)
                loss.backward()
                nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())

    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: os.environ[name] for name in ("RANK", "LOCAL_RANK")})
    if rank == 0:
        result = {
            "losses": losses,
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "ranks": ranks,
            "backend": dist.get_backend(),
            "elastic": dist.is_torchelastic_launched(),
        }
        with open(options.out, "w") as file:
            json.dump(result, file)
    dist.barrier()


if __name__ == "__main__":
    main()

"""DataLoaders with worker processes, by each start method, while a process group is there."""

import json
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info


class Squares(Dataset):
    """A class of `__main__`, which workers must be able to unpickle."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"square": torch.tensor(index * index), "worker": get_worker_info().id}


def collate(samples):
    return {name: torch.as_tensor([sample[name] for sample in samples]) for name in samples[0]}


def seed_worker(number):
    torch.manual_seed(number)


def main(out):
    dist.init_process_group()
    data = Squares()
    result = {}
    for method in sys.argv[2].split(","):
        sampler = DistributedSampler(data, seed=5)
        loader = DataLoader(
            data,
            batch_size=2,
            sampler=sampler,
            num_workers=2 if method == "fork" else 1,
            collate_fn=collate,
            worker_init_fn=seed_worker,
            multiprocessing_context=method,
            persistent_workers=True,
        )
        for epoch in range(2):
            sampler.set_epoch(epoch)
            batches = [{name: x.tolist() for name, x in batch.items()} for batch in loader]
            total = torch.tensor(sum(sum(batch["square"]) for batch in batches))
            dist.all_reduce(total)
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, batches)
            result[f"{method} {epoch}"] = {"batches": every, "sum of squares": total.item()}
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(result, file)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])

"""`torch.multiprocessing.spawn` inside one rank: a group of its own, results by a queue."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(number, queue, scale, where):
    """Meets its sibling in a group that has nothing to do with the outer one."""
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=number, world_size=2)
    total = torch.tensor([scale * (number + 1)])
    dist.all_reduce(total)
    if number == 0:
        queue.put(total)
        queue.join()
    os._exit(0)  # quietly: torch may abort at the end of an interpreter that used Gloo


def fail(number):
    raise ValueError(f"told by child {number} of a rank")


def main(out):
    dist.init_process_group("gloo")
    answer = [None, None]
    if dist.get_rank() == 1:
        queue = mp.get_context("spawn").JoinableQueue()
        children = mp.spawn(
            work, args=(queue, 10.0, os.path.abspath("meeting")), nprocs=2, join=False
        )
        answer[0] = queue.get(timeout=60).tolist()
        queue.task_done()
        while not children.join():
            pass
        try:
            mp.spawn(fail, nprocs=1)
        except mp.ProcessRaisedException as error:
            answer[1] = str(error).strip().splitlines()[-1]
    dist.broadcast_object_list(answer, src=1)
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump({"sum": answer[0], "error": answer[1]}, file)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])

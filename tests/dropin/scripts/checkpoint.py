"""FSDP2 with `torch.distributed.checkpoint`: goes on from the newest checkpoint after a failure.

With --kill-step a rank kills itself once, as a machine out of memory would.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class TrainState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def newest(folder):
    """The newest checkpoint that is whole: its metadata is written last."""
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--kill-step", type=int)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    fully_shard(model)
    state = TrainState(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    checkpoint = newest(options.checkpoints)
    if checkpoint is not None:
        dcp.load({"app": state}, checkpoint_id=checkpoint)
    first_step = state.step

    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    while state.step < options.steps:
        generator = torch.Generator().manual_seed(1000 * state.step + rank)
        x = torch.randn(8, 6, generator=generator)
        loss = (model(x) - x.sin().sum(dim=1, keepdim=True)).pow(2).mean()
        state.optimizer.zero_grad()
        loss.backward()
        if state.step == options.kill_step and restarts == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.optimizer.step()
        state.step += 1
        if state.step % options.save_every == 0:
            dcp.save({"app": state}, checkpoint_id=options.checkpoints / f"step-{state.step}")

    weights = {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}
    if rank == 0:
        result = {"weights": weights, "first_step": first_step, "restarts": restarts}
        with open(options.out, "w") as file:
            json.dump(result, file)
    dist.barrier()


if __name__ == "__main__":
    main()

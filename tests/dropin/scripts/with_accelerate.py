"""Hugging Face Accelerate: `prepare`, gradient accumulation, `gather_for_metrics`, checkpoints."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(out):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    x = torch.randn(60, 5)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for _ in range(3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        errors = [
            accelerator.gather_for_metrics((model(inputs) - targets).abs())
            for inputs, targets in DataLoader(data, batch_size=7)
        ]
    accelerator.save_state(Path(out).with_suffix(".state"))
    result = {
        "weights": {
            name: value.tolist()
            for name, value in accelerator.unwrap_model(model).state_dict().items()
        },
        "error": torch.cat(errors).mean().item(),
        "processes": accelerator.num_processes,
        "type": str(accelerator.distributed_type),
        "device": str(accelerator.device),
    }
    if accelerator.is_main_process:
        with open(out, "w") as file:
            json.dump(result, file)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(sys.argv[1])

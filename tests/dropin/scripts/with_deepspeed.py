"""DeepSpeed on CPUs: ZeRO stage 1 around a torch optimizer, over Gloo.

DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 with_deepspeed.py out.json
"""

import json
import sys

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

deepspeed.ops.__compatible_ops__ = dict.fromkeys(("deepspeed_shm_comm",), False)  # compile nothing


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(8):
        x = torch.randn(8, 6)
        loss = F.mse_loss(engine(x), x.sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        result = {
            "losses": losses,
            "weights": {name: value.tolist() for name, value in engine.module.state_dict().items()},
            "steps": engine.global_steps,
            "zero": type(optimizer).__name__,
        }
        with open(out, "w") as file:
            json.dump(result, file)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])

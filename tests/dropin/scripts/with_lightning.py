"""A Lightning module, trained by a Trainer that finds itself started from outside."""

import json
import os
import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, number):
        x, y = batch
        loss = F.mse_loss(self.model(x), y)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.model(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(out):
    L.seed_everything(0)
    x = torch.randn(64, 5)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = Regression()
    trainer = L.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        default_root_dir=Path(out).parent,
        enable_progress_bar=False,
        logger=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
    if trainer.is_global_zero:
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
            "world_size": trainer.world_size,
            "environment": type(trainer.strategy.cluster_environment).__name__,
            "creates_processes_externally": (
                trainer.strategy.cluster_environment.creates_processes_externally
            ),
            "checkpoint": Path(trainer.checkpoint_callback.best_model_path).name,
            "ranks": [os.environ["RANK"], str(trainer.global_rank), str(trainer.local_rank)],
        }
        with open(out, "w") as file:
            json.dump(result, file)
    trainer.strategy.barrier()


if __name__ == "__main__":
    main(sys.argv[1])

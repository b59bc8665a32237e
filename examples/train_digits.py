"""Train a small network on real scans of handwritten digits, and survive a kill.

Four workers train with DistributedDataParallel on scikit-learn's digits (1,797 scans of
8 × 8 pixels, shipped inside that package). Each epoch ends with a checkpoint on disk; after
a failure all workers start again and go on from the last one.

    python examples/train_digits.py
    python examples/train_digits.py --kill-rank 2 --kill-epoch 3
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import phalanx
from phalanx.events import GenerationStarted, GroupFell, WorkerReported

if TYPE_CHECKING:
    import numpy as np
    import torch

    from phalanx.events import Event


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line asks for."""

    epochs: int
    batch_size: int
    checkpoint: Path
    kill_rank: int | None
    kill_epoch: int


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images of float32, shape (n, 64), scaled to 0–1, and their labels, int64, shape (n,)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits() -> Digits:
    """Load the scans and hold a fifth of them back for the test."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    images, labels = load(return_X_y=True)
    parts = train_test_split(
        (images / 16).astype("float32"), labels, test_size=0.2, random_state=0, stratify=labels
    )
    return Digits(
        train_images=parts[0], test_images=parts[1], train_labels=parts[2], test_labels=parts[3]
    )


def train(rank: int, world_size: int, settings: Settings, digits: Digits) -> float:
    """Train on one rank; return the accuracy on the test images."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    context = phalanx.get_context()
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    data = TensorDataset(torch.tensor(digits.train_images), torch.tensor(digits.train_labels))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, seed=0)
    loader = DataLoader(data, batch_size=settings.batch_size, sampler=sampler)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first_epoch = resume(settings.checkpoint, network, optimizer)
    if rank == 0 and first_epoch:
        print(f"going on from the checkpoint of epoch {first_epoch - 1}")

    for epoch in range(first_epoch, settings.epochs):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if (epoch, step) == (first_epoch, 0):
                context.report(training_since=time.time())
        if rank == 0:
            print(f"epoch {epoch:2d}  loss {loss.item():.3f}")
            save(settings.checkpoint, network, optimizer, epoch)
        dist.barrier()
        ordered = (rank, epoch) == (settings.kill_rank, settings.kill_epoch)
        if ordered and context.restart_count == 0:
            print("SIGKILL to myself")
            context.report(killed_at=time.time())
            os.kill(os.getpid(), signal.SIGKILL)

    with torch.no_grad():
        guesses = network(torch.tensor(digits.test_images)).argmax(dim=1)
    accuracy = (guesses == torch.tensor(digits.test_labels)).float().mean().item()
    dist.destroy_process_group()
    return accuracy


def save(
    path: Path, network: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int
) -> None:
    """Write a checkpoint that is there wholly or not at all."""
    import torch

    draft = path.with_suffix(".draft")
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, draft)
    draft.replace(path)


def resume(path: Path, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one; return the epoch to begin with."""
    import torch

    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"]) + 1


def recovery_seconds(events: list[Event]) -> float | None:
    """Seconds from the kill to the first optimizer step after it, on the slowest rank."""
    killed_at, again = None, []
    for event in events:
        if isinstance(event, WorkerReported):
            killed_at = event.metrics.get("killed_at", killed_at)
            if killed_at is not None and "training_since" in event.metrics:
                again.append(float(event.metrics["training_since"] or 0))
    return None if killed_at is None or not again else max(again) - float(killed_at)


def narrate(event: Event) -> None:
    """Say on the console what happens to the group."""
    match event:
        case GenerationStarted(generation=generation):
            print(f"phalanx: generation {generation} starts", flush=True)
        case GroupFell(failure=failure):
            print(f"phalanx: rank {failure.rank} fell: {failure.message}", flush=True)
        case _:
            pass


def main() -> None:
    """Parse the command line, train, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--kill-rank", type=int, help="this rank kills itself once")
    parser.add_argument("--kill-epoch", type=int, default=3, help="after this epoch")
    options = parser.parse_args()

    # The fork server imports torch, and what the first optimizer of a process needs (1 s),
    # while this process imports scikit-learn.
    preload = ("torch", "torch._dynamo")
    phalanx.prewarm(preload)
    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            epochs=options.epochs,
            batch_size=options.batch_size,
            checkpoint=Path(folder, "digits.pt"),
            kill_rank=options.kill_rank,
            kill_epoch=options.kill_epoch,
        )
        context = phalanx.start_processes(
            train,
            options.workers,
            args=(settings, digits),
            preload=preload,
            max_restarts=1,
            on_event=narrate,
        )
        result = context.wait()
    accuracy = min(result.returns)
    print(f"test accuracy: {accuracy:.3f} on {len(digits.test_labels)} scans never trained on")
    print(f"restarts:      {result.restart_count}")
    seconds = recovery_seconds(list(context.events()))
    if seconds is not None:
        print(f"recovery:      {seconds:.3f} s from the kill to training again")
    if accuracy < 0.95:
        raise SystemExit(f"the accuracy is below 0.95: {accuracy:.3f}")


main()

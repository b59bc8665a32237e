"""Train a small network on real scans of handwritten digits, and survive a kill.

Four workers train on scikit-learn's digits (1,797 scans of 8 × 8 pixels, shipped inside that
package), and average their gradients with `synchronize()`. Every few steps each of them commits
its state to the tensor store, which is memory; after a failure all workers start again, and go on
from the newest state that all of them had committed. The disk is not touched.

    python examples/train_digits.py
    python examples/train_digits.py --ddp
    python examples/train_digits.py --kill-rank 2 --kill-step 75
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import phalanx
from phalanx.values.events import GenerationStarted, GroupFell, WorkerReported

if TYPE_CHECKING:
    import numpy as np
    import torch

    from phalanx.values.events import Event


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line asks for."""

    epochs: int
    batch_size: int
    save_every: int
    ddp: bool
    kill_rank: int | None
    kill_step: int


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
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    context = phalanx.get_context()
    torch.manual_seed(0)

    data = TensorDataset(torch.tensor(digits.train_images), torch.tensor(digits.train_labels))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, seed=0)
    loader = DataLoader(data, batch_size=settings.batch_size, sampler=sampler)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    model = wrap(network) if settings.ddp else network
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    first_step = step = resume(context, network, optimizer)
    if rank == 0 and step:
        print(f"going on from step {step}")

    while step < settings.epochs * len(loader):
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for images, labels in islice(loader, done, None):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            if not settings.ddp:
                context.synchronize()
            optimizer.step()
            step += 1
            if step == first_step + 1:
                context.report(training_since=time.time(), first_step=first_step)
            if step % settings.save_every == 0:
                save(context, network, optimizer, step)
            if (rank, step, context.restart_count) == (settings.kill_rank, settings.kill_step, 0):
                print(f"SIGKILL to myself after step {step}")
                context.report(killed_at=time.time(), killed_after=step)
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            print(f"epoch {epoch:2d}  loss {loss.item():.3f}")

    with torch.no_grad():
        guesses = network(torch.tensor(digits.test_images)).argmax(dim=1)
    return (guesses == torch.tensor(digits.test_labels)).float().mean().item()


def wrap(network: torch.nn.Module) -> torch.nn.Module:
    """Have DistributedDataParallel average the gradients instead, over Gloo."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    return DistributedDataParallel(network)


def save(
    context: phalanx.SubprocessContext[Any],
    network: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> None:
    """Commit this rank's state after that many steps."""
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
    context.commit_tensors("training", state, version=step)


def resume(
    context: phalanx.SubprocessContext[Any],
    network: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> int:
    """Load what all ranks had committed, if anything; return the number of steps done."""
    found = context.get_committed_tensors("training")
    if found is None:
        return 0
    step, state = found
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return step


def recovery(events: list[Event]) -> tuple[float, int] | None:
    """What the kill cost: seconds until every rank trained again, and steps done twice."""
    killed_at, killed_after, again, first_step = 0.0, None, [], 0
    for event in events:
        if not isinstance(event, WorkerReported):
            continue
        metrics = {name: float(value or 0) for name, value in event.metrics.items()}
        if "killed_at" in metrics:
            killed_at, killed_after = metrics["killed_at"], int(metrics["killed_after"])
        elif killed_after is not None:
            again.append(metrics["training_since"])
            first_step = int(metrics["first_step"])
    if killed_after is None or not again:
        return None
    return max(again) - killed_at, killed_after - first_step


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
    parser.add_argument("--ddp", action="store_true", help="use DistributedDataParallel")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--kill-rank", type=int, help="this rank kills itself once")
    parser.add_argument("--kill-step", type=int, default=75, help="after so many steps")
    options = parser.parse_args()

    # The fork server imports torch, and what the first optimizer of a process needs (1 s),
    # while this process imports scikit-learn.
    preload = ("torch", "torch._dynamo")
    phalanx.prewarm(preload)
    digits = load_digits()
    settings = Settings(
        epochs=options.epochs,
        batch_size=options.batch_size,
        save_every=options.save_every,
        ddp=options.ddp,
        kill_rank=options.kill_rank,
        kill_step=options.kill_step,
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
    cost = recovery(list(context.events()))
    if cost is not None:
        seconds, steps = cost
        print(f"recovery:      {seconds:.3f} s from the kill to training again")
        print(f"lost:          {steps} steps, saved each {options.save_every}")
        if not 0 <= steps <= options.save_every:
            raise SystemExit(f"more steps were lost than were not saved: {steps}")
    if accuracy < 0.95:
        raise SystemExit(f"the accuracy is below 0.95: {accuracy:.3f}")


main()

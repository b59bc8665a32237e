"""Training steps: `synchronize()` beside DistributedDataParallel, over shm and over Gloo."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.stats import Row, show
from phalanx import get_context, start_processes

if TYPE_CHECKING:
    import torch

_WORLD_SIZE = 2
_WARM_STEPS = 5
_VARIANTS = (
    ("no synchronisation at all", "none", "gloo"),
    ("DDP over Gloo", "ddp", "gloo"),
    ("DDP over shm", "ddp", "shm"),
    ("synchronize() over Gloo", "ours", "gloo"),
    ("synchronize() over shm", "ours", "shm"),
    ("synchronize(overlap=True) over shm", "overlap", "shm"),
)
_MODELS = {
    "an MLP of 1 M": ("mlp-1", 40),
    "an MLP of 25 M": ("mlp-25", 12),
    "a transformer of 1 M": ("transformer", 30),
}
"""What is trained: its name here, and how many steps are timed."""


def make(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model, inputs and labels."""
    import torch

    torch.manual_seed(0)
    if name == "transformer":
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        model = torch.nn.Sequential(
            torch.nn.TransformerEncoder(layer, 5, enable_nested_tensor=False),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 128, 10),
        )
        return model, torch.randn(8, 32, 128), torch.randint(0, 10, (8,))
    width, depth = (500, 4) if name == "mlp-1" else (2500, 4)
    layers: list[Any] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))
    return model, torch.randn(16, width), torch.randint(0, 10, (16,))


def _train(rank: int, world_size: int, name: str, how: str, backend: str, steps: int) -> Any:
    """Return seconds per step."""
    import torch
    import torch.distributed as dist

    context = get_context()
    model, inputs, labels = make(name)
    if how == "ddp":
        dist.init_process_group(backend)
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times = []
    for _ in range(_WARM_STEPS + steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        if how in ("ours", "overlap"):
            context.synchronize(overlap=True if how == "overlap" else None)
        optimizer.step()
        times.append(time.perf_counter() - began)
        if how == "none":
            context.barrier()  # so that all variants share the cores alike
    return times[_WARM_STEPS:]


def steps(runs: int) -> None:
    """Seconds per training step, of the slower rank; variants take turns."""
    for title, (name, count) in _MODELS.items():
        rows = {variant: Row(variant[0], "ms") for variant in _VARIANTS}
        for _ in range(max(3, runs // 3)):
            for variant, row in rows.items():
                _, how, backend = variant
                args = (name, how, backend, count)
                result = start_processes(_train, _WORLD_SIZE, args=args, backend=backend).wait()
                slower = max(statistics.median(times) for times in result.returns)
                row.samples.append(slower * 1000)
        _compare(list(rows.values()))
        show(f"A training step, {title} parameters, {_WORLD_SIZE} ranks", list(rows.values()))


def _compare(rows: list[Row]) -> None:
    """Note each variant's time as a multiple of DDP's over Gloo, and the aims."""
    gloo, shm = rows[1], rows[2]
    for row in rows:
        row.note = f"{row.median / gloo.median:.2f} × DDP over Gloo"
    rows[3].target = f"≤ 1.05 × DDP over Gloo ({1.05 * gloo.median:.1f} ms)"
    rows[4].target = f"≤ DDP over shm ({shm.median:.1f} ms), < DDP over Gloo"

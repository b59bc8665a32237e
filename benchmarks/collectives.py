"""All-reduce of CPU tensors: shm beside Gloo, in the same processes, taking turns."""

from __future__ import annotations

import time

from benchmarks.stats import Row, show
from phalanx import start_processes

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = {
    _KIB: "≥ 20 × Gloo",
    64 * _KIB: "≥ 20 × Gloo",
    _MIB: "≥ 5 × Gloo",
    25 * _MIB: "≥ 3 × Gloo",
    100 * _MIB: "≥ 3 × Gloo",
}
_SECONDS_PER_TURN = 0.3
_MOST_PER_TURN = 100


def all_reduce(runs: int) -> None:
    """One table per world size; milliseconds of rank 0, the operations of all runs together."""
    for world_size in (2, 4, 8):
        samples = start_processes(_measure, world_size, args=(runs,)).wait().returns[0]
        rows: list[Row] = []
        for num_bytes, target in _SIZES.items():
            what = f"{num_bytes // _KIB:,} KiB"
            gloo = Row(f"Gloo, {what}", "ms", samples["gloo", num_bytes])
            shm = Row(f"shm, {what}", "ms", samples["shm", num_bytes])
            shm.target = target if world_size == 2 else "ahead of Gloo"
            shm.note = f"{gloo.median / shm.median:.1f} × Gloo"
            rows += [gloo, shm]
        show(f"all_reduce of float32, {world_size} ranks", rows)


def _measure(rank: int, world_size: int, runs: int) -> dict[tuple[str, int], list[float]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
    samples: dict[tuple[str, int], list[float]] = {}
    for num_bytes in _SIZES:
        tensor = torch.zeros(num_bytes // 4)
        counts: dict[str, int] = {}
        for _ in range(runs):
            for name, group in groups.items():
                own = samples.setdefault((name, num_bytes), [])
                if name not in counts:
                    counts[name] = _turn_length(tensor, group)
                for _ in range(3):  # what the peers' turn left in caches and on cores
                    dist.all_reduce(tensor, group=group)
                for _ in range(counts[name]):
                    began = time.perf_counter()
                    dist.all_reduce(tensor, group=group)
                    own.append((time.perf_counter() - began) * 1000)
    dist.destroy_process_group()
    return samples


def _turn_length(tensor: object, group: object) -> int:
    """Return how many operations make a turn: the same number on every rank."""
    import torch
    import torch.distributed as dist

    for _ in range(2):
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return max(3, min(_MOST_PER_TURN, int(_SECONDS_PER_TURN / took.item())))

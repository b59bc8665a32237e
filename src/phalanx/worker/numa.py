"""Binds a worker to CPUs: near its GPU, or where there is none, spread over the machine.

The four ways are torchrun's (torch 2.13, ``torch.numa.binding``), which needs CUDA for them.
Here the kernel is asked where a GPU is, and without GPUs the local ranks are dealt out to the
NUMA nodes evenly, neighbours together.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.system.kernel import visible_gpus

if TYPE_CHECKING:
    from phalanx.values.spec import NumaBinding, WorkerSpec

_SYSTEM = Path("/sys/devices/system")
_GPUS = Path("/proc/driver/nvidia/gpus")


def bind(worker: WorkerSpec, environment: dict[str, str]) -> None:
    """Bind this process (and what it starts) to the CPUs of its local rank.

    Where the kernel does not tell, or allows none of them, nothing is bound.

    Args:
        worker: Who this is, and which binding is wanted.
        environment: What says which GPUs are visible.
    """
    if worker.numa_binding is None or not hasattr(os, "sched_setaffinity"):
        return
    with contextlib.suppress(OSError, ValueError):
        nodes = node_of_ranks(worker.local_world_size, visible_gpus(environment))
        cpus = cpus_of_rank(worker.numa_binding, worker.local_rank, nodes)
        if cpus:
            os.sched_setaffinity(0, cpus)


def node_of_ranks(num_ranks: int, gpus: Sequence[str]) -> list[int]:
    """Return the NUMA node of each local rank."""
    of_gpus = _nodes_of_gpus(gpus)
    nodes = [node for node in _all_nodes() if _allowed(node)] or [0]
    return [
        of_gpus[rank] if rank < len(of_gpus) else nodes[rank * len(nodes) // num_ranks]
        for rank in range(num_ranks)
    ]


def cpus_of_rank(binding: NumaBinding, rank: int, nodes: Sequence[int]) -> set[int]:
    """Return the CPUs that a local rank is bound to.

    Args:
        binding: ``node``: all of its node; ``socket``: all of its socket; ``exclusive``: whole
            cores of its node that no other rank gets; ``core-complex``: CPUs that share a cache.
        rank: The local rank.
        nodes: The node of each local rank.
    """
    node = nodes[rank]
    own = _allowed(node)
    if binding == "node":
        return own
    if binding == "socket":
        socket = _socket(own)
        return {
            cpu for other in _all_nodes() for cpu in _allowed(other) if _socket([cpu]) == socket
        }
    sharers = [other for other in range(len(nodes)) if nodes[other] == node]
    place = sharers.index(rank)
    if binding == "core-complex":
        caches = _groups(own, _sharing_cache)
        caches.sort(key=lambda cpus: (-len(cpus), min(cpus)))
        return set(caches[place % len(caches)]) if caches else own
    cores = _groups(own, lambda cpu: _list(f"cpu/cpu{cpu}/topology/thread_siblings_list"))
    share, extra = divmod(len(cores), len(sharers))
    if share == 0:  # more ranks than cores: they have to share
        return set(cores[place % len(cores)]) if cores else own
    start = place * share + min(place, extra)
    end = start + share + (place < extra)
    return {cpu for core in cores[start:end] for cpu in core}


def _nodes_of_gpus(gpus: Sequence[str]) -> list[int]:
    """Return the node of each visible GPU; empty where the kernel does not tell."""
    if not gpus or not all(gpu.isdigit() for gpu in gpus):
        return []
    try:
        addresses = sorted(path.name.lower() for path in _GPUS.iterdir())
        files = [Path("/sys/bus/pci/devices", addresses[int(gpu)], "numa_node") for gpu in gpus]
        return [max(0, int(file.read_text())) for file in files]
    except (OSError, IndexError, ValueError):
        return []


def _all_nodes() -> list[int]:
    return sorted(int(path.name[4:]) for path in _SYSTEM.glob("node/node[0-9]*"))


def _allowed(node: int) -> set[int]:
    """Return the CPUs of a node that this process may use."""
    return _list(f"node/node{node}/cpulist") & os.sched_getaffinity(0)


def _socket(cpus: Iterable[int]) -> int:
    cpu = min(cpus, default=0)
    return int((_SYSTEM / f"cpu/cpu{cpu}/topology/physical_package_id").read_text())


def _sharing_cache(cpu: int) -> set[int]:
    """Return the CPUs that share the largest cache with this one."""
    largest, sharing = -1, {cpu}
    for cache in (_SYSTEM / f"cpu/cpu{cpu}/cache").glob("index[0-9]*"):
        level = int((cache / "level").read_text())
        if level > largest and (cache / "type").read_text().strip() != "Instruction":
            largest, sharing = level, parse_list((cache / "shared_cpu_list").read_text())
    return sharing


def _groups(cpus: set[int], of: Callable[[int], set[int]]) -> list[list[int]]:
    """Return CPUs in groups, by their first member."""
    groups: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(min(of(cpu) or {cpu}), []).append(cpu)
    return [groups[first] for first in sorted(groups)]


def _list(name: str) -> set[int]:
    return parse_list((_SYSTEM / name).read_text())


def parse_list(text: str) -> set[int]:
    """Read the kernel's form of a set of CPUs: ``0-3,8,10-11``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus

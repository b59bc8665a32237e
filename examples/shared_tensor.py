"""Four workers share one tensor: first the way that loses additions, then the way that doesn't.

Each worker gets the shared tensor, adds its rank, and puts it back, again and again. Between
its get and its put another worker may have put a sum of its own, which is then lost.
`add_tensor` does the same with nobody in between.

    python examples/shared_tensor.py
"""

from __future__ import annotations

import phalanx

WORKERS = 4
ROUNDS = 100


def get_add_put(rank: int, world_size: int) -> None:
    """Add this rank to the tensor, in three steps that others can come between."""
    context = phalanx.get_context()
    for _ in range(ROUNDS):
        total = context.get_tensor("careless")
        context.put_tensor("careless", total + rank)


def add(rank: int, world_size: int) -> None:
    """Add this rank to the tensor, in one step."""
    import torch

    context = phalanx.get_context()
    for _ in range(ROUNDS):
        context.add_tensor("careful", torch.full((3,), float(rank)))


def main() -> None:
    """Run both, and check the second."""
    import torch

    expected = torch.full((3,), float(ROUNDS * sum(range(WORKERS))))
    with phalanx.start_processes(get_add_put, WORKERS) as context:
        context.put_tensor("careless", torch.zeros(3))
        context.wait()
        total = context.get_tensor("careless")
    lost = (1 - total / expected)[0].item()
    print(f"get, add, put:  {total.tolist()} of {expected.tolist()}: {lost:.0%} was lost")

    with phalanx.start_processes(add, WORKERS) as context:
        context.wait()
        total = context.get_tensor("careful")
    print(f"add_tensor:     {total.tolist()} of {expected.tolist()}")
    if not torch.equal(total, expected):
        raise SystemExit("add_tensor has lost something")


main()

"""Checks of what users pass to collectives, before anything is published."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.tensors.sync.shm.segment import GLOO
from phalanx.values.errors import GroupUnsupportedError


def check_parts(
    num_ranks: int, what: str, one: torch.Tensor, parts: Sequence[torch.Tensor]
) -> None:
    """Raise ValueError unless there is one tensor per rank, each like `one`."""
    if len(parts) != num_ranks:
        raise ValueError(f"{what} needs {num_ranks} tensors, one per rank, not {len(parts)}")
    for part in parts:
        if part.numel() != one.numel() or part.dtype != one.dtype:
            raise ValueError(
                f"{what} needs tensors of one size and dtype, not {_told(part)} and "
                f"{_told(one)}; {GLOO}, or pad them"
            )


def equal_parts(
    num_ranks: int, what: str, one: torch.Tensor, whole: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Return a tensor's equal parts, one per rank, each the size of `one`."""
    check_each([one, whole])
    if whole.numel() != one.numel() * num_ranks or whole.dtype != one.dtype:
        raise ValueError(
            f"{what} needs {num_ranks} times {_told(one)} in one tensor, not {_told(whole)}"
        )
    if not whole.is_contiguous():
        raise ValueError(f"{what} needs a contiguous tensor; pass tensor.contiguous()")
    flat = whole.detach().view(-1)
    count = one.numel()
    return [flat[i * count : (i + 1) * count] for i in range(num_ranks)]


def split(
    num_ranks: int, which: str, tensor: torch.Tensor, sizes: list[int] | None
) -> Sequence[torch.Tensor]:
    """Return a tensor's rows cut by `sizes`, or (None, or empty) into equal parts.

    Raises:
        ValueError: That is not possible.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if rows % num_ranks:
            raise ValueError(
                f"all_to_all_single: {rows} rows of {which} can't be split among "
                f"{num_ranks} ranks; pass {which}_split_sizes"
            )
        sizes = [rows // num_ranks] * num_ranks
    if sum(sizes) != rows or len(sizes) != num_ranks:
        raise ValueError(
            f"all_to_all_single: {which}_split_sizes {sizes} do not split {rows} rows "
            f"among {num_ranks} ranks"
        )
    parts: Sequence[torch.Tensor] = tensor.detach().split(sizes)
    return parts


def checked(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the list if it holds one tensor that can be moved."""
    if len(tensors) != 1:
        raise ValueError(f"one tensor is needed here, not {len(tensors)}")
    check_each(tensors)
    return tensors


def check_each(tensors: Sequence[torch.Tensor]) -> None:
    """Raise GroupUnsupportedError unless all are dense tensors on the CPU."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise GroupUnsupportedError(
                f"shm moves dense tensors on the CPU, not one on {tensor.device} "
                f"({tensor.layout}): move it with .cpu() or .to_dense(), or {GLOO}"
            )


def _told(tensor: torch.Tensor) -> str:
    return f"{tensor.numel():,} × {tensor.dtype}"

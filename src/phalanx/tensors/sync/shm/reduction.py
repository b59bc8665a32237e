"""Reducing tensors of several ranks to one, in rank order: which dtypes, and how exactly.

Every element is combined in the order of the ranks, by whichever rank does it, so all ranks
get the same bits, always. float16 and bfloat16 are carried in float32 and rounded once, at
the end. AVG is a sum, then a division (of whole numbers: towards zero). Sums of bool are "or",
products are "and".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from phalanx.tensors.sync.shm.segment import GLOO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OPERATIONS: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_HALVES: Final = (torch.float16, torch.bfloat16)
_SIGNED: Final = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""torch computes little with the first; sums, products and bits are the same in the second."""
_BITWISE: Final = ("BAND", "BOR", "BXOR")


class Reduction:
    """One way of reducing tensors of one dtype.

    Attributes:
        name: ``SUM`` and so on.
        dtype: What the tensors are to be viewed as.
    """

    def __init__(self, name: str, dtype: torch.dtype, num_ranks: int) -> None:
        """Check that there is such a reduction.

        Raises:
            NotImplementedError: There is not, or not for this dtype.
        """
        operation = _OPERATIONS.get(name)
        if operation is None:
            raise NotImplementedError(f"shm has no {name}; {GLOO}")
        whole = not dtype.is_floating_point and not dtype.is_complex
        if dtype in _SIGNED and name not in ("MIN", "MAX", "AVG"):
            dtype = _SIGNED[dtype]
        lacking = (
            (name in _BITWISE and not whole)
            or (name in ("MIN", "MAX") and dtype.is_complex)
            or (name == "AVG" and dtype is torch.bool)
            or dtype in _SIGNED
            or (dtype.is_floating_point and dtype.itemsize == 1)
            or dtype is torch.complex32
        )
        if lacking:
            raise NotImplementedError(f"shm has no {name} of {dtype}; {GLOO}, or convert first")
        self.name = name
        self.dtype = dtype
        self.operation = operation
        self._num_ranks = num_ranks
        self._whole = whole
        self._wide = dtype in _HALVES and name in ("SUM", "AVG", "PRODUCT")
        self.is_plain = num_ranks == 2 and name != "AVG"
        """Whether it is one call of `operation` on two tensors."""

    def reduce(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce tensors of one shape into `out`, which must share no memory with them."""
        if self.is_plain:
            self.operation(inputs[0], inputs[1], out=out)
            return
        total = torch.empty(out.shape, dtype=torch.float32) if self._wide else out
        total.copy_(inputs[0])
        for tensor in inputs[1:]:
            self.operation(total, tensor, out=total)
        if self.name == "AVG":
            total.div_(self._num_ranks, rounding_mode="trunc" if self._whole else None)
        if total is not out:
            out.copy_(total)


def name_of(operation: Any) -> str:  # noqa: ANN401 - torch's ReduceOp has no usable type
    """Return the name of a ReduceOp."""
    for name in (*_OPERATIONS, "PREMUL_SUM"):
        if operation == getattr(dist.ReduceOp, name):
            return name
    return str(operation)

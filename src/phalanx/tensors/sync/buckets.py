"""Buckets: gradients that travel together, in one flat piece.

As in DistributedDataParallel, buckets are filled in the reverse order of the parameters, about
the order in which backward() finds their gradients, and the first is small, so that there is
something to send early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from phalanx.tensors.sync.groups import GradientGroup, Pending

FIRST_BUCKET_BYTES: Final = 1 << 20
_COARSE: Final = 64 << 10
"""Gradients of at least so many bytes are worth a collective each where that is cheap."""


class Bucket:
    """Some parameters of one dtype on one device, and the flat copy of their gradients.

    Attributes:
        numbers: Which parameters of the plan these are.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        parameters: Sequence[torch.Tensor],
        group: GradientGroup,
        *,
        average: bool,
    ) -> None:
        """Allocate nothing yet."""
        self.numbers = tuple(numbers)
        self._parameters = list(parameters)
        self._group = group
        self._average = average
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._copied: dict[int, tuple[torch.Tensor, int]] = {}
        self._touched = False
        self._pending: Pending | None = None

    @property
    def launched(self) -> bool:
        """Whether its gradients are on their way, or have arrived."""
        return self._pending is not None

    @property
    def complete(self) -> bool:
        """Whether every gradient has been copied in."""
        return len(self._copied) == len(self._parameters)

    @property
    def stale(self) -> bool:
        """Whether a gradient is not any more what was copied and sent."""
        return self._touched or any(
            not self._is_copied(place, parameter.grad)
            for place, parameter in enumerate(self._parameters)
        )

    def gradient_came(self, place: int) -> None:
        """Copy one gradient in while backward() goes on, unless it is too late for that."""
        if self.launched:
            self._touched = True
        else:
            self._copy_in(place)

    def fill(self) -> None:
        """Copy in what has not been copied yet; zeros where there is no gradient."""
        for place, parameter in enumerate(self._parameters):
            if not self._is_copied(place, parameter.grad):
                self._copy_in(place)

    def clear(self) -> None:
        """Forget what was copied, so that `fill` copies all."""
        self._copied.clear()
        self._touched = False
        self._pending = None

    def launch(self) -> None:
        """Send it; does not wait."""
        self._pending = self._group.all_reduce(self._memory(), average=self._average)

    def reduce_at_once(self) -> None:
        """Reduce the gradients, which all exist; blocks. For groups that share memory.

        Large gradients stay where they are, and no copy is made but those of the group.
        """
        gradients = self._gradients()
        small = [gradient for gradient in gradients if gradient.nbytes < _COARSE]
        if small:
            flat = torch.cat([gradient.detach().reshape(-1) for gradient in small])
            self._reduce_in_place(flat)
            pieces = flat.split([gradient.numel() for gradient in small])
            views = [piece.view_as(old) for piece, old in zip(pieces, small, strict=True)]
            torch._foreach_copy_(small, views)
        for gradient in gradients:
            if gradient.nbytes >= _COARSE:
                self._reduce_in_place(gradient)

    def _reduce_in_place(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        scale = self._group.scale(tensor.device, average=self._average)
        if scale != 1.0:
            tensor.mul_(scale)
        self._group.all_reduce(tensor, average=self._average, at_once=True).wait()

    def finish(self) -> None:
        """Wait for the result and put it into the gradients, which all exist."""
        assert self._pending is not None  # noqa: S101 - it was launched
        self._pending.wait()
        torch._foreach_copy_(self._gradients(), self._views)  # as optimizers do
        self.clear()

    def drop(self) -> None:
        """Wait for a result that nobody wants, so that its memory may be used again."""
        if self._pending is not None:
            self._pending.wait()
        self.clear()

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _is_copied(self, place: int, gradient: torch.Tensor | None) -> bool:
        copied = self._copied.get(place)
        if copied is None or gradient is None:
            return False
        return copied[0] is gradient and copied[1] == gradient._version  # noqa: SLF001

    def _copy_in(self, place: int) -> None:
        gradient = self._parameters[place].grad
        self._memory()
        view = self._views[place]
        if gradient is None:
            self._copied.pop(place, None)
            view.zero_()
            return
        scale = self._group.scale(gradient.device, average=self._average)
        with torch.no_grad():
            if scale == 1.0:
                view.copy_(gradient)
            else:
                torch.mul(gradient, scale, out=view)
        self._copied[place] = (gradient, gradient._version)  # noqa: SLF001 - autograd's own count

    def _memory(self) -> torch.Tensor:
        if self._flat is None:
            first = self._parameters[0]
            sizes = [parameter.numel() for parameter in self._parameters]
            self._flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
            pieces = self._flat.split(sizes)
            self._views = [
                piece.view(parameter.shape)
                for piece, parameter in zip(pieces, self._parameters, strict=True)
            ]
        return self._flat


def distribute(parameters: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Return which parameters go together, the last first, in pieces of about that size."""
    pieces: list[list[int]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    limit = min(FIRST_BUCKET_BYTES, bucket_bytes)
    for number in reversed(range(len(parameters))):
        kind = (parameters[number].dtype, parameters[number].device)
        numbers = open_ones.setdefault(kind, [])
        numbers.append(number)
        if sum(parameters[each].nbytes for each in numbers) >= limit:
            pieces.append(open_ones.pop(kind))
            limit = bucket_bytes
    return [*pieces, *open_ones.values()]

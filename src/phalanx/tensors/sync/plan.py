"""What `synchronize()` knows about one set of parameters, from call to call.

While a plan is *armed*, its buckets are sent as soon as backward() has filled them, always in
the same order, so that only the last are left when `synchronize()` is called. Whether it is
armed follows from what all ranks have agreed on in earlier calls, so all ranks send the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.tensors.sync.buckets import Bucket, distribute
from phalanx.values.errors import SynchronizeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.tensors.sync.groups import GradientGroup
    from phalanx.tensors.sync.guard import Guard, Watch
    from phalanx.tensors.sync.parameters import Named


class Plan:
    """A set of parameters, its buckets, and how steady it was.

    Attributes:
        parameters: In the order that all ranks have.
        signature: What all ranks must have alike.
        num_calls: Calls of `synchronize` with these parameters so far.
        armed: Buckets are sent while backward() runs.
        restless: Gradients did change after they were sent: that is not worth while here.
    """

    def __init__(
        self,
        parameters: Sequence[Named],
        signature: int,
        group: GradientGroup | None,
        guard: Guard,
        *,
        average: bool,
        bucket_bytes: int,
    ) -> None:
        """Watch the parameters; `group` is None if there is but one rank."""
        self.parameters = tuple(parameters)
        self.signature = signature
        self.num_calls = 0
        self.armed = False
        self.restless = False
        self._group = group
        self._average = average
        tensors = [named.parameter for named in parameters]
        self._watches: list[Watch] = [guard.watch(tensor) for tensor in tensors]
        self._next = 0
        self.buckets: list[Bucket] = []
        if group is not None:
            self.buckets = [self._bucket(numbers) for numbers in distribute(tensors, bucket_bytes)]

    def present(self) -> frozenset[int]:
        """Return which parameters have a gradient.

        Raises:
            SynchronizeError: One is sparse.
        """
        found = set()
        for number, named in enumerate(self.parameters):
            gradient = named.parameter.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise SynchronizeError(
                    f"the gradient of {named.name or f'parameter {number}'} is sparse, which "
                    "synchronize() does not average: make the module with sparse=False (as "
                    "Embedding does by default), or densify it first: p.grad = p.grad.to_dense()"
                )
            found.add(number)
        return frozenset(found)

    def fill_gaps(self, present: frozenset[int]) -> None:
        """Give a zero gradient to parameters that have none here, but on another rank."""
        for number in present:
            parameter = self.parameters[number].parameter
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def mark_averaged(self) -> None:
        """What backward() has left so far is averaged."""
        for watch in self._watches:
            watch.fresh = False

    # ── sending while backward() runs ────────────────────────────────────────────────────

    def arm(self) -> None:
        """From the next backward() on, send buckets as they fill."""
        if self.armed:
            return
        self.armed = True
        for bucket in self.buckets:
            for place, number in enumerate(bucket.numbers):
                self._watches[number].listener = self._listener(bucket, place)

    def disarm(self) -> None:
        """Send nothing more by itself."""
        if not self.armed:
            return
        self.armed = False
        for watch in self._watches:
            watch.listener = None

    def stop(self) -> None:
        """Wait for what was sent, drop it, and send nothing more by itself."""
        for bucket in self.buckets:
            bucket.drop()
        self._next = 0
        self.disarm()

    def flush(self) -> None:
        """End being armed: its buckets must be out on all ranks before anything else is sent."""
        if self.armed:
            self.launch_all()
            self.stop()

    def launch_all(self) -> None:
        """Send what has not been sent, so that this rank has sent all buckets, as all do."""
        for bucket in self.buckets[self._next :]:
            bucket.fill()
            bucket.launch()
        self._next = len(self.buckets)

    def stale(self) -> frozenset[int]:
        """Return which of the sent buckets don't have the gradients as they are now."""
        return frozenset(n for n, bucket in enumerate(self.buckets) if bucket.stale)

    def finish(self, stale: frozenset[int]) -> None:
        """Put what came into the gradients, and send again what is stale on any rank.

        Every parameter has a gradient by now.
        """
        self._next = 0
        again = [self.buckets[number] for number in sorted(stale)]
        for bucket in again:
            bucket.drop()
        self._send(again)
        for number, bucket in enumerate(self.buckets):
            if number not in stale:
                bucket.finish()
        for bucket in again:
            bucket.finish()

    # ── sending when told ────────────────────────────────────────────────────────────────

    def reduce(self, present: frozenset[int]) -> None:
        """Sum (or average) the gradients that exist on any rank; blocks."""
        buckets = self.buckets
        if len(present) < len(self.parameters):
            # A parameter without a gradient on all ranks keeps none.
            pieces = [[n for n in bucket.numbers if n in present] for bucket in buckets]
            buckets = [self._bucket(numbers) for numbers in pieces if numbers]
        assert self._group is not None  # noqa: S101 - there are several ranks
        if self._group.shares_memory:
            for bucket in buckets:
                bucket.reduce_at_once()
        else:
            self._send(buckets)
            for bucket in buckets:
                bucket.finish()

    def take_from_first(self, present: frozenset[int]) -> None:
        """Replace the gradients by those of rank 0."""
        assert self._group is not None  # noqa: S101 - there are several ranks
        self._group.broadcast(self._gradients(present))

    def multiply(self, present: frozenset[int], factor: float) -> None:
        """Multiply the gradients."""
        torch._foreach_mul_(self._gradients(present), factor)

    def _gradients(self, numbers: frozenset[int]) -> list[torch.Tensor]:
        gradients = (self.parameters[number].parameter.grad for number in sorted(numbers))
        return [gradient for gradient in gradients if gradient is not None]

    def _send(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.clear()
            bucket.fill()
            bucket.launch()

    def _bucket(self, numbers: Sequence[int]) -> Bucket:
        assert self._group is not None  # noqa: S101 - there are several ranks
        parameters = [self.parameters[number].parameter for number in numbers]
        return Bucket(numbers, parameters, self._group, average=self._average)

    def _listener(self, bucket: Bucket, place: int) -> Callable[[], None]:
        def on_gradient() -> None:
            bucket.gradient_came(place)
            while self._next < len(self.buckets) and self.buckets[self._next].complete:
                self.buckets[self._next].launch()
                self._next += 1

        return on_gradient

"""Watches gradients: which are new since they were averaged, and whether a step would use them.

Once gradients are synchronised at all, an `optimizer.step()` that applies one that nobody has
averaged makes ranks drift apart silently. So it raises, and names the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.tensors.sync.parameters import Named, describe, with_names
from phalanx.values.errors import SynchronizeError

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer


class Watch:
    """One parameter's watch.

    Attributes:
        fresh: backward() has left something in its gradient since it was averaged last.
        listener: Is called when it does.
    """

    __slots__ = ("fresh", "listener")

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.fresh = False
        self.listener: Callable[[], None] | None = None

    def __call__(self, _: torch.Tensor) -> None:
        """A gradient came (torch calls it)."""
        self.fresh = True
        if self.listener is not None:
            self.listener()


class Guard:
    """The watches of all parameters that were ever synchronised."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._watches = WeakTensorKeyDictionary()
        self._on_duty = False

    def watch(self, parameter: torch.Tensor) -> Watch:
        """Return a parameter's watch, set up on first use."""
        watch: Watch | None = self._watches.get(parameter)
        if watch is None:
            watch = self._watches[parameter] = Watch()
            parameter.register_post_accumulate_grad_hook(watch)
        return watch

    def begin(self) -> None:
        """From now on, steps are looked at."""
        if not self._on_duty:
            self._on_duty = True
            register_optimizer_step_pre_hook(self._before_step)
            register_optimizer_step_post_hook(self._after_step)

    def stop(self) -> None:
        """Look at steps no more."""
        self._on_duty = False

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        if not _has_closure(args, kwargs):  # a closure makes its gradients in the step
            self._check(optimizer, "would apply")

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        if _has_closure(args, kwargs):
            self._check(optimizer, "has applied")

    def _check(self, optimizer: Optimizer, what: str) -> None:
        if not self._on_duty:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                watch: Watch | None = self._watches.get(parameter)
                if watch is None or watch.fresh:
                    name = describe(with_names([Named("", parameter)])[0])
                    raise SynchronizeError(
                        f"{type(optimizer).__name__}.step() {what} a gradient that was not "
                        f"averaged over the ranks: that of {name}. Call synchronize() between "
                        "backward() and step(), for all that backward() reaches; if this "
                        "parameter is meant to differ between ranks: synchronize(guard=False)"
                    )


def _has_closure(args: Any, kwargs: Any) -> bool:  # noqa: ANN401 - what step() was called with
    own = args[1:]  # the first is the optimizer
    return (own[0] if own else kwargs.get("closure")) is not None

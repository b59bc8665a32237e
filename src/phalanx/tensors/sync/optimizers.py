"""Knows the optimizers of this process, in the order in which they were made.

`synchronize()` without a target means their parameters. The order must be the same on all
ranks, so it is taken from where every optimizer passes: `Optimizer.add_param_group` when it is
made, `Optimizer.__setstate__` when it arrives by value.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

_known: list[weakref.ref[Optimizer]] = []


def watch_optimizers() -> None:
    """Begin to notice optimizers; may be repeated. For the process' start."""
    from torch.optim.optimizer import Optimizer  # noqa: PLC0415 - called once it is there

    for name in ("add_param_group", "__setstate__"):
        method = getattr(Optimizer, name)
        if not hasattr(method, "_phalanx_original"):
            setattr(Optimizer, name, _noting(method))


def note_steps(note: Callable[[], None]) -> None:
    """Call `note` after each step of any optimizer."""
    from torch.optim.optimizer import (  # noqa: PLC0415 - as above
        register_optimizer_step_post_hook,
    )

    register_optimizer_step_post_hook(lambda *_: note())


def known_optimizers() -> list[Optimizer]:
    """Return the living optimizers, the oldest first."""
    alive = [(ref, optimizer) for ref in _known if (optimizer := ref()) is not None]
    _known[:] = [ref for ref, _ in alive]
    return [optimizer for _, optimizer in alive]


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(self: Optimizer, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any signature
        result = method(self, *args, **kwargs)
        if not any(ref() is self for ref in _known):
            _known.append(weakref.ref(self))
        return result

    noting._phalanx_original = method  # type: ignore[attr-defined]  # noqa: SLF001 - our mark
    return noting

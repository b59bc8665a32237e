"""Which parameters a `synchronize()` is about, what they are called, and what they look like.

All ranks must mean the same parameters in the same order; the `signature` is how they tell.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from phalanx.values.errors import SynchronizeError

if TYPE_CHECKING:
    from torch.optim import Optimizer

Target: TypeAlias = (
    "torch.nn.Module | Optimizer | torch.Tensor | Iterable[Target | tuple[str, torch.Tensor]]"
)
"""A module, an optimizer, a parameter, or several of these (also ``named_parameters()``)."""


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A parameter, and what it is called in messages ("" if it is not known yet)."""

    name: str
    parameter: torch.Tensor


def parameters_of(target: Target) -> list[Named]:
    """Return the trainable parameters of a target, each once, in their order.

    Raises:
        SynchronizeError: It is none, or its gradients are somebody else's affair.
    """
    found: dict[int, Named] = {}
    for named in _walk(target):
        if not isinstance(named.parameter, torch.Tensor):
            raise SynchronizeError(
                f"synchronize() takes modules, optimizers and parameters, not a "
                f"{type(named.parameter).__name__}"
            )
        if named.parameter.requires_grad:
            found.setdefault(id(named.parameter), named)
    for named in found.values():
        _check(named)
    return list(found.values())


def _walk(target: Any) -> Iterator[Named]:  # noqa: ANN401 - users may pass anything
    if isinstance(target, torch.nn.parallel.DistributedDataParallel):
        raise SynchronizeError(
            "DistributedDataParallel averages the gradients itself, while backward() runs: leave "
            "synchronize() away, or pass the module inside (model.module)"
        )
    if isinstance(target, torch.nn.Module):
        for name, parameter in target.named_parameters():
            yield Named(name, parameter)
    elif isinstance(target, torch.optim.Optimizer):
        for group in target.param_groups:
            names = group.get("param_names") or [""] * len(group["params"])
            yield from map(Named, names, group["params"])
    elif isinstance(target, tuple) and len(target) == 2 and isinstance(target[0], str):
        yield Named(*target)
    elif isinstance(target, Iterable) and not isinstance(target, torch.Tensor | str | bytes):
        for each in target:
            yield from _walk(each)
    else:
        yield Named("", target)


def _check(named: Named) -> None:
    parameter, name = named.parameter, named.name or "a parameter"
    if is_traceable_wrapper_subclass(parameter):
        raise SynchronizeError(
            f"{name} is a {type(parameter).__name__}: whoever has sharded the model (FSDP, "
            "tensor parallelism) averages its gradients, too"
        )
    if not parameter.is_leaf:
        raise SynchronizeError(
            f"{name} is no leaf, so backward() leaves no gradient in it: pass the parameters "
            "that it was made from"
        )


def describe(named: Named) -> str:
    """Say in a few words what a parameter looks like; the same on ranks where it is the same."""
    parameter = named.parameter
    dtype = str(parameter.dtype).removeprefix("torch.")
    name = f"{named.name}: " if named.name else ""
    return f"{name}{dtype} {tuple(parameter.shape)} on {parameter.device.type}"


def signature(parameters: Sequence[Named], *extra: object) -> int:
    """Return 63 bits that are the same on ranks that mean the same parameters."""
    text = "\n".join([*map(describe, parameters), repr(extra)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def value_digest(parameters: Sequence[Named]) -> int:
    """Return 63 bits that are the same on ranks whose parameters have the same bits."""
    sums = [_sum_of_bits(named.parameter) for named in parameters]
    digest = hashlib.blake2b(repr(sums).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _sum_of_bits(tensor: torch.Tensor) -> int:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().contiguous().reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return int(flat.view(whole).sum(dtype=torch.int64).item())


def with_names(parameters: Sequence[Named]) -> list[Named]:
    """Look for the modules that hold nameless parameters; slow, for messages only."""
    names: dict[int, str] = {}
    for module in modules_around(parameters):
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), name)
    return [
        named if named.name else Named(names.get(id(named.parameter), ""), named.parameter)
        for named in parameters
    ]


def modules_around(parameters: Sequence[Named]) -> list[torch.nn.Module]:
    """Return the outermost modules that hold any of the parameters. Looks at all objects."""
    wanted = {id(named.parameter) for named in parameters}
    holders = [
        module
        for module in gc.get_objects()
        if issubclass(type(module), torch.nn.Module)  # isinstance asks the object; some warn
        and any(id(parameter) in wanted for parameter in module.parameters())
    ]
    inner = {id(child) for module in holders for child in module.modules() if child is not module}
    return [module for module in holders if id(module) not in inner]

"""Which piece of a value can't be pickled: found after a failure, by trying the pieces.

What is tried is what a pickler would take along, so a function's globals and closure count
as pieces of it. The innermost piece that fails by itself is the one to name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, BinaryIO, cast

_NUM_LEADING_PARAMETERS = 2
"""A worker calls function(rank, world_size, *args, **kwargs)."""
_MAX_PIECES = 1000
"""Pieces of one value that are tried: each try pickles all below it."""

MakePickler = Callable[[BinaryIO], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A piece that can't travel.

    Attributes:
        path: Names of the pieces on the way to it, outermost first. One that begins with
            "its" means nothing without the one before.
        reason: What pickling it raised.
    """

    path: tuple[str, ...]
    reason: str

    def story(self, whither: str) -> str:
        """Say what can't travel and why, without a full stop."""
        start = max(i for i, label in enumerate(self.path) if not label.startswith("its "))
        what = ", ".join(self.path[start:])
        if start:
            what += f" (reached from {self.path[0]})"
        elif "," in what:
            what += ","
        return f"{what} can't travel to {whither}: {self.reason}"


def parts_of_call(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Yield the parts of a call with a name for each: arguments first, they are nearest."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        parameters = []
    parameters = parameters[_NUM_LEADING_PARAMETERS:]
    for index, value in enumerate(args):
        label = f"the argument at index {index}"
        if index < len(parameters) and parameters[index].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            label = f"argument {parameters[index].name!r} (index {index})"
        yield label, value
    for name, value in kwargs.items():
        yield f"keyword argument {name!r}", value
    yield f"the function {_name(function)}", function


def find(parts: Iterable[tuple[str, object]], make_pickler: MakePickler) -> Culprit | None:
    """Return the innermost piece of the first part that fails; None if all can be pickled."""
    for label, value in parts:
        search = _Search(make_pickler=make_pickler)
        reason = search.why_not(value)
        if reason is not None:
            found = search.innermost(value) or Culprit(path=(), reason=reason)
            return Culprit(path=(label, *found.path), reason=found.reason)
    return None


@dataclass(slots=True, kw_only=True)
class _Search:
    make_pickler: MakePickler
    failing: list[object] = field(default_factory=list)
    """Held, so that no other object gets one of their identities."""

    def why_not(self, value: object) -> str | None:
        """Return why a value can't be pickled; None if it can."""
        try:
            self.make_pickler(cast("BinaryIO", _Nowhere())).dump(value)
        except Exception as error:  # noqa: BLE001 - whatever a class's pickling raises
            return f"{type(error).__name__}: {error}".rstrip(": ").rstrip(".")
        return None

    def innermost(self, value: object) -> Culprit | None:
        """Return what makes a failing value fail, or None if that lies elsewhere.

        It lies elsewhere when all that fails below is a piece that is being looked into
        already: of two functions that call each other only one may have the bad global.
        """
        self.failing.append(value)
        in_a_circle = False
        for label, piece in islice(_pieces(value, self.make_pickler), _MAX_PIECES):
            if any(piece is known for known in self.failing):
                in_a_circle = True
            elif self.why_not(piece) is not None:
                found = self.innermost(piece)
                if found is not None:
                    return Culprit(path=(label, *found.path), reason=found.reason)
                in_a_circle = True
        if in_a_circle:
            return None
        return Culprit(path=(), reason=self.why_not(value) or "")


class _Nowhere(io.RawIOBase):
    """Takes what is written and keeps nothing."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        return memoryview(data).nbytes


# ── what a pickler takes along ───────────────────────────────────────────────────────────


def _pieces(value: object, make_pickler: MakePickler) -> Iterator[tuple[str, object]]:
    match value:
        case dict():
            for key, item in list(cast("dict[object, object]", value).items()):
                yield f"its item {key!r:.80}", item
        case list() | tuple() | set() | frozenset():
            for index, item in enumerate(list(cast("Iterable[object]", value))):
                yield f"its item {index}", item
        case functools.partial():
            yield "its function", value.func
            yield "its arguments", value.args
            yield "its keyword arguments", value.keywords
        case types.MethodType():
            yield f"the object that {_name(value)} belongs to", value.__self__
            yield f"the function {_name(value)}", value.__func__
        case staticmethod() | classmethod():
            yield f"the function {_name(value)}", value.__func__
        case property():
            for function in (value.fget, value.fset, value.fdel):
                yield f"the function {_name(function)}", function
        case types.FunctionType() | type():
            yield from _pieces_by_value(value, make_pickler)
        case _:
            yield from _attributes(value)
            yield f"the class {type(value).__qualname__}", type(value)


def _pieces_by_value(
    value: types.FunctionType | type, make_pickler: MakePickler
) -> Iterator[tuple[str, object]]:
    """Ask the pickler: it knows what of a function or class it takes along."""
    reduced = make_pickler(cast("BinaryIO", _Nowhere())).reducer_override(value)
    if not isinstance(reduced, tuple) or len(reduced) != 6:  # by reference
        return
    attributes, slots = reduced[2][-1]
    if isinstance(value, type):
        for base in value.__bases__:
            yield f"the class {base.__qualname__}", base
        for name, attribute in attributes.items():
            yield f"the attribute {name!r} of class {value.__qualname__}", attribute
        return
    user = _name(value)
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f"the closure variable {name!r} of {user}", cell.cell_contents
    for name, used in slots["__globals__"].items():
        yield f"the global {name!r} used by {user}", used
    for index, default in enumerate(value.__defaults__ or ()):
        yield f"default value {index} of {user}", default
    for name, default in (value.__kwdefaults__ or {}).items():
        yield f"the default of {name!r} of {user}", default
    for name, attribute in attributes.items():
        yield f"the attribute {name!r} of {user}", attribute


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    if type(value).__module__.startswith("multiprocessing."):
        return  # why such an object can't travel says more than its parts do
    names = list(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    for name in names:
        if name in ("__dict__", "__weakref__"):
            continue
        with contextlib.suppress(Exception):  # a slot that is empty, a property that raises
            yield f"its attribute {name!r}", getattr(value, name)


def _name(function: object) -> str:
    return f"{getattr(function, '__qualname__', type(function).__qualname__)}()"

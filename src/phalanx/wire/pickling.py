"""The machinery under `phalanx.wire.payload`: cloudpickle, with `__main__` done properly.

What cloudpickle 3.1 does, and what is done about it here:

- It gives functions that shared their globals a new dict to share. `globals_ref` maps the
  one to the other, so the launcher's ``__main__`` is mapped to a `Standin`.
- When a class comes home, it sets all attributes of the original anew, and overwrites the
  globals of its methods. Here what is known already stays as it is (`Registry`), and a
  class that came from the launcher goes back as a key.
- It replaces file names in code by ``<dynamic-code>``, and ``__qualname__`` by ``__name__``.
- It misses globals that the body of a nested class reads, and leaves things like `NewType`,
  `ParamSpec` and `lru_cache` to pickle, which looks for them in the worker's ``__main__``.

Stand-ins come by ``reducer_override`` and not by ``persistent_id``: pickle asks the latter
about every object, which doubles the time that a list of numbers takes.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import linecache
import mmap
import os
import pickle
import sys
import types
import typing
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle

from phalanx.values.context import SubprocessContext
from phalanx.wire import sharing

Data: TypeAlias = "bytes | bytearray | memoryview | mmap.mmap | BinaryIO"
"""Where a pickle is read from; a mapping is read in place."""

_CONTEXT_NAME = "context"


# ── who is who ───────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Registry:
    """Functions and classes that left or entered this process by value, by a key for each.

    Functions are held weakly, for a closure may hold a lot. Classes are held: a worker sends
    back only their keys, and what it made of them must still find them here.
    """

    objects: WeakValueDictionary[str, Any] = field(default_factory=WeakValueDictionary)
    keys: WeakKeyDictionary[Any, str] = field(default_factory=WeakKeyDictionary)
    classes: list[type] = field(default_factory=list)
    received: set[str] = field(default_factory=set)
    """Keys of what came from the launcher."""
    received_names: set[str] = field(default_factory=set)
    """Globals of ``__main__`` that came from the launcher."""

    def add(self, key: str, value: object) -> None:
        """Know a function or class under a key."""
        self.keys[value], self.objects[key] = key, value
        if isinstance(value, type):
            self.classes.append(value)

    def key_of(self, value: object) -> str:
        """Return the key of a function or class, a new one if it is not known yet."""
        key = self.keys.get(value)
        if key is None:
            key = uuid.uuid4().hex  # not a counter: forks would count alike
            self.add(key, value)
        return key


registry = Registry()


@dataclass(slots=True, kw_only=True)
class Arrival:
    """What a pickle that is being loaded is loaded into."""

    names: dict[str, Any]
    """The globals of ``__main__``."""
    context: object = None
    outward: bool = False
    """From the launcher to a worker, not back."""
    named: list[tuple[str, object, bool]] = field(default_factory=list)


current_arrival: ContextVar[Arrival] = ContextVar("phalanx-arrival")


def load(data: Data, arrival: Arrival) -> Any:  # noqa: ANN401 - whatever was pickled
    """Load a pickle that a `MainPickler` made."""
    token = current_arrival.set(arrival)
    own_builtins = arrival.names.get("__builtins__", builtins)
    try:
        if isinstance(data, bytes | bytearray | memoryview | mmap.mmap):
            return pickle.loads(data)  # noqa: S301 - from our own processes, by descriptor
        return pickle.load(data)  # noqa: S301 - as above
    finally:
        arrival.names["__builtins__"] = own_builtins  # cloudpickle puts its own there
        current_arrival.reset(token)


# ── what a pickle calls when it is loaded ────────────────────────────────────────────────


def _main_globals(facts: dict[str, str]) -> dict[str, Any]:
    names = current_arrival.get().names
    for name, value in facts.items():
        if names.get(name) is None:  # a new module has None under most of them
            names[name] = value
    return names


def _own_context() -> object:
    return current_arrival.get().context


def _registered(key: str, name: str) -> object:
    """Return a class that was sent out from here."""
    known = registry.objects.get(key)
    if known is None:
        raise LookupError(f"the class {name} was not sent from this process: it can't be found")
    return known


def _arrive(key: str, make: Callable[..., object], args: tuple[object, ...]) -> object:
    """Return the function or class with this key: the one that is here, or a new one."""
    known = registry.objects.get(key)
    return make(*args) if known is None else known


def _settle(value: Any, label: tuple[str, str | None, bool, Callable[..., object], Any]) -> None:  # noqa: ANN401
    """Fill a function or class that `_arrive` made; leave alone one that was here before."""
    key, name, exact, set_state, state = label
    if registry.objects.get(key) is value:
        return
    arrival = current_arrival.get()
    if isinstance(value, types.FunctionType):
        reached, here = state[1]["__globals__"], value.__globals__
        if arrival.outward and here is arrival.names:
            registry.received_names.update(reached)
        state[1]["__globals__"] = {name: reached[name] for name in reached if name not in here}
    set_state(value, state)
    registry.add(key, value)
    if arrival.outward:
        registry.received.add(key)
        if name is not None:
            arrival.named.append((name, value, exact))


def _make_code(args: tuple[Any, ...], filename: str, lines: list[str] | None) -> types.CodeType:
    """Make code that knows its file, so that tracebacks and `inspect` show its source."""
    if lines is not None:
        # Without a time of modification, linecache does not look for the file.
        linecache.cache.setdefault(filename, (sum(map(len, lines)), None, lines, filename))
    return types.CodeType(*args).replace(co_filename=filename)


def _make_named(make: Callable[..., Any], args: tuple[Any, ...], name: str, exact: bool) -> object:  # noqa: FBT001 - positional in a pickle
    value = make(*args)
    with contextlib.suppress(AttributeError, TypeError):
        value.__module__ = "__main__"
    arrival = current_arrival.get()
    if arrival.outward and name.isidentifier():
        arrival.named.append((name, value, exact))
    return value


def _make_cache(function: Callable[..., object], parameters: dict[str, Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _make_cached_property(function: Callable[[Any], object], name: str | None) -> object:
    value = functools.cached_property(function)
    value.attrname = name
    return value


# ── what a pickle is made by ─────────────────────────────────────────────────────────────


class Standin:
    """Becomes in the pickle what a call returns in the process that loads it."""

    def __init__(self, make: Callable[..., object], *args: object) -> None:
        self._reduced = (make, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


_REMAKERS: dict[type, Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    type(functools.lru_cache(abs)): lambda o: (_make_cache, (o.__wrapped__, o.cache_parameters())),
    typing.NewType: lambda o: (typing.NewType, (o.__name__, o.__supertype__)),
    typing.ParamSpec: lambda o: (typing.ParamSpec, (o.__name__,)),
}
if sys.version_info >= (3, 11):
    _REMAKERS[typing.TypeVarTuple] = lambda o: (typing.TypeVarTuple, (o.__name__,))


class MainPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Cloudpickle's, with ``__main__``, contexts and names as this module's docstring says."""

    def __init__(
        self,
        file: BinaryIO,
        main: types.ModuleType,
        context_class: type,
        *,
        inheritance: sharing.Inheritance | None = None,
    ) -> None:
        """Pickle for the workers, with what they inherit; None: for the launcher."""
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._main = main.__dict__
        self._context_class = context_class
        self._inheritance = inheritance
        self._homeward = homeward = inheritance is None
        self._sources: dict[str, list[str] | None] = {}
        self._context = Standin(_own_context)
        facts = {} if homeward else _facts(self._main)
        self.globals_ref[id(self._main)] = Standin(_main_globals, facts)

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 - pickle's own signature
        """Say how an object is pickled, where that is not pickle's own way."""
        kind = type(obj)  # not isinstance: that asks the __class__ of proxies
        passed = self._passed_on(obj, kind)
        if passed is not None:
            return passed
        if kind is types.CodeType:
            args = cloudpickle.Pickler.dispatch_table[kind](obj)[1]
            return _make_code, (args, obj.co_filename, self._lines(obj.co_filename))
        if kind is functools.cached_property:  # before 3.12 it has a lock
            return _make_cached_property, (obj.func, obj.attrname)
        if kind in _REMAKERS and obj.__module__ == "__main__":
            exact = self._main.get(obj.__name__) is obj
            return _make_named, (*_REMAKERS[kind](obj), obj.__name__, exact)
        reduced: Any = super().reducer_override(obj)
        if isinstance(reduced, tuple) and len(reduced) == 6:
            return self._by_value(obj, reduced)
        return reduced

    def _passed_on(self, obj: Any, kind: type) -> Any:  # noqa: ANN401 - pickle's own
        """Reduce what is the worker's own there, or shared with it."""
        if issubclass(kind, self._context_class):
            if self._homeward:
                raise pickle.PicklingError("a worker's context can't leave its worker")
            return self._context.__reduce__()
        if self._inheritance is not None:
            return self._inheritance.reduce(obj, kind)
        sharing.refuse_homeward(kind)
        return None

    def _by_value(self, obj: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ANN401
        """Make cloudpickle's reduction of a function or class go through `_arrive`, `_settle`."""
        make, args, state, _, _, set_state = reduced
        key = registry.key_of(obj)
        if isinstance(obj, types.FunctionType):
            state[1]["__globals__"] = self._globals(obj, state[1]["__globals__"])
        elif self._homeward and key in registry.received:
            return _registered, (key, obj.__qualname__)
        else:
            state[0]["__qualname__"] = obj.__qualname__
        top_level = obj.__module__ == "__main__" and obj.__qualname__.isidentifier()
        exact = self._main.get(obj.__name__) is obj
        label = (key, obj.__name__ if top_level else None, exact, set_state, state)
        return _arrive, (key, make, args), label, None, None, _settle

    def _globals(self, function: types.FunctionType, found: dict[str, Any]) -> dict[str, Any]:
        """Return the globals that go along with a function."""
        have, reads = function.__globals__, _names_read(function.__code__)
        found = found | {name: have[name] for name in reads if name in have}
        if self._homeward:
            # The launcher has its own: what this worker made of them stays here.
            skip = registry.received_names if have is self._main else ()
            return {name: value for name, value in found.items() if name not in skip}
        in_main = function.__module__ == "__main__"
        if in_main and _CONTEXT_NAME in reads - have.keys() - vars(builtins).keys():
            found[_CONTEXT_NAME] = self._context
        return found

    def _lines(self, filename: str) -> list[str] | None:
        """Return the source of a file that is none, like a notebook's cell."""
        if filename not in self._sources:
            missing = not self._homeward and not os.path.exists(filename)  # noqa: PTH110
            self._sources[filename] = (linecache.getlines(filename) if missing else None) or None
        return self._sources[filename]


def homeward_pickler(file: BinaryIO) -> MainPickler:
    """Return the pickler for what a worker sends to its launcher."""
    return MainPickler(file, sys.modules["__main__"], SubprocessContext)


def _facts(names: dict[str, Any]) -> dict[str, str]:
    """Return what functions may ask of their module without naming it."""
    facts = {name: names.get(name) for name in ("__doc__", "__file__", "__package__")}
    return {name: value for name, value in facts.items() if isinstance(value, str)}


def _names_read(code: types.CodeType) -> set[str]:
    """Return the globals that code and the code nested in it may read."""
    names: set[str] = set()
    stored: set[str] = set()
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
            names.add(name)
        elif instruction.opname == "LOAD_NAME" and name not in stored:
            names.add(name)  # in the body of a class, before the class has such a name
        elif instruction.opname == "STORE_NAME":
            stored.add(name)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_read(constant)
    return names

"""Functions and values between processes: one cloudpickle, with `__main__` done properly.

A function from ``__main__`` (script, standard input, ``-c``, REPL, notebook) travels by
value with the names that it uses. In the worker the globals of all such functions *are* the
worker's ``__main__``, and the functions and classes that came along are found there under
their names; so a class defined in a script pickles both ways, with plain pickle too.

Imported lazily: cloudpickle costs as much as the rest of Phalanx together.
"""

from __future__ import annotations

import builtins
import dis
import io
import linecache
import os.path
import pickle
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import cloudpickle

from phalanx.errors import PayloadError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

_CONTEXT_NAME = "context"
_DYNAMIC = "<dynamic-code>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function and what to call it with."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]


class _Writable(Protocol):
    """All that a pickler needs of a file."""

    def write(self, data: Any, /) -> int: ...  # noqa: ANN401 - any buffer


class _MainGlobals:
    """Stands for the globals of the launcher's `__main__` in a pickle."""

    def __reduce__(self) -> tuple[Callable[[], dict[str, Any]], tuple[()]]:
        return (_main_globals, ())


def _main_globals() -> dict[str, Any]:
    """Return the globals of this process' `__main__`: what `_MainGlobals` becomes."""
    return sys.modules["__main__"].__dict__


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Notes which functions and classes of `__main__` a pickle takes along."""

    def __init__(self, file: _Writable) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        main = _main_globals()
        self.globals_ref[id(main)] = _MainGlobals()
        self.taken: dict[str, object] = {}
        self.sources: dict[str, list[str]] = {}
        self.wants_context = False

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 - pickle's own signature
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            if "." not in obj.__qualname__ and obj.__name__.isidentifier():
                self.taken[obj.__name__] = obj
            if isinstance(obj, types.FunctionType):
                self.wants_context |= _uses_missing_context(obj)
        if isinstance(obj, types.CodeType):
            return self._reduce_code(obj)
        return super().reducer_override(obj)

    def _reduce_code(self, code: types.CodeType) -> tuple[Any, tuple[Any, ...]]:
        """Keep the file's name, which cloudpickle replaces: tracebacks need it.

        Where there is no such file (a notebook's cell), the lines travel along.
        """
        make, parts = self.dispatch_table[types.CodeType](code)
        name = code.co_filename
        if name not in self.sources and not os.path.exists(name):  # noqa: PTH110 - a name
            self.sources[name] = linecache.getlines(name)
        return make, tuple(name if part == _DYNAMIC else part for part in parts)


def _uses_missing_context(function: types.FunctionType) -> bool:
    """Whether a function reads a global `context` that did not exist when it was pickled."""
    if _CONTEXT_NAME in function.__globals__ or hasattr(builtins, _CONTEXT_NAME):
        return False
    return any(_CONTEXT_NAME in _global_names(code) for code in _codes(function.__code__))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _global_names(code: types.CodeType) -> set[str]:
    return {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def dump_call(call: Call, file: BinaryIO) -> None:
    """Write a call, once for however many workers.

    Raises:
        PayloadError: Something in it can't travel; the message says what.
    """
    pickler = _Pickler(file)
    try:
        pickler.dump((call.function, call.args, call.kwargs))
        pickler.dump((pickler.taken, pickler.sources, pickler.wants_context))
    except Exception as error:
        raise PayloadError(_blame(call, error)) from error


def load_call(data: mmap.mmap, context: object) -> Call:
    """Read a call, in a worker whose `__main__` and context are in place.

    Raises:
        Exception: Whatever importing the modules of the function and its arguments raises.
    """
    unpickler = pickle.Unpickler(data)  # noqa: S301 - from our own launcher, by descriptor
    function, args, kwargs = unpickler.load()
    taken, sources, wants_context = unpickler.load()
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    main = _main_globals()
    for name, value in taken.items():
        main.setdefault(name, value)
    if wants_context:
        main.setdefault(_CONTEXT_NAME, context)
    return Call(function=function, args=args, kwargs=kwargs)


def dump_value(value: object, file: BinaryIO) -> None:
    """Write what a worker returns.

    Raises:
        PayloadError: It can't travel.
    """
    try:
        _Pickler(file).dump(value)
    except Exception as error:
        raise PayloadError(
            f"the return value, a {type(value).__qualname__}, can't travel to the launcher: "
            f"{_reason(error)}. Return plain values, arrays or tensors, or write it to a file"
        ) from error


def load_value(data: bytes | mmap.mmap) -> object:
    """Read what `dump_value` wrote."""
    return pickle.loads(data)  # noqa: S301 - from our own worker, by way of our own agent


def roundtrips(error: BaseException) -> bytes | None:
    """Return an exception pickled, or None if it would not come out again.

    An exception whose constructor takes other arguments than it has in `args` pickles
    without complaint and fails when it is loaded.
    """
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(error)
        copy = pickle.loads(buffer.getvalue())  # noqa: S301 - made in this very line
    except Exception:  # noqa: BLE001 - user classes: anything may come
        return None
    return buffer.getvalue() if type(copy) is type(error) else None


# ── whom to blame ────────────────────────────────────────────────────────────────────────


def _blame(call: Call, error: Exception) -> str:
    """Find the piece that can't travel, by trying them one by one."""
    for what, piece, remedy in _pieces(call):
        reason = _why_not(piece)
        if reason is not None:
            return f"{what} can't travel to the workers: {reason}. {remedy}"
    return f"the call can't travel to the workers: {_reason(error)}"


def _pieces(call: Call) -> Iterator[tuple[str, object, str]]:
    remedy = "Make it inside the worker instead, or pass what is needed to make it"
    for index, value in enumerate(call.args):
        yield f"args[{index}], a {type(value).__qualname__},", value, remedy
    for name, value in call.kwargs.items():
        yield f"the keyword argument {name!r}, a {type(value).__qualname__},", value, remedy
    function = call.function
    name = getattr(function, "__qualname__", repr(function))
    for label, value in _reached(function):
        yield f"{label} used by {name}", value, remedy
    yield f"the function {name}", function, "Define it at the top level of a module or script"


def _reached(function: object) -> Iterator[tuple[str, object]]:
    """Yield what a function takes along, with a name for each, nearest first."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"the enclosing variable {name!r}", cell.cell_contents
        except ValueError:  # an empty cell
            continue
    names = {name for code in _codes(function.__code__) for name in _global_names(code)}
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if value is not function:
            yield f"the global {name!r}", value


def _why_not(value: object) -> str | None:
    try:
        _Pickler(_Nowhere()).dump(value)
    except Exception as error:  # noqa: BLE001 - whatever a class's pickling raises
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ").rstrip(".")


class _Nowhere:
    """Takes what is written and keeps nothing."""

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        return memoryview(data).nbytes

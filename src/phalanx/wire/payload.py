"""Functions and values between processes: one cloudpickle, with `__main__` done properly.

A function from ``__main__`` (script, standard input, ``-c``, REPL, notebook) travels by
value with the names that it uses. In the worker the globals of all such functions *are* the
worker's ``__main__``, and the functions and classes that came along are found there under
their names; so a class defined in a script pickles both ways, with plain pickle too.

Imported lazily: cloudpickle costs as much as the rest of Phalanx together.
"""

from __future__ import annotations

import io
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from phalanx.values.context import SubprocessContext
from phalanx.values.errors import PayloadError
from phalanx.wire import culprit
from phalanx.wire.pickling import (
    Arrival,
    Data,
    MainPickler,
    Standin,
    homeward_pickler,
    load,
)
from phalanx.wire.sharing import FORK_CONTEXT, Inheritance, inherited


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function and what to call it with, after rank and world size."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]


def dump_call(
    call: Call,
    file: BinaryIO,
    *,
    context_class: type = SubprocessContext,
    main: types.ModuleType | None = None,
    inheritance: Inheritance | None = None,
) -> None:
    """Write a call, once for however many workers.

    Args:
        call: The function and its arguments.
        file: Where to write. After an error it holds a part of the pickle.
        context_class: Instances of it arrive as the worker's own context.
        main: The module whose functions travel by value; None: this process' ``__main__``.
        inheritance: Gets what must travel beside it.

    Raises:
        PayloadError: Something in it can't travel; the message says what.
    """
    main = main or sys.modules["__main__"]

    inheritance = Inheritance() if inheritance is None else inheritance

    def make_pickler(file: BinaryIO) -> MainPickler:
        return MainPickler(file, main, context_class, inheritance=inheritance)

    with inheritance.collecting():
        try:
            join, place = inheritance.family()
            family = Standin(join, *place)
            make_pickler(file).dump((family, call.function, call.args, call.kwargs))
        except Exception as error:
            parts = culprit.parts_of_call(call.function, call.args, call.kwargs)
            found = culprit.find(parts, make_pickler)
            if found is None:
                raise  # all of it can travel: the file is to blame
            advice = ". Create it inside the worker, or pass what is needed to make it"
            if FORK_CONTEXT in found.reason:  # that says it all
                advice = ""
            raise PayloadError(f"{found.story('the workers')}{advice}") from error


def load_call(
    data: Data,
    context: object,
    *,
    main: types.ModuleType | None = None,
    fds: Sequence[int] = (),
) -> Call:
    """Read a call, in a worker whose ``sys.modules["__main__"]`` is in place.

    Args:
        data: What `dump_call` wrote.
        context: The worker's context.
        main: The worker's ``__main__``, which gets the names that came along; what it has
            already is left alone. None: the one in `sys.modules`.
        fds: What came beside it, in order; closed when it is loaded.

    Raises:
        Exception: Whatever importing the modules of the function and its arguments raises.
    """
    names = (main or sys.modules["__main__"]).__dict__
    arrival = Arrival(names=names, context=context, outward=True)
    token = inherited.set(list(fds))
    try:
        _, function, args, kwargs = load(data, arrival)
    finally:
        inherited.reset(token)
        for fd in fds:
            os.close(fd)
    # What the launcher had under its name goes before what only calls itself so: a decorated
    # function before the one inside it.
    for wanted in (True, False):
        for name, value, is_exact in arrival.named:
            if is_exact is wanted:
                names.setdefault(name, value)
    return Call(function=function, args=args, kwargs=kwargs)


def dump_value(value: object, file: BinaryIO) -> None:
    """Write what a worker returns.

    Raises:
        PayloadError: It can't travel; the message says which part of it.
    """
    try:
        homeward_pickler(file).dump(value)
    except Exception as error:
        label = f"the return value, a {type(value).__qualname__}"
        found = culprit.find([(label, value)], homeward_pickler)
        if found is None:
            raise  # it can travel: the file is to blame
        advice = "Return plain values, arrays or tensors, or write it to a file"
        raise PayloadError(f"{found.story('the launcher')}. {advice}") from error


def load_value(data: Data) -> object:
    """Read what `dump_value` wrote. Changes no class, function or global that exists here."""
    return load(data, Arrival(names=sys.modules["__main__"].__dict__))


def roundtrips(exception: BaseException) -> bytes | None:
    """Return an exception pickled for `load_value`, or None if it would not come out again.

    An exception whose constructor takes other arguments than it has in `args` pickles
    without complaint and fails when it is loaded.
    """
    file = io.BytesIO()
    try:
        homeward_pickler(file).dump(exception)
        copy = load_value(file.getvalue())
    except Exception:  # noqa: BLE001 - user classes: anything may come
        return None
    return file.getvalue() if type(copy) is type(exception) else None

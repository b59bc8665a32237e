from __future__ import annotations

import functools
import io
import sys
import threading
import types

import pytest

from phalanx import payload
from phalanx.context import SubprocessContext
from phalanx.errors import PayloadError


class Carried:
    """Stands for a class defined in a script (see `in_main`)."""


@pytest.fixture
def in_main(monkeypatch):
    """Run source in a `__main__` of its own; return a way to send calls to another one."""
    launcher = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", launcher)

    def define(source: str) -> types.ModuleType:
        exec(compile(source, "<script>", "exec"), launcher.__dict__)
        return launcher

    def send(function, *args, context="the worker's context", **kwargs) -> tuple:
        file = io.BytesIO()
        payload.dump_call(payload.Call(function=function, args=args, kwargs=kwargs), file)
        worker = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", worker)
        file.seek(0)
        call = payload.load_call(file, context)
        return call, worker

    define.send = send  # type: ignore[attr-defined]
    return define


def run(call: payload.Call):
    return call.function(*call.args, **call.kwargs)


def test_a_function_takes_what_it_uses_and_nothing_else(in_main):
    main = in_main(
        "import threading\nUSED = 2\nUNUSED = threading.Lock()\n"
        "def helper(x): return x * USED\n"
        "def f(rank, size): return helper(rank) + size\n"
    )
    call, worker = in_main.send(main.f, 3, 4)
    assert run(call) == 10
    assert worker.f is call.function
    assert worker.f.__globals__ is worker.__dict__
    assert not hasattr(worker, "UNUSED")


@pytest.mark.parametrize(
    ("source", "expression"),
    [
        ("f = lambda rank, size: rank + size", "f"),
        ("class C:\n    def __call__(self, rank, size): return rank + size", "C()"),
        ("class C:\n    def go(self, rank, size): return rank + size", "C().go"),
        ("import functools\ndef g(x, rank, size): return x + rank + size - 5", "functools.partial(g, 5)"),
        ("def outer(k):\n    def f(rank, size): return rank + size + k\n    return f", "outer(0)"),
        ("def f(rank, size): return rank + size if rank == 3 else f(3, size)", "f"),
        ("def even(n, s): return odd(n, s)\ndef odd(n, s): return n + s if n else even(1, s)", "even"),
        ("import functools\ndef deco(g):\n    @functools.wraps(g)\n    def w(*a): return g(*a)\n    return w\n"
         "@deco\ndef f(rank, size): return rank + size", "f"),
        ("import dataclasses, enum\n@dataclasses.dataclass\nclass D:\n    x: int\nclass E(enum.Enum):\n    A = 0\n"
         "def f(rank, size): return D(rank).x + size + E.A.value", "f"),
    ],
)  # fmt: skip
def test_all_kinds_of_functions_travel(in_main, source, expression):
    main = in_main(source)
    call, _ = in_main.send(eval(expression, main.__dict__), 3, 4)
    assert run(call) == 7


def test_a_class_reached_only_through_an_argument_is_found_under_its_name(in_main):
    import pickle

    main = in_main("class Point:\n    pass\ndef f(rank, size, point): return point\n")
    call, worker = in_main.send(main.f, 0, 1, main.Point())
    point = run(call)
    assert type(point) is worker.Point
    assert type(pickle.loads(pickle.dumps(point))) is worker.Point
    file = io.BytesIO()
    payload.dump_value(point, file)
    assert type(payload.load_value(file.getvalue())) is main.Point, "home again"


@pytest.mark.parametrize(
    "body",
    ["context", "[context for _ in range(1)][0]", "(lambda: context)()"],
)
def test_context_is_bound_where_the_script_left_it_undefined(in_main, body):
    main = in_main(f"def f(rank, size): return {body}\n")
    call, worker = in_main.send(main.f, 0, 1)
    assert run(call) == "the worker's context"
    assert worker.context == "the worker's context"


def test_a_context_of_the_script_is_left_alone(in_main):
    main = in_main("context = 'mine'\ndef f(rank, size): return context\n")
    assert run(in_main.send(main.f, 0, 1)[0]) == "mine"
    main = in_main("def g(rank, size):\n    context = 'local'\n    return context\n")
    call, worker = in_main.send(main.g, 0, 1)
    assert run(call) == "local"
    assert not hasattr(worker, "context")


def test_a_context_object_becomes_the_workers_own(in_main, monkeypatch):
    from phalanx import context as module

    own = SubprocessContext()
    monkeypatch.setattr(module, "_of_this_worker", own)
    main = in_main("def f(rank, size, given): return context, given\n")
    main.context = SubprocessContext()
    call, _ = in_main.send(main.f, 0, 1, main.context)
    assert run(call) == (own, own)


def test_tracebacks_keep_file_and_lines(in_main):
    import linecache

    source = "def f(rank, size):\n    raise ValueError(rank)\n"
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
    main = in_main("")
    exec(compile(source, "<cell 1>", "exec"), main.__dict__)
    file = io.BytesIO()
    payload.dump_call(payload.Call(function=main.f, args=(), kwargs={}), file)
    del linecache.cache["<cell 1>"]  # the worker never had it
    file.seek(0)
    call = payload.load_call(file, None)
    assert call.function.__code__.co_filename == "<cell 1>"
    assert linecache.getline("<cell 1>", 2).strip() == "raise ValueError(rank)"


@pytest.mark.parametrize(
    ("source", "arguments", "words"),
    [
        ("def f(r, s, a): pass", (threading.Lock(),), "args[2], a lock,"),
        ("import threading\nlock = threading.Lock()\ndef f(r, s): return lock", (),
         "the global 'lock' used by f"),
        ("import threading\ndef outer():\n    lock = threading.Lock()\n    return lambda r, s: lock\n"
         "f = outer()", (), "the enclosing variable 'lock'"),
        ("import threading\nclass f:\n    lock = threading.Lock()\n    def __call__(s): pass\nf = f()",
         (), "the function"),
    ],
)  # fmt: skip
def test_what_can_not_travel_is_named(in_main, source, arguments, words):
    main = in_main(source)
    with pytest.raises(PayloadError) as caught:
        in_main.send(main.f, 0, 1, *arguments)
    assert words in str(caught.value)
    assert "lock" in str(caught.value)


def test_a_keyword_argument_is_named(in_main):
    main = in_main("def f(r, s, **k): pass")
    with pytest.raises(PayloadError, match="keyword argument 'db'"):
        in_main.send(main.f, 0, 1, db=threading.Lock())


class Picky(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


def test_only_exceptions_that_come_out_again_are_sent():
    data = payload.roundtrips(ValueError("x"))
    assert str(payload.load_value(data)) == "x"
    assert payload.roundtrips(Picky(1, "y")) is None


def test_partials_of_importable_functions_travel_by_reference():
    file = io.BytesIO()
    payload.dump_call(payload.Call(function=functools.partial(max, 3), args=(), kwargs={}), file)
    assert len(file.getvalue()) < 200

from __future__ import annotations

import builtins
import functools
import io
import linecache
import pickle
import sys
import threading
import types
from contextlib import contextmanager
from multiprocessing import resource_tracker
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle.cloudpickle as tracker
import pytest

from phalanx.values.context import SubprocessContext
from phalanx.values.errors import PayloadError
from phalanx.wire import payload, pickling

OWN = "the worker's context"


class Process:
    """A `__main__`, and what payload and cloudpickle remember, as a process of its own."""

    def __init__(self, monkeypatch) -> None:
        self.main = types.ModuleType("__main__")
        self._registry = pickling.Registry()
        self._trackers = (WeakKeyDictionary(), WeakValueDictionary())
        self._monkeypatch = monkeypatch

    @contextmanager
    def here(self):
        with self._monkeypatch.context() as patch:
            patch.setitem(sys.modules, "__main__", self.main)
            patch.setattr(pickling, "registry", self._registry)
            patch.setattr(tracker, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", self._trackers[0])
            patch.setattr(tracker, "_DYNAMIC_CLASS_TRACKER_BY_ID", self._trackers[1])
            yield self.main

    def define(self, source: str, filename: str = "<script>") -> types.ModuleType:
        with self.here():
            exec(compile(source, filename, "exec", dont_inherit=True), self.main.__dict__)
        return self.main


class Pair:
    """A launcher with a script, and a worker."""

    def __init__(self, monkeypatch) -> None:
        self.launcher = Process(monkeypatch)
        self.worker = Process(monkeypatch)

    def send(self, function, *args, **kwargs) -> payload.Call:
        file = io.BytesIO()
        with self.launcher.here():
            payload.dump_call(payload.Call(function=function, args=args, kwargs=kwargs), file)
        with self.worker.here() as main:
            return payload.load_call(file.getvalue(), context=OWN, main=main)

    def call(self, function, *args, **kwargs):
        """Run a function in the worker, as rank 0 of 1."""
        call = self.send(function, *args, **kwargs)
        with self.worker.here():
            return call.function(0, 1, *call.args, **call.kwargs)

    def back(self, value):
        """Send a value home."""
        file = io.BytesIO()
        with self.worker.here():
            payload.dump_value(value, file)
        with self.launcher.here():
            return payload.load_value(file.getvalue())


@pytest.fixture(autouse=True)
def nobody_uses_multiprocessing(monkeypatch):
    """A resource tracker's descriptor would travel beside the pickle, which real workers get."""
    monkeypatch.setattr(resource_tracker._resource_tracker, "_fd", None)


@pytest.fixture
def pair(monkeypatch):
    return Pair(monkeypatch)


# ── what comes along ─────────────────────────────────────────────────────────────────────


def test_a_function_takes_what_it_uses_and_nothing_else(pair):
    main = pair.launcher.define(
        "import threading\nUSED = 2\nUNUSED = threading.Lock()\n"
        "def helper(x): return x * USED\n"
        "def f(rank, size, x): return helper(x) + size\n"
    )
    call = pair.send(main.f, 5)
    worker = pair.worker.main
    assert call.function(0, 1, *call.args) == 11
    assert call.function is not main.f
    assert worker.f is call.function
    assert worker.f.__globals__ is worker.helper.__globals__ is worker.__dict__
    assert not hasattr(worker, "UNUSED")


KINDS = [
    ("f = lambda r, s: 7", "f"),
    ("class C:\n    def __call__(self, r, s): return 7", "C()"),
    ("class C:\n    def go(self, r, s): return 7", "C().go"),
    ("class C:\n    @classmethod\n    def go(cls, r, s): return 7", "C.go"),
    ("import functools\ndef g(x, r, s): return x", "functools.partial(g, 7)"),
    ("def outer(k):\n    def f(r, s): return r + k\n    return f", "outer(7)"),
    ("def f(r, s): return 7 if r == 3 else f(3, s)", "f"),
    ("def even(n, s): return odd(n + 1, s)\ndef odd(n, s): return 7 if n > 2 else even(n, s)", "even"),
    ("import functools\ndef deco(g):\n    @functools.wraps(g)\n    def w(*a): return g(*a) + 1\n    return w\n"
     "@deco\ndef f(r, s): return 6", "f"),
    ("class A:\n    def x(self): return 3\nclass B(A):\n    def x(self): return super().x() + 4\n"
     "def f(r, s): return B().x()", "f"),
    ("import dataclasses, enum\n@dataclasses.dataclass(frozen=True, slots=True)\nclass D:\n    x: int = 3\n"
     "class E(enum.Enum):\n    A = 4\n    def twice(self): return self.value * 2\n"
     "def f(r, s): return D().x + E.A.twice() - E(4).value", "f"),
    ("import enum\nclass F(enum.IntFlag):\n    A = 3\n    B = 4\ndef f(r, s): return int(F.A | F.B)", "f"),
    ("import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def x(self): ...\nclass B(A):\n    def x(self): return 7\n"
     "def f(r, s): return B().x() if isinstance(B(), A) else 0", "f"),
    ("from typing import Generic, TypeVar\nT = TypeVar('T')\nclass Box(Generic[T]):\n    def __init__(self, x: T): self.x = x\n"
     "def f(r, s, b: Box[int] | None = None): return Box[int](7).x", "f"),
    ("from typing import NamedTuple, Protocol\nclass N(NamedTuple):\n    x: int\nclass P(Protocol):\n    x: int\n"
     "def f(r, s, p: P | None = None): return N(7)._replace(x=7).x", "f"),
    # What cloudpickle 3.1.3 can't do by itself.
    ("import functools\n@functools.lru_cache\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
     "def f(r, s): return fib(6) - 1", "f"),
    ("import functools\nclass C:\n    @functools.cached_property\n    def x(self): return 7\ndef f(r, s): return C().x", "f"),
    ("from typing import *\nP = ParamSpec('P')\nR = TypeVar('R')\nU = NewType('U', int)\n"
     "def deco(g: Callable[P, R]) -> Callable[P, R]:\n"
     "    def w(*a: P.args, **k: P.kwargs) -> R: return g(*a, **k)\n    return w\n"
     "@deco\ndef f(r: U, s: int) -> U: return U(deco(lambda: 7)())", "f"),
    ("K = 7\ndef f(r, s):\n    class C:\n        k = K\n        K = k\n    return C.K", "f"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "expression"), KINDS)
def test_all_kinds_of_functions_travel(pair, source, expression):
    main = pair.launcher.define(source)
    assert pair.call(eval(expression, main.__dict__)) == 7


def test_functions_of_modules_travel_by_reference(pair):
    call = pair.send(functools.partial(threading.Lock))
    assert call.function.func is threading.Lock
    assert pair.send(functools.wraps).function is functools.wraps


def test_a_module_that_is_missing_is_an_import_error(pair, monkeypatch):
    module = types.ModuleType("phalanx_test_gone")
    exec("def f(rank, size): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "phalanx_test_gone", module)
    file = io.BytesIO()
    payload.dump_call(payload.Call(function=module.f, args=(), kwargs={}), file)
    monkeypatch.delitem(sys.modules, "phalanx_test_gone")
    with pytest.raises(ModuleNotFoundError, match="phalanx_test_gone"):
        payload.load_call(file.getvalue(), None)


def test_a_call_can_be_read_from_a_file_and_leaves_builtins_alone(pair):
    main = pair.launcher.define("def f(rank, size): return len('abc')")
    file = io.BytesIO()
    with pair.launcher.here():
        payload.dump_call(payload.Call(function=main.f, args=(), kwargs={}), file)
    file.seek(0)
    pair.worker.main.__builtins__ = builtins  # as in a real `__main__`
    with pair.worker.here():
        assert payload.load_call(file, None).function(0, 1) == 3
    assert pair.worker.main.__builtins__ is builtins


def test_what_the_workers_main_has_is_not_overwritten(pair):
    main = pair.launcher.define(
        "'''About.'''\nK = 1\nclass A: pass\ndef f(rank, size, a): return K, __doc__"
    )
    pair.worker.define("K = 2\nA = 'taken'")
    assert pair.call(main.f, main.A()) == (2, "About.")
    assert pair.worker.main.A == "taken"


def test_a_decorated_function_keeps_its_name_from_the_one_inside(pair):
    main = pair.launcher.define(
        "import functools\ndef deco(g):\n    @functools.wraps(g)\n    def w(*a): return g(*a)\n    return w\n"
        "@deco\ndef f(rank, size): return 1\n"
    )
    call = pair.send(main.f)
    assert pair.worker.main.f is call.function
    assert call.function.__wrapped__ is not call.function


# ── classes ──────────────────────────────────────────────────────────────────────────────


def test_a_class_reached_only_through_an_argument_pickles_both_ways(pair):
    main = pair.launcher.define(
        "class Point:\n    class Inner: pass\ndef f(rank, size, *points): return points\n"
    )
    sent = (main.Point(), main.Point.Inner())
    received = pair.call(main.f, *sent)
    with pair.worker.here() as worker:
        assert [type(x) for x in received] == [worker.Point, worker.Point.Inner]
        again = pickle.loads(pickle.dumps(received))  # plain pickle
        assert [type(x) for x in again] == [worker.Point, worker.Point.Inner]
    assert worker.Point is not main.Point
    assert [type(x) for x in pair.back(received)] == [main.Point, main.Point.Inner]


def test_what_comes_home_changes_nothing_there(pair):
    main = pair.launcher.define(
        "K = 1\nclass A:\n    shared = 0\n    def m(self): return K, context\n"
        "def f(rank, size):\n    global K, NEW\n    K, NEW, A.shared = 99, 1, context\n    return A()\n"
    )
    method, before = main.A.m, main.__builtins__
    home = pair.back(pair.call(main.f))
    assert type(home) is main.A
    assert (main.K, main.A.shared, main.A.m) == (1, 0, method)
    assert not hasattr(main, "NEW")
    assert not hasattr(main, "context")
    assert main.__builtins__ is before


def test_a_class_that_the_worker_made_unpicklable_comes_home(pair):
    main = pair.launcher.define(
        "import threading\nlock = None\nclass A:\n    def m(self): return lock\n"
        "def f(rank, size):\n    global lock\n    lock = A.lock = threading.Lock()\n    return A()\n"
    )
    assert type(pair.back(pair.call(main.f))) is main.A


def test_a_class_of_the_worker_comes_home_with_all_it_has(pair):
    main = pair.launcher.define(
        "def f(rank, size):\n    class Local:\n        def m(self): return 7\n    return [Local(), Local()]\n"
    )
    one, two = pair.back(pair.call(main.f))
    assert one.m() == 7
    assert type(one) is type(two)


def test_a_function_comes_home_as_itself_and_a_new_one_with_the_launchers_globals(pair):
    main = pair.launcher.define(
        "import threading\nK = 1\ndef helper(): return K\n"
        "def f(rank, size):\n    global K\n    K, helper.tag = threading.Lock(), 1\n"
        "    return helper, lambda: (K, helper())\n"
    )
    helper, new = pair.back(pair.call(main.f))
    assert helper is main.helper
    assert not hasattr(helper, "tag")
    assert new() == (1, 1), "the launcher's K: the worker's can't even be pickled"


def test_a_class_that_was_not_sent_from_here_says_so(pair, monkeypatch):
    main = pair.launcher.define("class A: pass\ndef f(rank, size): return A()")
    value = pair.call(main.f)
    pair.launcher = Process(monkeypatch)  # another process reads the result
    with pytest.raises(LookupError, match="class A was not sent from this process"):
        pair.back(value)


# ── the context ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "body",
    [
        "return context",
        "return [context for _ in range(1)][0]",
        "return (lambda: context)()",
        "class C:\n        c = context\n    return C.c",
    ],
)
def test_context_is_bound_where_the_script_left_it_undefined(pair, body):
    main = pair.launcher.define(f"def f(rank, size):\n    {body}\n")
    assert pair.call(main.f) == OWN
    assert pair.worker.main.context == OWN


def test_a_context_of_the_scripts_own_making_is_left_alone(pair):
    main = pair.launcher.define(
        "context = 'mine'\ndef f(rank, size): return context\n"
        "def g(rank, size):\n    context = 'local'\n    return context, rank.__class__.__name__\n"
    )
    assert pair.call(main.f) == "mine"
    del main.context
    pair.worker.main.__dict__.pop("context")
    assert pair.call(main.g) == ("local", "int")
    assert not hasattr(pair.worker.main, "context")


def test_a_context_reached_any_way_is_the_workers_own(pair):
    class Launcher(SubprocessContext):
        lock = threading.Lock()

    given = Launcher()
    main = pair.launcher.define(
        "def outer(c):\n    def f(rank, size, a, *, k): return context, c, a[0], k\n    return f\n"
    )
    main.context = given
    assert pair.call(main.outer(given), [given], k=given) == (OWN,) * 4


def test_a_context_does_not_leave_its_worker(pair):
    with pytest.raises(PayloadError, match="its item 'c', can't travel to the launcher.*context"):
        pair.back({"c": SubprocessContext()})


# ── sources ──────────────────────────────────────────────────────────────────────────────


def test_tracebacks_keep_file_and_lines(pair, monkeypatch):
    source = "def f(rank, size):\n    raise ValueError(rank)\n"
    with monkeypatch.context() as patch:
        entry = (len(source), None, source.splitlines(keepends=True), "<cell 1>")
        patch.setitem(linecache.cache, "<cell 1>", entry)
        main = pair.launcher.define(source, "<cell 1>")
        file = io.BytesIO()
        with pair.launcher.here():
            payload.dump_call(payload.Call(function=main.f, args=(), kwargs={}), file)
    with pair.worker.here():
        call = payload.load_call(file.getvalue(), None)  # this process lost the lines
    assert call.function.__code__.co_filename == "<cell 1>"
    assert linecache.getline("<cell 1>", 2).strip() == "raise ValueError(rank)"
    del linecache.cache["<cell 1>"]


# ── whom to blame ────────────────────────────────────────────────────────────────────────

LOCK = "import threading\nlock = threading.Lock()\n"


@pytest.mark.parametrize(
    ("source", "arguments", "words"),
    [
        ("def f(r, s, a, loader): pass", (1, threading.Lock()), "argument 'loader' (index 1) can't"),
        ("def f(r, s, *a): pass", (1, threading.Lock()), "the argument at index 1 can't"),
        ("def f(r, s, a): pass", ({"x": [0, threading.Lock()]},),
         "argument 'a' (index 0), its item 'x', its item 1, can't"),
        (LOCK + "def f(r, s): return lock", (), "the global 'lock' used by f()"),
        (LOCK + "def f(r, s): return g()\ndef g(): return f(0, 1), lock", (), "the global 'lock' used by g()"),
        (LOCK + "def f(r, s): return g(), lock\ndef g(): return f(0, 1)", (), "the global 'lock' used by f()"),
        (LOCK + "def outer():\n    db = lock\n    return lambda r, s: db\nf = outer()", (),
         "the closure variable 'db' of outer.<locals>.<lambda>()"),
        (LOCK + "def f(r, s, x=lock): pass", (), "default value 0 of f()"),
        (LOCK + "class C:\n    held = lock\n    def __call__(self, r, s): pass\nf = C()", (),
         "the attribute 'held' of class C"),
        (LOCK + "class C:\n    def __init__(self): self.held = lock\n    def go(self, r, s): pass\nf = C().go", (),
         "the object that C.go() belongs to, its attribute 'held' (reached from the function C.go()) can't"),
        (LOCK + "import functools\ndef g(a, r, s): pass\nf = functools.partial(g, lock)", (),
         "its arguments, its item 0, can't"),
    ],
)  # fmt: skip
def test_what_can_not_travel_is_named(pair, source, arguments, words):
    main = pair.launcher.define(source)
    with pytest.raises(PayloadError) as caught:
        pair.send(main.f, *arguments)
    text = str(caught.value)
    assert words in text
    assert (
        "to the workers: TypeError: cannot pickle '_thread.lock' object. Create it inside" in text
    )
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_keyword_argument_is_named(pair):
    main = pair.launcher.define("def f(r, s, **k): pass")
    with pytest.raises(PayloadError, match="keyword argument 'db' can't travel"):
        pair.send(main.f, db=threading.Lock())


def test_a_return_value_is_named(pair):
    main = pair.launcher.define(
        LOCK + "class R:\n    __slots__ = ('fine', 'held')\ndef f(r, s, R=R):\n"
        "    x = R()\n    x.fine, x.held = 1, __import__('threading').Lock()\n    return [x]\n"
    )
    value = pair.call(main.f)
    words = (
        r"the return value, a list, its item 0, its attribute 'held', can't travel to the launcher"
    )
    with pytest.raises(PayloadError, match=words):
        pair.back(value)


def test_a_full_disk_is_not_the_callers_fault(pair):
    class Full(io.BytesIO):
        def write(self, data) -> int:
            raise OSError(28, "No space left on device")

    main = pair.launcher.define("def f(r, s): pass")
    call = payload.Call(function=main.f, args=(), kwargs={})
    with pair.launcher.here(), pytest.raises(OSError, match="No space left"):
        payload.dump_call(call, Full())


# ── exceptions ───────────────────────────────────────────────────────────────────────────


class Picky(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


class Unpicklable(Exception):
    def __reduce__(self):
        raise RuntimeError("no")


def test_only_exceptions_that_come_out_again_are_sent():
    data = payload.roundtrips(ValueError("x"))
    assert str(payload.load_value(data)) == "x"
    assert payload.roundtrips(Picky(1, "y")) is None
    assert payload.roundtrips(Unpicklable()) is None


def test_an_exception_of_the_script_is_the_launchers_own(pair):
    main = pair.launcher.define("class Oops(Exception): pass\ndef f(rank, size): return Oops('x')")
    error = pair.call(main.f)
    with pair.worker.here():
        data = payload.roundtrips(error)
    with pair.launcher.here():
        assert type(payload.load_value(data)) is main.Oops

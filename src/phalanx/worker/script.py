"""A worker that runs a program: a script or a module as `__main__`, or what it becomes by exec.

The script must find itself as ``python script.py`` (or ``-m module``) would have left it:
`sys.argv`, ``sys.path[0]`` (the launcher's command has seen to that), `__file__`, `__spec__`,
and a ``sys.modules["__main__"]`` that pickle and multiprocessing can go by.
"""

from __future__ import annotations

import builtins
import errno
import importlib.machinery
import io
import os
import pkgutil
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType

    from phalanx.values.spec import ProcessImage, Program

_OWN_FILES = ("phalanx/worker/bootstrap.py", "phalanx/worker/script.py", "<frozen runpy>")
_HIDDEN = ("__builtins__", "__name__", "__file__", "__spec__", "__loader__")
"""What user code that runs while `__main__` is cleared may still ask for."""


class NoProgramError(Exception):
    """There is nothing to run; the text says what is missing."""


def loader_of(program: Program, local_rank: int) -> Callable[[], None]:
    """Read a script now, and return what runs it; a module is looked for when it is run.

    Args:
        program: A script or a module.
        local_rank: This worker's.

    Raises:
        SyntaxError: The script has one.
        OSError: It can't be read (any more).
        NoProgramError: A folder or an archive has no ``__main__.py``.
    """
    arguments = list(program.arguments_of(local_rank))
    if program.kind == "module":
        return lambda: _run_module(program.target, arguments)
    path = program.target
    if _is_importable(path):
        return lambda: _run_container(path, arguments)
    path = _absolute(path)
    code = _read(path)
    return lambda: _run_code(code, _facts_of_script(path), [program.target, *arguments])


def command_of(program: Program, image: ProcessImage, local_rank: int) -> list[str]:
    """Return the command line of a program that replaces its worker.

    Python runs unbuffered, as under torchrun, so that a crash loses no line.
    """
    if program.commands:
        return list(program.commands[local_rank])
    arguments = program.arguments_of(local_rank)
    if program.kind == "executable":
        return [program.target, *arguments]
    python = image.environment.get("PYTHON_EXEC", image.executable)
    dash_m = ("-m",) if program.kind == "module" else ()
    return [python, *image.flags, "-u", *dash_m, program.target, *arguments]


def why_not_run(program: str, error: OSError) -> str:
    """Say why a program could not be run, and what to do about it."""
    remedy = ""
    if error.errno == errno.ENOEXEC:
        remedy = "; is its first line `#!` and an interpreter?"
    return f"the program {program} can't be run: {error.strerror}{remedy}"


# ── becoming __main__ ────────────────────────────────────────────────────────────────────


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv[:] = ["-m", *arguments]  # what packages see while they are imported
    _, spec, code = _details(lambda runpy: runpy._get_module_details(name))  # noqa: SLF001
    _run_code(code, _facts_of_spec(spec), [spec.origin, *arguments])


def _run_container(path: str, arguments: list[str]) -> None:
    """Run the ``__main__.py`` of a folder or an archive, which is ``sys.path[0]`` already."""
    main = sys.modules.pop("__main__")  # it would be found in the place of the file
    try:
        _, spec, code = _details(lambda runpy: runpy._get_module_details("__main__"))  # noqa: SLF001
    except NoProgramError:
        raise NoProgramError(f"can't find '__main__' module in {path!r}") from None
    finally:
        sys.modules["__main__"] = main
    _run_code(code, _facts_of_spec(spec), [path, *arguments])


def _details(find: Callable[[Any], tuple[str, Any, CodeType]]) -> tuple[str, Any, CodeType]:
    """Ask runpy, which knows all that ``python -m`` knows, packages and archives included."""
    import runpy  # noqa: PLC0415 - for modules only

    try:
        return find(runpy)
    except ImportError as error:
        if type(error) is ImportError and error.__traceback__ is not None and _is_of_runpy(error):
            raise NoProgramError(str(error)) from None
        raise


def _is_of_runpy(error: ImportError) -> bool:
    """Whether runpy itself raised it, and not a package that was being imported."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and "runpy" in last.tb_frame.f_code.co_filename


def _run_code(code: CodeType, facts: dict[str, Any], argv: list[str]) -> None:
    names = sys.modules["__main__"].__dict__
    names.clear()
    names.update(__name__="__main__", __doc__=None, __annotations__={}, __builtins__=builtins)
    names.update(facts)
    sys.argv[:] = argv
    exec(code, names)  # noqa: S102 - what it is for


def _facts_of_script(path: str) -> dict[str, Any]:
    kind = (
        importlib.machinery.SourcelessFileLoader
        if path.endswith(".pyc")
        else importlib.machinery.SourceFileLoader
    )
    return {
        "__file__": path,
        "__cached__": None,
        "__loader__": kind("__main__", path),
        "__package__": None,
        "__spec__": None,
    }


def _facts_of_spec(spec: Any) -> dict[str, Any]:  # noqa: ANN401 - an importlib spec
    return {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
    }


def _absolute(path: str) -> str:
    """Return a path as the interpreter makes it absolute: links and dots stay."""
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118


def _is_importable(path: str) -> bool:
    """Whether a path is a folder or an archive, as ``python path`` sees it."""
    return pkgutil.get_importer(path) is not None


def _read(path: str) -> CodeType:
    with io.open_code(path) as file:
        code: CodeType | None = pkgutil.read_code(file)
    if code is not None:
        return code
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


# ── its end ──────────────────────────────────────────────────────────────────────────────


def num_own_frames(error: BaseException) -> int:
    """Return how many frames at the top of a traceback are Phalanx': they tell nobody anything."""
    count, shown = 0, error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename.endswith(_OWN_FILES):
        count, shown = count + 1, shown.tb_next
    return count


def show(error: BaseException) -> bool:
    """Show an uncaught exception by the script's own `sys.excepthook`, if it has set one."""
    if sys.excepthook is sys.__excepthook__:
        return False
    shown: TracebackType | None = error.__traceback__
    for _ in range(num_own_frames(error)):
        shown = shown.tb_next if shown is not None else None
    sys.excepthook(type(error), error.with_traceback(shown), shown)
    return True


def exit_code_of(leaving: SystemExit) -> int:
    """Return the exit code that the interpreter would make of a SystemExit."""
    if leaving.code is None:
        return 0
    if not isinstance(leaving.code, int):
        return 1
    fits = -(2**63) <= leaving.code < 2**63
    return leaving.code & 0xFF if fits else 0xFF


def clear_main() -> None:
    """Let go of the script's globals: files get flushed and closed, temporary ones removed.

    The interpreter does so at its end, private names first. Daemon threads, which it has
    stopped by then, still run here: what they say about missing names is of no interest.
    """
    threading.excepthook = lambda _: None
    names = sys.modules["__main__"].__dict__
    private = [name for name in names if name.startswith("_") and name[1:2] != "_"]
    for name in (*private, *(name for name in list(names) if name not in _HIDDEN)):
        names[name] = None


def end_by_interrupt() -> NoReturn:
    """End as the interpreter does after an uncaught KeyboardInterrupt: by SIGINT itself."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)

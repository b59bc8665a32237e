"""How one of our processes starts another Python: one place for the command line."""

from __future__ import annotations

import json
import os.path
import sys

_PARENT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))  # noqa: PTH100, PTH118, PTH120
# (pathlib would cost the agent more time than all of this: see phalanx.agent.__main__)


def command(executable: str, flags: tuple[str, ...], module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules in a new interpreter.

    ``-m`` would look in the working directory first, where a user's ``socket.py`` may lie, and
    so may one in a folder of PYTHONPATH: these come last. And Phalanx itself may be importable
    here only by a path that this process added.

    Args:
        executable: The Python to run.
        flags: Its interpreter flags, like ``-X dev``.
        module: One of our modules that has a ``main(argv)``.
        *arguments: What `main` gets.
    """
    code = (
        "import os, sys; "
        "own = os.environ.get('PYTHONPATH', '').split(os.pathsep); "
        f"own = {{os.path.abspath(p) for p in own}} - {{{json.dumps(_PARENT)}}}; "
        "sys.path[:] = sorted((p for p in sys.path if p), key=own.__contains__); "
        f"sys.path.append({json.dumps(_PARENT)}); "
        f"from {module} import main; main(sys.argv[1:])"
    )
    return [executable, *flags, "-c", code, *arguments]


def current_flags() -> tuple[str, ...]:
    """Return the interpreter flags of this process, as a child would need them again."""
    import subprocess  # noqa: PLC0415 - only a launch needs it

    # The same list that multiprocessing gives its children; public only by habit.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    return tuple(flags)


def executable() -> str:
    """Return the path of the Python that runs this process."""
    return sys.executable

"""Modules of the user's that a process would not see, because it has imported their namesakes.

``python script.py`` takes the ``logging.py`` beside the script. A fork of a process that has
imported the other one does not, nor does a fresh interpreter that has imported Phalanx first.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import all_suffixes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SUFFIXES = tuple(all_suffixes())
_NOT_FROM_FILES = ("built-in", "frozen")


def shadows(module_path: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names of imported modules that `module_path` has elsewhere, with the file there.

    One listing for each folder that comes before the standard library; nothing more if no name
    in it is that of an imported module.
    """
    library = os.path.dirname(os.__file__)  # noqa: PTH120 - sysconfig would take 20 ms to say so
    for place, folder in enumerate(module_path):
        if folder == library:
            return
        try:
            entries = os.listdir(folder)  # noqa: PTH208 - most are dropped by their name
        except OSError:
            continue
        for entry in entries:
            name = entry.partition(".")[0]
            if name in sys.modules and _is_module(folder, entry):
                home = _home(name)
                if home is not None and not _is_found_first(home, module_path[: place + 1]):
                    yield name, f"{folder}/{entry}"


def make_room(module_path: Sequence[str]) -> None:
    """Forget modules that the user's code must find anew; who has imported them keeps them."""
    for shadowed in {name for name, _ in shadows(module_path)}:
        for name in [n for n in sys.modules if n == shadowed or n.startswith(f"{shadowed}.")]:
            del sys.modules[name]


def _is_module(folder: str, entry: str) -> bool:
    """Whether an entry is what an import would take: a folder without a file in it comes last."""
    name, _, rest = entry.partition(".")
    if rest:
        return f".{rest}" in _SUFFIXES
    return any(os.path.exists(f"{folder}/{name}/__init__{end}") for end in _SUFFIXES)  # noqa: PTH110


def _home(name: str) -> str | None:
    """Return the folder in which an imported module was found; None: it comes from none."""
    spec = getattr(sys.modules[name], "__spec__", None)
    origin: str | None = getattr(spec, "origin", None)
    if spec is None or origin is None or origin in _NOT_FROM_FILES:
        return None
    folder = os.path.dirname(origin)  # noqa: PTH120
    return os.path.dirname(folder) if spec.submodule_search_locations else folder  # noqa: PTH120


def _is_found_first(home: str, folders: Sequence[str]) -> bool:
    """Whether a folder is one of these: then what was imported is what an import would find."""
    real = os.path.realpath(home)
    return any(home == folder or real == os.path.realpath(folder) for folder in folders)

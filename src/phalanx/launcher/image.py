"""What a worker takes over from this process: read once, at the call."""

from __future__ import annotations

import os
import resource
import signal
import sys

from phalanx.system import interpreter
from phalanx.values.spec import ProcessImage
from phalanx.wire.messages import ForkServerKey

_READ_AT_IMPORT = (
    "PYTHON",
    "LANG",
    "LC_",
    "LD_",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "TORCH",
    "NCCL_",
    "GLOO_",
)
"""Variables with these prefixes are read when the interpreter, torch or a runtime under it
is loaded: a fork server that loaded them under other values can't serve."""


def process_image(extra_environment: dict[str, str]) -> ProcessImage:
    """Return this process' surroundings as they are now.

    Args:
        extra_environment: Variables that the workers get on top.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    main = sys.modules.get("__main__")
    main_file: str | None = getattr(main, "__file__", None)
    return ProcessImage(
        executable=interpreter.executable(),
        flags=interpreter.current_flags(),
        environment={**os.environ, **extra_environment},
        directory=_directory(),
        module_path=tuple(_absolute(entry) for entry in sys.path),
        argv=tuple(sys.argv),
        umask=umask,
        limits=_limits(),
        ignored_signals=tuple(
            signum for signum in signal.valid_signals() if _is_inherited_ignore(signum)
        ),
        blocked_signals=tuple(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        main_file=main_file,
    )


def fork_server_key(image: ProcessImage, preload: tuple[str, ...]) -> ForkServerKey:
    """Return what decides whether a warm fork server can serve workers of this image."""
    relevant = {
        name: value for name, value in image.environment.items() if name.startswith(_READ_AT_IMPORT)
    }
    return ForkServerKey(
        executable=image.executable,
        flags=image.flags,
        preload=preload,
        # With nothing preloaded each worker is a fresh interpreter under its own environment.
        environment=tuple(sorted(relevant.items())) if preload else (),
    )


def _directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a string is wanted
    except FileNotFoundError:  # it was removed under us
        return "/"


def _absolute(entry: object) -> str:
    """An empty entry means the directory in which Python was started."""
    return os.path.abspath(str(entry)) if entry != "" else _directory()  # noqa: PTH100


def _limits() -> tuple[tuple[int, int, int], ...]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits: list[tuple[int, int, int]] = []
    for number in sorted({getattr(resource, name) for name in names}):
        soft, hard = resource.getrlimit(number)
        limits.append((number, soft, hard))
    return tuple(limits)


def _is_inherited_ignore(signum: int) -> bool:
    """Python itself ignores SIGPIPE and SIGXFSZ, in every interpreter anew."""
    if signum in (signal.SIGPIPE, getattr(signal, "SIGXFSZ", None)):
        return False
    return signal.getsignal(signum) is signal.SIG_IGN

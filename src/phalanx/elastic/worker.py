"""What a worker does: enters its rank's environment, then calls the function or is the program.

Imports no torch: a binary needs none, and a function only if it uses it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx.values.spec import TAG_VARIABLE
from phalanx.worker import fresh

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What the ranks are given, by rank.

    Attributes:
        args: Arguments of each rank.
        envs: Variables of each rank.
        inherited: The launcher's whole environment, which they come on top of.
    """

    args: Mapping[int, tuple[Any, ...]]
    envs: Mapping[int, Mapping[str, str]]
    inherited: Mapping[str, str]

    def environment(self, rank: int) -> dict[str, str]:
        """Return a rank's whole environment."""
        return {**self.inherited, **self.envs[rank]}


def call_function(
    rank: int,
    world_size: int,
    function: Callable[..., object],
    calls: Calls,
    numa_options: object | None,
) -> object:
    """Call a rank's function; an exception goes into the rank's error file, too."""
    del world_size
    args = calls.args[rank]
    _enter_environment(calls.environment(rank))
    with contextlib.suppress(Exception):  # standard error may be closed
        faulthandler.enable()
    if numa_options is not None:
        from torch.numa.binding import _maybe_wrap_with_numa_binding  # noqa: PLC0415

        function = _maybe_wrap_with_numa_binding(
            function, gpu_index=rank, numa_options=numa_options
        )
    try:
        return function(*args)
    except Exception as error:
        _record(error)
        raise


def be_program(rank: int, world_size: int, calls: Calls) -> NoReturn:
    """Become a rank's program; the first of its arguments is its name."""
    del world_size
    command = [str(part) for part in calls.args[rank]]
    _enter_environment(calls.environment(rank))
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, programs must not
        signal.signal(signum, signal.SIG_DFL)
    os.execvpe(command[0], command, dict(os.environ))  # noqa: S606 - what was asked for


def _enter_environment(environment: dict[str, str]) -> None:
    """Have what the launcher had and what the rank was given, and nothing else.

    Phalanx' own RANK, MASTER_PORT and so on are not part of the contract; the tag stays, since
    by it orphans are found.
    """
    environment[TAG_VARIABLE] = os.environ[TAG_VARIABLE]
    num_cores = len(os.sched_getaffinity(0))
    fresh.set_threads({"OMP_NUM_THREADS": str(num_cores), **environment})
    os.environ.clear()
    os.environ.update(environment)


def _record(error: Exception) -> None:
    """Do with an exception what torchelastic's ``@record`` does, in torch's own words."""
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415

    def fail_again() -> None:
        raise error

    traceback = error.__traceback__
    with contextlib.suppress(BaseException):  # whatever becomes of the file, the failure counts
        record(fail_again)()
    error.__traceback__ = traceback

"""What people import: `start_processes`, `get_context`, `prewarm`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from phalanx.launcher.image import fork_server_key, process_image
from phalanx.launcher.launch import Payload, check_preload, launch
from phalanx.launcher.link import agent_link
from phalanx.system import kernel, paths
from phalanx.values import outputs, spec
from phalanx.values.context import SubprocessContext, get_context
from phalanx.values.errors import PayloadError, SpecError
from phalanx.wire import parcel
from phalanx.wire.messages import Prewarm

if TYPE_CHECKING:
    from phalanx.values.events import Event
    from phalanx.values.spec import Duration, LaunchSpec

__all__ = ["get_context", "prewarm", "start_processes"]

R = TypeVar("R")


def start_processes(
    main_function: Callable[..., R],
    world_size: int,
    num_processes_per_machine: int | None = None,
    main_process_port: int = 0,
    *,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    backend: str = "auto",
    max_restarts: int = 0,
    restart_window: Duration | None = None,
    restart: Literal["group", "worker"] = "group",
    start_method: Literal["forkserver", "spawn"] = "forkserver",
    preload: Sequence[str] = ("torch",),
    log_dir: str | os.PathLike[str] | None = None,
    console: Literal["all", "none"] | Collection[int] = "all",
    grace: Duration = 30.0,
    start_timeout: Duration = 300.0,
    hang_timeout: Duration | None = None,
    store_limit: int | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> SubprocessContext[R]:
    """Start `world_size` workers that call `main_function`, and return at once.

    Each worker calls ``main_function(rank, world_size, *args, **kwargs)``. A function from
    ``__main__`` (script, standard input, ``-c``, REPL, notebook) travels by value with the
    names that it uses, so no ``if __name__ == "__main__"`` guard is needed.

    A script that ends without `wait()` waits at exit, and exits non-zero if the run failed.

    Args:
        main_function: What each worker runs. Its return value is handed back by rank.
        world_size: Number of workers.
        num_processes_per_machine: Workers per machine; None: all on one. With fewer than
            `world_size` the machines are emulated on this one, each with its node rank, its
            local ranks from 0, and its share of the visible GPUs.
        main_process_port: Port of the group's store (``MASTER_PORT``); 0: any free one.
        args: Further positional arguments of `main_function`.
        kwargs: Keyword arguments of `main_function`.
        env: Environment variables that the workers get on top of the launcher's.
        backend: Of the workers' process group: ``auto``, or what torch.distributed takes.
        max_restarts: How often a failure may be answered by a restart.
        restart_window: Only restarts of the last so many seconds count; None: all do.
        restart: ``group``: a failure ends the generation and a new one starts. ``worker``:
            only the fallen worker is started again; for workers without a process group.
        start_method: ``forkserver``: fork from a process that has imported `preload`;
            ``spawn``: a fresh interpreter per worker.
        preload: Modules that the fork server imports once for all workers.
        log_dir: Folder for ``<generation>/rank-<rank>.out`` and ``.err``.
        console: Which ranks print to the console, with a prefix.
        grace: Seconds (or timedelta) that workers have to finish when the run is stopped.
        start_timeout: Seconds (or timedelta) in which a worker must reach `main_function`.
        hang_timeout: Seconds (or timedelta) after which a worker that shows no sign of life counts
            as failed: it is killed, and the failure says where all ranks were. Signs are
            ``optimizer.step()``, `SubprocessContext.heartbeat`, `report`, `barrier`,
            `should_stop`, `synchronize`, what is done with the tensor store, and output. So
            allow for the longest step, evaluation or checkpoint. A worker that gave no sign
            but output hangs when all do, so a server may wait. None: nobody watches.
        store_limit: Bytes that the tensor store may hold; None: half of the memory that the
            machine (or the container) has.
        on_event: Called with each event, in order, in a thread of its own.

    Returns:
        The run's context: `wait()` for it, watch its `events()`, `shutdown()` or `restart()`
        it, or use it as a context manager.

    Raises:
        SpecError: An argument is wrong (`PortInUseError`: the port is taken).
        PayloadError: The function or an argument can't travel to another process.
        RunDirectoryError: The run directory or `log_dir` can't be written.
    """
    refuse_in_child()
    if not callable(main_function):
        raise SpecError(f"main_function must be callable, not {type(main_function).__name__}")
    _check_whole_numbers(
        world_size=world_size,
        num_processes_per_machine=(
            1 if num_processes_per_machine is None else num_processes_per_machine
        ),
        main_process_port=main_process_port,
        max_restarts=max_restarts,
        store_limit=0 if store_limit is None else store_limit,
    )
    launch_spec = _launch_spec(
        main_function,
        world_size,
        num_processes_per_machine,
        backend=backend,
        max_restarts=max_restarts,
        restart_window_s=None
        if restart_window is None
        else spec.to_seconds("restart_window", restart_window),
        restart=restart,
        start_method=start_method,
        preload=check_preload(preload),
        log_dir=None if log_dir is None else str(Path(log_dir).absolute()),
        outputs=outputs.alike(
            world_size, _console_ranks(console, world_size), kept=log_dir is not None
        ),
        grace_s=spec.to_seconds("grace", grace),
        start_timeout_s=spec.to_seconds("start_timeout", start_timeout),
        hang_timeout_s=None
        if hang_timeout is None
        else spec.to_seconds("hang_timeout", hang_timeout, above_zero=True),
        store_limit=store_limit,
        master_port=main_process_port,
    )
    image = process_image(_check_environment(env))
    payload = dump_payload(main_function, args, kwargs)
    return launch(launch_spec, image, payload, on_event)


def prewarm(preload: Sequence[str] = ("torch",)) -> None:
    """Start the agent and a fork server now, so that the next `start_processes` is warm.

    Returns at once; the fork server imports `preload` while this process goes on with its
    own imports. Harmless when it is warm already.

    Raises:
        SpecError: A module of `preload` does not exist.
    """
    refuse_in_child()
    image = process_image({})
    key = fork_server_key(image, check_preload(preload))
    link, new = agent_link(key, image)
    if not new:
        link.send(Prewarm(key=key, image=image))


# ── checks, before anything is started ───────────────────────────────────────────────────


def _launch_spec(
    main_function: Callable[..., object],
    world_size: int,
    num_processes_per_machine: int | None,
    **fields: Any,  # noqa: ANN401 - LaunchSpec has their types
) -> LaunchSpec:
    if num_processes_per_machine is None:
        num_processes_per_machine = world_size
    launch_spec = spec.LaunchSpec(
        run_id=paths.new_run_id(),
        function=getattr(main_function, "__qualname__", repr(main_function)),
        world_size=world_size,
        num_processes_per_machine=num_processes_per_machine,
        **fields,
    )
    spec.check_launch(launch_spec)
    _check_backend(launch_spec)
    return launch_spec


def _check_whole_numbers(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(f"{name} must be a whole number, not {value!r}")


def _check_backend(launch_spec: LaunchSpec) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available():
        registered: Collection[str] = torch.distributed.Backend.backend_list
    else:
        registered = ()
    if launch_spec.preload in ((), ("torch",)):  # else one of the modules may register it
        spec.check_backend(launch_spec.backend, registered)


def _check_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise SpecError(f"env must map strings to strings; {name!r}: {value!r} does not")
        if "=" in name or "\0" in name + value or not name:
            raise SpecError(f"env: {name!r} can't be an environment variable")
    return dict(env or {})


def _console_ranks(
    console: Literal["all", "none"] | Collection[int], world_size: int
) -> tuple[int, ...]:
    if console == "all":
        return tuple(range(max(world_size, 0)))
    if console == "none":
        return ()
    if isinstance(console, str):
        raise SpecError(f"console must be 'all', 'none' or a collection of ranks, not {console!r}")
    for rank in console:
        if not 0 <= rank < world_size:
            raise SpecError(f"console: there is no rank {rank!r} among {world_size}")
    return tuple(console)


def dump_payload(
    main_function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
) -> Payload:
    """Write function and arguments to a file without a name, once for all workers.

    Raises:
        PayloadError: Something in it can't travel.
    """
    from phalanx.wire import payload, sharing  # noqa: PLC0415 - cloudpickle: only a launch needs it

    call = payload.Call(function=main_function, args=tuple(args), kwargs=dict(kwargs or {}))
    inheritance = sharing.Inheritance()
    fd = kernel.open_anonymous_file("phalanx-payload")
    try:
        with open(fd, "wb", closefd=False) as file:
            payload.dump_call(call, file, inheritance=inheritance)
        if not inheritance.fds:
            return Payload(os.dup(fd), inheritance.keeps)
        return Payload(_pack([fd, *inheritance.fds]), inheritance.keeps)
    finally:
        inheritance.close()
        os.close(fd)


def _pack(fds: list[int]) -> int:
    try:
        return parcel.pack(fds)
    except OSError as error:
        raise PayloadError(
            f"{len(fds)} descriptors (queues, shared tensors, …) can't travel to the workers: "
            f"{error.strerror}. Pass fewer, or raise the limit (`ulimit -n`)"
        ) from error


def refuse_in_child() -> None:
    """A child that multiprocessing spawned imports the script anew: don't start it all again.

    Raises:
        SpecError: This is such a child.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        raise SpecError(
            "start_processes was called while a multiprocessing child imported the script. "
            'Put the call under `if __name__ == "__main__":`, or let the child be forked'
        )

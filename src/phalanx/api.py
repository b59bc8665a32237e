"""What people import: `start_processes`, `get_context`, `prewarm`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from phalanx import kernel, paths, spec
from phalanx.context import SubprocessContext, get_context
from phalanx.errors import PortInUseError, SpecError
from phalanx.launcher import exit as launcher_exit
from phalanx.launcher.console import Console
from phalanx.launcher.context import LauncherContext
from phalanx.launcher.image import fork_server_key, process_image
from phalanx.launcher.link import agent_link
from phalanx.launcher.signals import stop_signals
from phalanx.messages import Launch, Prewarm

if TYPE_CHECKING:
    from phalanx.events import Event
    from phalanx.spec import Duration, LaunchSpec, ProcessImage

__all__ = ["get_context", "prewarm", "start_processes"]

R = TypeVar("R")

_BACKLOG = 4096
"""Connections that may wait at the group's store until its host accepts them."""


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
    _refuse_in_child()
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
        preload=_check_preload(preload),
        log_dir=None if log_dir is None else str(Path(log_dir).absolute()),
        console_ranks=_console_ranks(console, world_size),
        grace_s=spec.to_seconds("grace", grace),
        start_timeout_s=spec.to_seconds("start_timeout", start_timeout),
        store_limit=store_limit,
        master_port=main_process_port,
    )
    image = process_image(_check_environment(env))
    with contextlib.ExitStack() as on_failure:
        payload_fd = _dump_payload(main_function, args, kwargs)
        on_failure.callback(os.close, payload_fd)
        listener = on_failure.enter_context(_bind(launch_spec.master_addr, main_process_port))
        launch_spec = _open_directories(launch_spec, listener.getsockname()[1])
        context: LauncherContext[R] = _launch(
            launch_spec, image, on_event, [payload_fd, listener.fileno()]
        )
        listener.detach()  # both descriptors are the link's from here on
        on_failure.pop_all()
    paths.prune_runs()
    return context


def prewarm(preload: Sequence[str] = ("torch",)) -> None:
    """Start the agent and a fork server now, so that the next `start_processes` is warm.

    Returns at once; the fork server imports `preload` while this process goes on with its
    own imports. Harmless when it is warm already.

    Raises:
        SpecError: A module of `preload` does not exist.
    """
    _refuse_in_child()
    image = process_image({})
    key = fork_server_key(image, _check_preload(preload))
    link, new = agent_link(key, image)
    if not new:
        link.send(Prewarm(key=key, image=image))


def _open_directories(launch_spec: LaunchSpec, port: int) -> LaunchSpec:
    """Make the run's directory, and write there what was asked for."""
    if launch_spec.log_dir is not None:
        paths.check_log_dir(Path(launch_spec.log_dir))
    run_paths = paths.create_run_directory(launch_spec.run_id)
    launch_spec = msgspec.structs.replace(
        launch_spec, master_port=port, run_dir=str(run_paths.root)
    )
    paths.write_whole(run_paths.spec, msgspec.json.encode(launch_spec) + b"\n")
    return launch_spec


def _launch(
    launch_spec: LaunchSpec,
    image: ProcessImage,
    on_event: Callable[[Event], None] | None,
    fds: list[int],
) -> LauncherContext[Any]:
    """Hand the run over to the agent. From here on it lives."""
    preload = () if launch_spec.start_method == "spawn" else launch_spec.preload
    key = fork_server_key(image, preload)
    link, _ = agent_link(key, image)
    console = Console(launch_spec.run_id, link.send)
    context: LauncherContext[Any] = LauncherContext(
        launch_spec, link, console, on_event, on_ended=_forget_when_fine
    )
    console_spec, console_fds = console.describe()
    launch = Launch(spec=launch_spec, key=key, image=image, console=console_spec)
    stop_signals.run_began(context)
    launcher_exit.keep(context)
    link.subscribe(launch_spec.run_id, context)
    link.send(launch, [*fds, *console_fds])
    return context


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


def _check_preload(preload: Sequence[str]) -> tuple[str, ...]:
    if isinstance(preload, str):
        raise SpecError(f"preload must be a sequence of module names, as ({preload!r},)")
    for module in preload:
        top = module.partition(".")[0]
        if not top or importlib.util.find_spec(top) is None:
            raise SpecError(
                f"preload: there is no module {module!r} here; correct its name or install it"
            )
    return tuple(preload)


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


def _bind(address: str, port: int) -> socket.socket:
    """Bind the group's port here: a taken one is an error of the call, and no race is left."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PortInUseError(
            f"main_process_port {port} can't be used: {error.strerror}. Choose another, or 0 "
            f"for any free one (`ss -ltnp 'sport = :{port}'` shows who has it)"
        ) from error
    return listener


def _dump_payload(
    main_function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
) -> int:
    """Write function and arguments to a file without a name, once for all workers."""
    from phalanx import payload  # noqa: PLC0415 - cloudpickle: only a launch needs it

    call = payload.Call(function=main_function, args=tuple(args), kwargs=dict(kwargs or {}))
    fd = kernel.open_anonymous_file("phalanx-payload")
    try:
        with open(fd, "wb", closefd=False) as file:
            payload.dump_call(call, file)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_in_child() -> None:
    """A child that multiprocessing spawned imports the script anew: don't start it all again."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        raise SpecError(
            "start_processes was called while a multiprocessing child imported the script. "
            'Put the call under `if __name__ == "__main__":`, or let the child be forked'
        )


def _forget_when_fine(context: LauncherContext[Any]) -> None:
    """A run that ended well needs nobody at exit."""
    if context.state == "succeeded":
        launcher_exit.forget(context)

"""Hands a run over to the agent: what launches of functions and of programs share."""

from __future__ import annotations

import contextlib
import errno
import importlib.machinery
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from phalanx.launcher import exit as launcher_exit
from phalanx.launcher.console import Console
from phalanx.launcher.context import LauncherContext
from phalanx.launcher.image import fork_server_key
from phalanx.launcher.link import agent_link
from phalanx.launcher.signals import stop_signals
from phalanx.system import kernel, paths
from phalanx.values.errors import PortInUseError, SpecError
from phalanx.wire.messages import Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.values.events import Event
    from phalanx.values.spec import LaunchSpec, ProcessImage
    from phalanx.wire.messages import ForkServerKey

_BACKLOG = 4096
"""Connections that may wait at the group's store until its host accepts them."""


class Payload(NamedTuple):
    """A call on its way: a file or a parcel, and what must live until the run has ended."""

    fd: int
    keeps: list[object]


def launch(
    launch_spec: LaunchSpec,
    image: ProcessImage,
    payload: Payload | None = None,
    on_event: Callable[[Event], None] | None = None,
    *,
    port_option: str = "main_process_port",
    takes_signals: bool = True,
) -> LauncherContext[Any]:
    """Start a run, and return its context at once.

    Args:
        launch_spec: What is wanted, checked; port and run directory are filled in here.
        image: What workers take over from this process.
        payload: Function and arguments, owned from here on; None for a program.
        on_event: Called with each event.
        port_option: What the user calls the port, for the message that it is taken.
        takes_signals: Signals to this process stop the run.

    Raises:
        PortInUseError: The port, or the address, can't be bound.
        RunDirectoryError: The run directory or `log_dir` can't be written.
    """
    payload = payload or Payload(kernel.open_anonymous_file("phalanx-payload"), [])
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, payload.fd)
        listener = on_failure.enter_context(
            _bind(launch_spec.master_addr, launch_spec.master_port, port_option)
        )
        launch_spec = _open_directories(launch_spec, listener.getsockname()[1])
        fds = [payload.fd, listener.fileno()]
        context = _launch(launch_spec, image, on_event, fds, payload.keeps, takes_signals)
        listener.detach()  # both descriptors are the link's from here on
        on_failure.pop_all()
    paths.prune_runs()
    return context


def key_of_launch(launch_spec: LaunchSpec, image: ProcessImage) -> ForkServerKey:
    """Return which fork server a launch needs."""
    preload = () if launch_spec.start_method == "spawn" else launch_spec.preload
    return fork_server_key(image, preload)


def check_preload(
    preload: Sequence[str], module_path: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the modules to preload, which must exist.

    Args:
        preload: Their names.
        module_path: Where to look for them; None: `sys.path`.

    Raises:
        SpecError: One does not exist.
    """
    if isinstance(preload, str):
        raise SpecError(f"preload must be a sequence of module names, as ({preload!r},)")
    for module in preload:
        top = module.partition(".")[0]
        if not top or not _exists(top, module_path):
            raise SpecError(
                f"preload: there is no module {module!r} here; correct its name or install it"
            )
    return tuple(preload)


def _exists(module: str, module_path: Sequence[str] | None) -> bool:
    if module_path is None:
        return importlib.util.find_spec(module) is not None
    return (
        module in sys.builtin_module_names
        or importlib.machinery.PathFinder.find_spec(module, module_path) is not None
    )


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
    keeps: list[object],
    takes_signals: bool,  # noqa: FBT001 - private
) -> LauncherContext[Any]:
    """Hand the run over to the agent. From here on it lives."""
    key = key_of_launch(launch_spec, image)
    link, _ = agent_link(key, image)
    console = Console(launch_spec.run_id, link.send)

    def on_ended(context: LauncherContext[Any]) -> None:
        keeps.clear()
        _forget_when_fine(context)

    context: LauncherContext[Any] = LauncherContext(
        launch_spec, link, console, on_event, on_ended=on_ended
    )
    console_spec, console_fds = console.describe()
    stdin = [os.dup(0)] if launch_spec.stdin_ranks else []
    launch = Launch(spec=launch_spec, key=key, image=image, console=console_spec)
    if takes_signals:
        stop_signals.run_began(context)
    launcher_exit.keep(context)
    link.subscribe(launch_spec.run_id, context)
    link.send(launch, [*fds, *stdin, *console_fds])
    context.launched()
    return context


def _bind(address: str, port: int, option: str) -> socket.socket:
    """Bind the group's port here: a taken one is an error of the call, and no race is left."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise _cannot_bind(address, port, option, error) from error
    return listener


def _cannot_bind(address: str, port: int, option: str, error: OSError) -> PortInUseError:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return PortInUseError(
            f"{address} is no address of this machine ({error.strerror}), so the group's store "
            "can't listen there. Leave the address out, or use 127.0.0.1"
        )
    return PortInUseError(
        f"{option} {port} can't be used: {error.strerror}. Choose another, or 0 "
        f"for any free one (`ss -ltnp 'sport = :{port}'` shows who has it)"
    )


def _forget_when_fine(context: LauncherContext[Any]) -> None:
    """A run that ended well needs nobody at exit."""
    if context.state == "succeeded":
        launcher_exit.forget(context)

"""From a new process to the user's function, and from its end to the process' end.

Two ways in, one way on. A forked child gets rid of what a fork must not share; a fresh
interpreter (``start_method="spawn"``) has nothing to get rid of. From `_run` on they are
the same.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import mmap
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

import msgspec

from phalanx.system import interpreter, kernel
from phalanx.system.page import ControlPage
from phalanx.system.whereabouts import be_found
from phalanx.tensors.sync.optimizers import note_steps, watch_optimizers
from phalanx.tensors.sync.shm.backend import register_shm_backend
from phalanx.values.context import install_context
from phalanx.values.errors import PayloadError
from phalanx.values.failures import Failure
from phalanx.wire import parcel
from phalanx.wire.forking import MakeStoreHost, MakeWorker
from phalanx.wire.frames import INLINE_LIMIT
from phalanx.wire.messages import Entered, Raised, Remarked, Returned
from phalanx.worker import fresh, script
from phalanx.worker.capture import failure_of
from phalanx.worker.context import WorkerContext
from phalanx.worker.imports import after_import
from phalanx.worker.link import AgentLink
from phalanx.worker.prompts import read_from_terminal
from phalanx.worker.shadows import make_room, shadows

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.values.failures import Cause
    from phalanx.values.spec import ProcessImage, Program, WorkerSpec
    from phalanx.wire.payload import Call

_BY_INTERRUPT = -1
"""Stands for an exit code: end by SIGINT."""


def run_forked_worker(order: MakeWorker, fds: list[int], server_pid: int) -> NoReturn:
    """Be the worker, in a child that the fork server just forked."""
    kernel.die_with_parent(server_pid)
    control, out, err, *files = fds
    _connect_standard_streams(files.pop() if order.has_stdin else None, out, err)
    kernel.close_all_fds({0, 1, 2, control, *files})
    fresh.enter_surroundings(order.image)
    if not order.fresh_interpreter:
        order = _refuse_shadowed(order, control)
    program = order.worker.program
    if program is not None and program.replaces_worker:
        _become(program, order, AgentLink(control))
    if order.fresh_interpreter:
        _exec("phalanx.worker.bootstrap", order, [control, *files])
    fresh.enter_interpreter(order.image, order.environment)
    _run(order.worker, order.image, control, *files)


def _refuse_shadowed(order: MakeWorker, control: int) -> MakeWorker:
    """Return an order for a fresh interpreter where a fork would miss a module of the user's."""
    name, file = next(shadows(order.image.module_path), ("", ""))
    if not name:
        return order
    worker, program = order.worker, order.worker.program
    if worker.rank == 0 and worker.restart_count == 0:
        way_out = 'start_method="spawn"' if program is None else "--start-method spawn"
        AgentLink(os.dup(control)).send(
            Remarked(
                message=f"{file} stands before the module {name!r} that workers are forked with, "
                "so they are started as fresh interpreters (slower). Rename it, or say "
                f"{way_out} if it is meant"
            )
        )
    if program is not None:
        program = msgspec.structs.replace(program, replaces_worker=True)
        worker = msgspec.structs.replace(worker, program=program)
    return msgspec.structs.replace(order, worker=worker, fresh_interpreter=True)


def run_forked_store_host(order: MakeStoreHost, fds: list[int], server_pid: int) -> NoReturn:
    """Be the store host, in a child that the fork server just forked."""
    kernel.die_with_parent(server_pid)
    listener, last_words = fds
    os.dup2(last_words, 2)
    kernel.close_all_fds({0, 1, 2, listener})
    fresh.enter_surroundings(order.image)
    if order.fresh_interpreter:
        _exec("phalanx.worker.bootstrap", order, [listener])
    _host_store(order, listener)


def _host_store(order: MakeStoreHost, listener_fd: int) -> NoReturn:
    faulthandler.enable(2)
    from phalanx.worker.store_host import host_store  # noqa: PLC0415 - imports torch

    host_store(listener_fd, order.master_addr, order.master_port)


def main(argv: list[str]) -> NoReturn:
    """Go on in a fresh interpreter; `argv` holds the numbers of the descriptors."""
    order_fd, *fds = (int(number) for number in argv)
    with open(order_fd, "rb") as file:  # noqa: PTH123 - a descriptor
        order = msgspec.msgpack.decode(file.read(), type=MakeWorker | MakeStoreHost)
    if isinstance(order, MakeStoreHost):
        _host_store(order, fds[0])
    for fd in fds:
        os.set_inheritable(fd, False)
    from phalanx.wire import payload  # noqa: F401, PLC0415 - before the user's modules are found

    fresh.enter_interpreter(order.image, order.environment)
    make_room(order.image.module_path)
    _run(order.worker, order.image, *fds)


def _exec(module: str, order: MakeWorker | MakeStoreHost, fds: list[int]) -> NoReturn:
    """Replace this process by a fresh interpreter that goes on in `main`."""
    order_fd = kernel.open_anonymous_file("phalanx-order")
    os.write(order_fd, msgspec.msgpack.encode(order))
    os.lseek(order_fd, 0, os.SEEK_SET)
    fds = [order_fd, *fds]
    for fd in fds:
        os.set_inheritable(fd, True)
    image = order.image
    command = interpreter.command(image.executable, image.flags, module, *map(str, fds))
    environment = order.environment if isinstance(order, MakeWorker) else image.environment
    os.execve(image.executable, command, environment)  # noqa: S606 - our own command


def _become(program: Program, order: MakeWorker, link: AgentLink) -> NoReturn:
    """Replace this process by a program; how it ends is all that will be known of it."""
    worker = order.worker
    _bind_to_cpus(worker, order.image)
    kernel.close_all_fds({0, 1, 2, link.fileno()})  # which the exec closes
    for signum in (signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
        if signum not in order.image.ignored_signals:
            signal.signal(signum, signal.SIG_DFL)  # only Python ignores them
    command = script.command_of(program, order.image, worker.local_rank)
    link.report(Entered())
    try:
        os.execvpe(command[0], command, order.environment)  # noqa: S606 - the user's command
    except OSError as error:
        _tell_missing(link, script.why_not_run(command[0], error), worker)
    os._exit(126)


def _bind_to_cpus(worker: WorkerSpec, image: ProcessImage) -> None:
    if worker.numa_binding is not None:
        from phalanx.worker.numa import bind  # noqa: PLC0415 - only if it was asked for

        bind(worker, image.environment)


def _connect_standard_streams(stdin: int | None, out: int, err: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)


def _run(
    worker: WorkerSpec, image: ProcessImage, control: int, page: int, payload: int, native: int
) -> NoReturn:
    """Load the function, call it, tell the agent what came of it, and end."""
    faulthandler.enable(native)  # into a file of its own: a user's enable() replaces it
    link = AgentLink(control)
    control_page = ControlPage(page, worker.world_size)
    os.close(page)
    be_found(control_page, worker.rank, native)
    context = WorkerContext(worker, link, control_page)
    install_context(context)
    if worker.program is None:
        sys.breakpointhook = context.on_breakpoint
    after_import("torch.optim.optimizer", watch_optimizers)
    if worker.is_watched:  # so that a script without a context gives signs of life, too
        after_import("torch.optim.optimizer", lambda: note_steps(context.heartbeat))
    after_import("torch.distributed.distributed_c10d", register_shm_backend)
    _bind_to_cpus(worker, image)
    read_from_terminal(link, worker)
    call = _load(worker, image, payload, context, link)
    link.report(Entered())
    code = _call(worker, call, link)
    if worker.program is not None and code == 0:
        _finish(code, lambda: link.report(Returned(data=b"")))
    _finish(code)


def _load(
    worker: WorkerSpec,
    image: ProcessImage,
    payload_fd: int,
    context: WorkerContext,
    link: AgentLink,
) -> Call:
    from phalanx.wire import payload  # noqa: PLC0415 - a fork has it, a fresh interpreter needs it now

    fresh.make_main(image)
    try:
        if worker.program is not None:
            os.close(payload_fd)
            return _script(worker, worker.program)
        call_fd, *inherited = parcel.unpack(payload_fd)
        with mmap.mmap(call_fd, 0, access=mmap.ACCESS_READ) as data:
            os.close(call_fd)
            return payload.load_call(data, context, fds=inherited)
    except BaseException as error:  # noqa: BLE001 - imports of user modules: anything may come
        _tell(link, error, _record(error, worker, "startup"))
        _finish(1)


def _script(worker: WorkerSpec, program: Program) -> Call:
    from phalanx.wire.payload import Call  # noqa: PLC0415 - as above

    run = script.loader_of(program, worker.local_rank)
    return Call(function=lambda _rank, _world_size: run(), args=(), kwargs={})


def _call(worker: WorkerSpec, call: Call, link: AgentLink) -> int:
    """Call the function and report; return the exit code."""
    try:
        value = call.function(worker.rank, worker.world_size, *call.args, **call.kwargs)
    except SystemExit as leaving:
        code = script.exit_code_of(leaving)
        if code == 0:
            return _return(worker, None, link)
        if not isinstance(leaving.code, int):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                print(leaving.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        link.report(Raised(failure=_record(leaving, worker, "exit")))
        return code
    except script.NoProgramError as error:
        _tell_missing(link, str(error), worker)
        return 1
    except BaseException as error:  # noqa: BLE001 - it goes to the launcher
        _tell(link, error, _record(error, worker, "exception"))
        interrupted = isinstance(error, KeyboardInterrupt) and worker.program is not None
        return _BY_INTERRUPT if interrupted else 1
    return _return(worker, value, link)


def _return(worker: WorkerSpec, value: object, link: AgentLink) -> int:
    if worker.program is not None:
        return 0  # a script has ended when its threads have: see _finish
    from phalanx.wire import payload  # noqa: PLC0415 - loaded already

    fd = kernel.open_anonymous_file("phalanx-return")
    with open(fd, "w+b") as file:  # noqa: PTH123 - a descriptor
        try:
            payload.dump_value(value, file)
        except PayloadError as error:
            failure = failure_of(error, worker, cause="exception")
            _tell(link, error, msgspec.structs.replace(failure, retry=False))
            return 1
        file.flush()
        if file.tell() > INLINE_LIMIT:
            link.report(Returned(data=None), [file.fileno()])
        else:
            file.seek(0)
            link.report(Returned(data=file.read()))
    return 0


def _record(error: BaseException, worker: WorkerSpec, cause: Cause) -> Failure:
    frames = script.num_own_frames(error)
    return failure_of(error, worker, cause=cause, skip_frames=frames)


def _tell(link: AgentLink, error: BaseException, failure: Failure) -> None:
    """Report a failure; its own log has it too, as any process' would."""
    text = failure.traceback if failure.kind == "primary" else f"{failure.headline()}\n"
    with contextlib.suppress(Exception):  # it may have closed stderr, or its hook may fail
        if not script.show(error):
            sys.stderr.write(text or failure.message)
        sys.stderr.flush()
    link.report(Raised(failure=failure))


def _tell_missing(link: AgentLink, message: str, worker: WorkerSpec) -> None:
    """Report that there is no such program: a sentence says it all, and no restart helps."""
    failure = Failure(
        rank=worker.rank,
        node_rank=worker.node_rank,
        pid=os.getpid(),
        generation=worker.generation,
        cause="startup",
        message=message,
        at=time.time(),
        retry=False,
    )
    link.report(Raised(failure=failure))


def _finish(code: int, last_word: Callable[[], None] | None = None) -> NoReturn:
    """End as the interpreter would, short of taking modules apart.

    Threads that are no daemons are waited for, exit handlers run, streams are flushed. What
    finalisation does beyond that is where torch programs crash after their work is done.

    Args:
        code: The exit code.
        last_word: Called when user code has nothing more to do.
    """
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - what Py_Finalize calls
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # noqa: SLF001 - multiprocessing ends so, too
    if last_word is not None:
        last_word()
    with contextlib.suppress(BaseException):
        script.clear_main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    if code == _BY_INTERRUPT:
        script.end_by_interrupt()
    os._exit(code)

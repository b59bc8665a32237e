"""From options to a launch: what torchrun's words mean on one machine."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import shutil
import socket
import string
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.cli import formats
from phalanx.cli.usage import UsageError
from phalanx.launcher.image import process_image
from phalanx.launcher.launch import check_preload
from phalanx.system import kernel, paths
from phalanx.values.outputs import LineFilter, Outputs, StreamOutput
from phalanx.values.spec import LaunchSpec, ProcessImage, Program, check_launch

if TYPE_CHECKING:
    from phalanx.cli.options import Options

_C10D_PORT = 29400
"""Where torchrun's c10d rendezvous is when its endpoint names no port."""
_DEFAULT_GRACE_S = 30.0
_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def plan(options: Options) -> tuple[LaunchSpec, ProcessImage]:
    """Return what to launch, and what the workers take over from this process.

    Raises:
        UsageError: Something can't be carried out.
        SpecError: As `start_processes` would raise.
    """
    values = options.values
    _check_one_machine(values)
    program = _program(options)
    num_workers = _num_workers(values.nproc_per_node)
    image = _image(program)
    address, port = _meeting_place(values)
    prefixes = _prefixes(values, num_workers)
    standalone = values.standalone or values.rdzv_id in ("", "none")
    spec = LaunchSpec(
        run_id=paths.new_run_id(),
        function=program.target,
        world_size=num_workers,
        num_processes_per_machine=num_workers,
        master_addr=address,
        master_port=port,
        max_restarts=values.max_restarts,
        restart=values.restart,
        start_method="spawn" if program.replaces_worker else "forkserver",
        preload=_preload(values, program, image),
        log_dir=None if values.log_dir is None else str(Path(values.log_dir).absolute()),
        grace_s=_grace_s(values),
        hang_timeout_s=values.hang_timeout,
        program=program,
        role=values.role,
        elastic_run_id=None if standalone else values.rdzv_id,
        virtual_local_rank=values.virtual_local_rank,
        numa_binding=values.numa_binding,
        outputs=_outputs(values, num_workers, prefixes),
        fold=not values.no_fold and not prefixes,
        on_closed_output=values.on_closed_output,
        stdin_ranks=_stdin_ranks(values.stdin, num_workers),
    )
    check_launch(spec)
    return spec, image


def _stdin_ranks(who: str | int, num_workers: int) -> tuple[int, ...]:
    """Return who gets standard input: nobody, if it is the terminal of somebody else's shell."""
    if isinstance(who, int) and who >= num_workers:
        raise UsageError(
            f"--stdin {who}: there is no local rank {who} among {num_workers} workers; name one "
            f"of 0–{num_workers - 1}, or write all or none"
        )
    if who == "none" or kernel.is_terminal_in_background(0):
        return ()
    return (who,) if isinstance(who, int) else tuple(range(num_workers))


# ── one machine ──────────────────────────────────────────────────────────────────────────


def _check_one_machine(values: Any) -> None:  # noqa: ANN401 - argparse's namespace
    low, colon, high = str(values.nnodes).partition(":")
    if not low.isdigit() or (colon and not high.isdigit()):
        raise UsageError(f"--nnodes {values.nnodes}: give a number of machines, or MIN:MAX")
    if int(high or low) != 1 or int(low) != 1:
        raise UsageError(
            f"--nnodes {values.nnodes}: so far a run has one machine. Leave --nnodes out, and "
            "use torchrun where several are needed"
        )
    if values.standalone:
        return  # as in torchrun, the options of the rendezvous are ignored then
    if values.rdzv_backend not in ("static", "c10d"):
        raise UsageError(
            f"--rdzv-backend {values.rdzv_backend}: one machine needs no outside rendezvous; "
            "use --standalone instead"
        )
    if values.node_rank != 0 and values.rdzv_backend == "static":
        raise UsageError(
            f"--node-rank {values.node_rank}: so far a run has one machine, whose rank is 0"
        )
    if values.logs_specs is not None:
        raise UsageError(
            f"--logs-specs {values.logs_specs}: torchrun's plugins are not supported; see "
            "--log-dir, --tee and --redirects"
        )


def _meeting_place(values: Any) -> tuple[str, int]:  # noqa: ANN401 - as above
    """Return address and port of the group's store."""
    address = values.local_addr or values.master_addr
    if values.standalone:
        return values.local_addr or "127.0.0.1", 0
    if not values.rdzv_endpoint:
        return address.strip("[]"), values.master_port or 0
    host, _, port = values.rdzv_endpoint.rpartition(":")
    if not host or (values.rdzv_endpoint.endswith("]")):
        host, port = values.rdzv_endpoint, str(_C10D_PORT)
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--rdzv-endpoint {values.rdzv_endpoint}: write it as host:port")
    return host.strip("[]"), int(port)


def _num_workers(text: str) -> int:
    text = text.strip().lower()
    if text.isdigit() and int(text) > 0:
        return int(text)
    num_gpus = len(kernel.visible_gpus(dict(os.environ)))
    if text == "gpu" and not num_gpus:
        raise UsageError("--nproc-per-node gpu: there is no GPU here; give a number, or auto")
    if text in ("gpu", "auto") and num_gpus:
        return num_gpus
    if text in ("cpu", "auto"):
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
    raise UsageError(f"--nproc-per-node {text}: give a number (1 or more), gpu, cpu or auto")


def _grace_s(values: Any) -> float:  # noqa: ANN401 - as above
    if values.shutdown_timeout is not None:
        return float(values.shutdown_timeout)
    text = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    try:
        return _DEFAULT_GRACE_S if text is None else formats.seconds(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"the variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT: {error}") from None


# ── what to run ──────────────────────────────────────────────────────────────────────────


def _program(options: Options) -> Program:
    values, target = options.values, options.target
    if values.no_python and values.module:
        raise UsageError("--no-python and --module exclude each other: leave one out")
    if values.no_python and not values.run_path:
        _check_executable(target)
        return Program(
            kind="executable", target=target, arguments=options.arguments, replaces_worker=True
        )
    if not values.module:
        _check_script(target)
    return Program(
        kind="module" if values.module else "script",
        target=target,
        arguments=options.arguments,
        replaces_worker=values.start_method == "spawn" or "PYTHON_EXEC" in os.environ,
    )


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_dir() and not any((path / f"__main__{end}").exists() for end in (".py", ".pyc")):
        raise UsageError(
            f"{target} is a folder without a __main__.py; name the script in it", exit_code=1
        )
    if not path.exists():
        hint = "; was `-m` meant?" if "/" not in target and _is_module(target) else ""
        raise UsageError(f"there is no script {str(path.absolute())!r}{hint}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {str(path.absolute())!r} can't be read: permission denied")


def _is_module(name: str) -> bool:
    top = name.partition(".")[0]
    return importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is not None


def _check_executable(target: str) -> None:
    if shutil.which(target) is not None:
        return
    if Path(target).is_file():
        remedy = "say where it is, as ./" + target if "/" not in target else "run `chmod +x` on it"
        raise UsageError(f"the program {target} can't be run: {remedy}", exit_code=126)
    raise UsageError(f"there is no program {target}", exit_code=127)


# ── what workers take over ───────────────────────────────────────────────────────────────


def _image(program: Program) -> ProcessImage:
    """Return this process' surroundings, as ``python script.py`` would have made them.

    The script's folder comes first in the workers' path, and last in the fork server's, so
    that a script beside a ``random.py`` of its own does not get in the way of our imports.
    """
    image = process_image({})
    safe = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
    base = image.module_path
    own: tuple[str, ...] = ()
    if program.kind == "module":
        own = () if safe else (image.directory,)
    elif program.kind == "script":
        real = os.path.realpath(program.target)
        is_plain = Path(real).is_file() and not _is_archive(real)
        if not is_plain:
            own = (str(Path(program.target).absolute()),)
        elif not safe:
            own = (str(Path(real).parent),)
    is_script = program.kind == "script"
    dash_m = ("-m",) if program.kind == "module" else ()
    return msgspec.structs.replace(
        image,
        module_path=(*own, *base),
        preload_path=(*base, *own),
        argv=(*dash_m, program.target, *program.arguments),
        main_file=f"{image.directory}/{program.target}" if is_script else None,
    )


def _is_archive(path: str) -> bool:
    import zipfile  # noqa: PLC0415 - asked about scripts only

    return not path.endswith((".py", ".pyc")) and zipfile.is_zipfile(path)


def _preload(values: Any, program: Program, image: ProcessImage) -> tuple[str, ...]:  # noqa: ANN401
    if program.kind == "executable":
        return ()  # it may have nothing to do with torch: a store comes when somebody asks
    if values.preload is None:
        return ("torch",)
    wanted = tuple(name for part in values.preload for name in part)
    return check_preload(wanted, image.path_of_preload)


# ── output ───────────────────────────────────────────────────────────────────────────────


def _outputs(values: Any, num_workers: int, prefixes: tuple[str, ...]) -> Outputs:  # noqa: ANN401
    """Return who prints where; with a log folder and no more said, files get everything."""
    redirects, tee = values.redirects, values.tee
    if values.log_dir is not None and not redirects and not tee:
        tee = formats.OUT | formats.ERR
    shown = range(num_workers) if values.local_ranks_filter is None else values.local_ranks_filter
    for rank in (*shown, *_named(redirects), *_named(tee)):
        if rank >= num_workers:
            raise UsageError(f"there is no local rank {rank} among {num_workers} workers")

    def streams(bit: int) -> tuple[StreamOutput, ...]:
        both = _ranks(tee, bit, num_workers)
        file_only = _ranks(redirects, bit, num_workers) - both
        return tuple(
            StreamOutput(
                console=rank in shown and rank not in file_only,
                prefix=prefixes[rank] if prefixes else None,
                kept=rank in both,
            )
            for rank in range(num_workers)
        )

    return Outputs(
        out=streams(formats.OUT),
        err=streams(formats.ERR),
        out_filter=_filter(values.duplicate_stdout_filters),
        err_filter=_filter(values.duplicate_stderr_filters),
    )


def _filter(needles: tuple[str, ...] | None) -> LineFilter | None:
    return LineFilter(needles=tuple(needles)) if needles else None


def _prefixes(values: Any, num_workers: int) -> tuple[str, ...]:  # noqa: ANN401 - as above
    """Return what was asked for to stand before each rank's lines; empty: the usual.

    Names that there are not stay as they are written, as with torchrun.
    """
    text = values.log_line_prefix_template or os.environ.get(_PREFIX_VARIABLE, "")
    if not text:
        return ()
    hostname = socket.gethostname()
    return tuple(
        string.Template(text).safe_substitute(
            role_name=values.role, local_rank=rank, rank=rank, hostname=hostname
        )
        for rank in range(num_workers)
    )


def _named(choice: formats.StreamChoice) -> tuple[int, ...]:
    return tuple(choice) if isinstance(choice, dict) else ()


def _ranks(choice: formats.StreamChoice, bit: int, num_workers: int) -> set[int]:
    if isinstance(choice, dict):
        return {rank for rank, streams in choice.items() if streams & bit}
    return set(range(num_workers)) if choice & bit else set()

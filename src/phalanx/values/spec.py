"""What a launch asks for: frozen values, validated once, where they come in.

`LaunchSpec` is what the user asked for, `ProcessImage` the surroundings that every worker
takes over from the launcher, `WorkerSpec` the place of one rank, and `worker_environment`
the variables that tell the user's code about it: the ones that torchrun sets, so that
``init_process_group()`` and what builds on it work unchanged.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Literal, TypeAlias

import msgspec

from phalanx.values.errors import SpecError
from phalanx.values.outputs import Outputs
from phalanx.values.policy import Policy

Restart: TypeAlias = Literal["group", "worker"]
StartMethod: TypeAlias = Literal["forkserver", "spawn"]
OnClosedOutput: TypeAlias = Literal["continue", "stop"]
NumaBinding: TypeAlias = Literal["node", "socket", "exclusive", "core-complex"]
Duration: TypeAlias = float | int | timedelta
"""Seconds, or a `timedelta`."""

KNOWN_BACKENDS = ("auto", "gloo", "nccl", "mpi", "ucc", "xccl", "shm")
"""What torch.distributed brings along, "auto", and ours."""

TAG_VARIABLE = "PHALANX_WORKER"
"""Environment variable ``<run>/<generation>/<rank>``: by it an orphan can be attributed."""


_LEAST_STORE = 1 << 20


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What workers run instead of a function.

    Attributes:
        kind: ``script``: a file (or a folder or archive with a ``__main__.py``), as by
            ``python target``; ``module``: as by ``python -m target``; ``executable``: any
            program.
        target: The file, the module's name, or the program.
        arguments: What it gets; ``${local_rank}`` in them is each worker's own.
        replaces_worker: The worker's process becomes a process of the program (exec); False:
            it runs in the worker, as its ``__main__``.
        commands: By local rank, a whole command line in place of target and arguments.
    """

    kind: Literal["script", "module", "executable"]
    target: str
    arguments: tuple[str, ...] = ()
    replaces_worker: bool = False
    commands: tuple[tuple[str, ...], ...] = ()

    def arguments_of(self, local_rank: int) -> tuple[str, ...]:
        """Return the arguments of one worker."""
        return tuple(arg.replace("${local_rank}", str(local_rank)) for arg in self.arguments)


class ProcessImage(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker takes over from the launcher, as it was at the call."""

    executable: str
    flags: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    module_path: tuple[str, ...]
    argv: tuple[str, ...]
    umask: int
    limits: tuple[tuple[int, int, int], ...] = ()
    ignored_signals: tuple[int, ...] = ()
    blocked_signals: tuple[int, ...] = ()
    main_file: str | None = None
    preload_path: tuple[str, ...] | None = None

    @property
    def path_of_preload(self) -> tuple[str, ...]:
        """Where the fork server looks for modules; workers look along `module_path`."""
        return self.module_path if self.preload_path is None else self.preload_path


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as it was asked for. Durations are seconds.

    Attributes that `start_processes` has no argument for:
        fold: Console lines that several ranks print alike become one.
        on_closed_output: What happens when nobody reads the console any more.
        error_files: The ranks' torchelastic error files; empty: in the run's directory.
        variables: By rank, the variables that it gets in place of torchrun's.
        stdin_ranks: Ranks that get the launcher's standard input; the others get none.
    """

    run_id: str
    function: str
    world_size: int
    num_processes_per_machine: int
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    backend: str = "auto"
    max_restarts: int = 0
    restart_window_s: float | None = None
    restart: Restart = "group"
    start_method: StartMethod = "forkserver"
    preload: tuple[str, ...] = ("torch",)
    log_dir: str | None = None
    outputs: Outputs = Outputs()
    grace_s: float = 30.0
    start_timeout_s: float = 300.0
    hang_timeout_s: float | None = None
    store_limit: int | None = None
    run_dir: str = ""
    program: Program | None = None
    role: str = "default"
    elastic_run_id: str | None = None
    virtual_local_rank: bool = False
    numa_binding: NumaBinding | None = None
    fold: bool = False
    on_closed_output: OnClosedOutput = "continue"
    error_files: tuple[str, ...] = ()
    variables: tuple[dict[str, str], ...] = ()
    stdin_ranks: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Number of machines, emulated ones included."""
        return self.world_size // self.num_processes_per_machine

    @property
    def policy(self) -> Policy:
        """The part that the lifecycle needs."""
        return Policy(
            world_size=self.world_size,
            max_restarts=self.max_restarts,
            restart_window_s=self.restart_window_s,
            restart=self.restart,
            grace_s=self.grace_s,
            start_timeout_s=self.start_timeout_s,
            runs_program=self.program is not None,
        )


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one worker in its group."""

    run_id: str
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int
    generation: int
    restart_count: int
    restart: Restart
    backend: str
    has_store: bool = True
    program: Program | None = None
    numa_binding: NumaBinding | None = None
    is_watched: bool = False

    @property
    def tag(self) -> str:
        """Value of `TAG_VARIABLE` for this worker."""
        return f"{self.run_id}/{self.generation}/{self.rank}"


def check_launch(spec: LaunchSpec) -> None:
    """Check everything about a launch that its values alone can tell.

    Raises:
        SpecError: Names the argument, what is wrong with it, and what would be right.
    """
    _check_counts(spec.world_size, spec.num_processes_per_machine)
    if spec.max_restarts < 0:
        raise SpecError(f"max_restarts must be 0 or more, not {spec.max_restarts}")
    _check_choice("restart", spec.restart, ("group", "worker"))
    _check_choice("start_method", spec.start_method, ("forkserver", "spawn"))
    if not 0 <= spec.master_port <= 65535:
        raise SpecError(
            f"main_process_port must be 0 (any free port) or 1–65535, not {spec.master_port}"
        )
    if spec.start_timeout_s <= 0:
        raise SpecError("start_timeout must be more than 0 seconds")
    if spec.store_limit is not None and spec.store_limit < _LEAST_STORE:
        raise SpecError(
            f"store_limit is in bytes and must be {_LEAST_STORE:,} or more, not {spec.store_limit}"
        )
    if spec.restart_window_s is not None and spec.restart_window_s <= 0:
        raise SpecError("restart_window must be more than 0 seconds, or None for the whole run")


def _check_counts(world_size: int, per_machine: int) -> None:
    if world_size < 1:
        raise SpecError(f"world_size must be 1 or more, not {world_size}")
    if per_machine < 1:
        raise SpecError(f"num_processes_per_machine must be 1 or more, not {per_machine}")
    if world_size % per_machine:
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise SpecError(
            f"world_size ({world_size}) must be a multiple of num_processes_per_machine "
            f"({per_machine}); with {world_size} workers it can be one of {fitting}"
        )


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise SpecError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_backend(backend: str, registered: Iterable[str] = ()) -> None:
    """Check the name of a process-group backend.

    Args:
        backend: A name, or torch's ``"cpu:gloo,cuda:nccl"`` form.
        registered: Further names that are known to be registered with torch.

    Raises:
        SpecError: A name is unknown; the nearest known one is suggested.
    """
    known = (*KNOWN_BACKENDS, *registered)
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SpecError(
            f"unknown backend {name!r}: {hint}known are {', '.join(known)}. A backend of your "
            "own must be registered with torch.distributed by a module named in preload=…"
        )


def to_seconds(name: str, value: Duration, *, above_zero: bool = False) -> float:
    """Return a duration in seconds.

    Raises:
        SpecError: It is negative (or zero, if it must be above), not finite, or no duration.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name} must be seconds or a timedelta, not {value!r}")
    if not 0 <= value < float("inf") or (above_zero and value == 0):
        least = "more than 0 seconds" if above_zero else "0 seconds or more"
        raise SpecError(f"{name} must be {least}, not {value!r}")
    return float(value)


def worker_spec(spec: LaunchSpec, rank: int, generation: int, restart_count: int) -> WorkerSpec:
    """Return the place of one rank."""
    per_machine = spec.num_processes_per_machine
    return WorkerSpec(
        run_id=spec.run_id,
        rank=rank,
        local_rank=rank % per_machine,
        node_rank=rank // per_machine,
        world_size=spec.world_size,
        local_world_size=per_machine,
        num_nodes=spec.num_nodes,
        generation=generation,
        restart_count=restart_count,
        restart=spec.restart,
        backend=spec.backend,
        program=spec.program,
        numa_binding=spec.numa_binding,
        is_watched=spec.hang_timeout_s is not None,
    )


def worker_environment(
    spec: LaunchSpec, worker: WorkerSpec, base: dict[str, str], gpus: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return a worker's whole environment.

    Args:
        spec: The launch.
        worker: The rank's place.
        base: The launcher's environment, with what the user added for the workers.
        gpus: Names of the GPUs that the launcher sees. With emulated machines each node
            gets its slice of them; with one machine they are left as they are.

    Source:
        The names and values are those of torch.distributed.elastic's agent (torch 2.13).
    """
    environment = dict(base)
    if spec.variables:
        return environment | spec.variables[worker.rank] | {TAG_VARIABLE: worker.tag}
    environment |= {
        "RANK": str(worker.rank),
        "LOCAL_RANK": str(worker.local_rank),
        "GROUP_RANK": str(worker.node_rank),
        "ROLE_RANK": str(worker.rank),
        "ROLE_NAME": spec.role,
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(worker.local_world_size),
        "GROUP_WORLD_SIZE": str(worker.num_nodes),
        "ROLE_WORLD_SIZE": str(worker.world_size),
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(spec.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(worker.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.elastic_run_id or spec.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file(spec, worker),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        TAG_VARIABLE: worker.tag,
    }
    if spec.world_size > 1:  # so that N workers on one machine don't start N threads each
        environment.setdefault("OMP_NUM_THREADS", "1")
    if worker.num_nodes > 1 and gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_slice(gpus, worker))
    if spec.virtual_local_rank:
        own = gpus[worker.local_rank] if worker.local_rank < len(gpus) else str(worker.local_rank)
        environment |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": own}
    return environment


def error_file(spec: LaunchSpec, worker: WorkerSpec) -> str:
    """Path at which torchelastic's ``@record`` leaves its error file."""
    if spec.error_files:
        return spec.error_files[worker.rank]
    return f"{spec.run_dir}/errors/{worker.generation}/rank-{worker.rank}.json"


def _slice(gpus: tuple[str, ...], worker: WorkerSpec) -> tuple[str, ...]:
    """Deal the GPUs out to the emulated nodes; with fewer GPUs than nodes they share."""
    share = len(gpus) // worker.num_nodes
    if share == 0:
        return (gpus[worker.node_rank % len(gpus)],)
    return gpus[worker.node_rank * share : (worker.node_rank + 1) * share]

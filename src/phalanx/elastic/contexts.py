"""torchelastic's process contexts, each one run of Phalanx."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.elastic.multiprocessing import api as torch_api

from phalanx.elastic.checks import check_program, check_ranks
from phalanx.elastic.outputs import make_outputs, open_filtered
from phalanx.elastic.results import NO_PID, process_failure, process_failures
from phalanx.elastic.signals import termination_signals
from phalanx.elastic.worker import call_function
from phalanx.launcher import api
from phalanx.launcher import exit as launcher_exit
from phalanx.launcher.image import process_image
from phalanx.launcher.launch import launch
from phalanx.system import paths
from phalanx.values import events as ev
from phalanx.values import spec
from phalanx.values.errors import RunStoppedError, WorkerFailedError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import (
        LogsSpecs,
        ProcessFailure,
        RunProcsResult,
    )

    from phalanx.launcher.context import LauncherContext

Args = dict[int, tuple[Any, ...]]
Envs = dict[int, dict[str, str]]


class PContext:
    """Processes that were started together. `start_processes` makes and starts one.

    Attributes:
        name: What the processes are called on the console.
        entrypoint: The function, or the binary's name.
        args: Arguments by local rank.
        envs: Variables by local rank, on top of this process' own.
        nprocs: Number of processes.
        stdouts: Paths of the standard outputs by local rank; empty where it is no file.
        stderrs: The same of the standard errors.
        error_files: Paths of the error files by local rank.
        filtered_stdout: The file of filtered standard output lines, or None.
        filtered_stderr: The same of standard error.
    """

    _reports_all: ClassVar[bool]
    """Whether a result holds all failures, or the root cause only."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., object] | str,
        args: Args,
        envs: Envs,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        """Decide where the logs go; `start` starts the processes.

        Raises:
            RuntimeError: The logs are not those of as many ranks as there are arguments.
        """
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        logs = logs_specs.reify(envs)
        check_ranks(logs.stdouts, self.nprocs, "stdouts")
        check_ranks(logs.stderrs, self.nprocs, "stderrs")
        self.stdouts: dict[int, str] = logs.stdouts
        self.stderrs: dict[int, str] = logs.stderrs
        self.error_files: dict[int, str] = logs.error_files
        self._outputs = make_outputs(
            name, logs, log_line_prefixes, duplicate_stdout_filters, duplicate_stderr_filters
        )
        self.filtered_stdout = open_filtered(self._outputs.out_filter)
        self.filtered_stderr = open_filtered(self._outputs.err_filter)
        self._run: LauncherContext[Any] | None = None
        self._death_sig = signal.SIGTERM
        self._pids: dict[int, int] = {}
        self._result: RunProcsResult | None = None

    def start(self) -> None:
        """Start the processes, and return at once.

        Raises:
            ValueError: They were started already.
        """
        if self._run is not None or self._result is not None:
            raise ValueError(
                f"the processes of {self.name!r} were started already; make another context"
            )
        if not self.nprocs:
            self._result = torch_api.RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
            return
        api.refuse_in_child()
        for stream in (*self._outputs.out, *self._outputs.err):
            if stream.file is not None:
                Path(stream.file).open("w").close()
        self._run = self._launch()
        termination_signals.begin(self)

    @property
    def ended(self) -> bool:
        """Whether nothing of the processes is alive any more."""
        return self._run is None or self._run.ended

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all processes have ended well, or one has failed and the others were stopped.

        Args:
            timeout: Seconds; 0 only looks, and a negative number waits for ever.
            period: Not needed: nothing is polled.

        Returns:
            The result, or None if the time was over first.

        Raises:
            SignalException: This process was sent a signal; `close` the context with it.
            AgentLostError: Phalanx' agent was killed, and the processes with it.
        """
        del period
        if self._result is not None:
            return self._result
        run = self._started()
        returns: tuple[Any, ...] | None = None
        try:
            returns = run.wait(None if timeout < 0 else timeout).returns
        except TimeoutError:
            return None
        except (WorkerFailedError, RunStoppedError):
            pass
        self._let_go()
        self._result = torch_api.RunProcsResult(
            return_values={} if returns is None else dict(enumerate(returns)),
            failures={} if returns is not None else self._failures(),
            stdouts=self.stdouts,
            stderrs=self.stderrs,
        )
        return self._result

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank, also of processes that have ended.

        Waits, for milliseconds, until the processes exist.
        """
        if self._run is not None and len(self._pids) < self.nprocs:
            for event in self._run.events():
                if isinstance(event, ev.WorkerStarted):
                    self._pids[event.rank] = event.pid
                if len(self._pids) == self.nprocs:
                    break
        return dict(sorted(self._pids.items()))

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """End the processes and let go of what belongs to them. Blocks; may be repeated.

        Args:
            death_sig: The signal that they are asked to end by; None: SIGTERM.
            timeout: Seconds after which they are killed.
        """
        if self._run is None:
            self._close_files()
            return
        if not self._run.ended:
            self._death_sig = death_sig or signal.SIGTERM
            self._run.shutdown(timeout, signum=self._death_sig)
        self._let_go()

    # ── inside ───────────────────────────────────────────────────────────────────────────

    def _launch(self) -> LauncherContext[Any]:
        raise NotImplementedError

    def _start_run(
        self,
        call: tuple[object, ...] | None,
        **fields: Any,  # noqa: ANN401 - LaunchSpec has their types
    ) -> LauncherContext[Any]:
        """Start a run: without restarts, without a store, without Phalanx' own signals.

        Args:
            call: What `call_function` gets after rank and world size; None: a program runs.
            **fields: More of the launch.
        """
        no_file = any(file in ("", os.devnull) for file in self.error_files.values())
        launch_spec = spec.LaunchSpec(
            run_id=paths.new_run_id(),
            function=getattr(self.entrypoint, "__qualname__", str(self.entrypoint)),
            world_size=self.nprocs,
            num_processes_per_machine=self.nprocs,
            restart="worker",
            outputs=self._outputs,
            variables=tuple(self.envs[rank] for rank in range(self.nprocs)),
            error_files=() if no_file else tuple(self.error_files[r] for r in range(self.nprocs)),
            **fields,
        )
        spec.check_launch(launch_spec)
        payload = None if call is None else api.dump_payload(call_function, call, None)
        return launch(launch_spec, process_image({}), payload, takes_signals=False)

    def _started(self) -> LauncherContext[Any]:
        if self._run is None:
            raise RuntimeError(f"the processes of {self.name!r} are not started: call start()")
        return self._run

    def _let_go(self) -> None:
        run = self._started()
        self.pids()  # what the events tell
        run.close()
        launcher_exit.forget(run)
        termination_signals.end(self)
        self._close_files()

    def _close_files(self) -> None:
        for file in (self.filtered_stdout, self.filtered_stderr):
            if file is not None:
                file.close()

    def _failures(self) -> dict[int, ProcessFailure]:
        failures = process_failures(self._started().failures, self.pids(), self.error_files)
        if not failures:  # stopped before there was anybody to stop
            code = -int(self._death_sig)
            failures = {0: process_failure(0, self.pids().get(0, NO_PID), code, "")}
        if self._reports_all:
            return failures
        root = next(iter(failures))
        return {root: failures[root]}


class MultiprocessContext(PContext):
    """Processes that call a function."""

    _reports_all = False

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., object],
        args: Args,
        envs: Envs,
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: object | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        """See `PContext`.

        Raises:
            ValueError: There is no such start method.
        """
        if start_method not in ("spawn", "fork", "forkserver"):
            raise ValueError(
                f"start_method must be 'spawn', 'fork' or 'forkserver', not {start_method!r}"
            )
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
        self.start_method = start_method
        self._numa_options = numa_options

    def _launch(self) -> LauncherContext[Any]:
        fresh = self.start_method == "spawn"
        return self._start_run(
            (self.entrypoint, self.args, self._numa_options),
            start_method="spawn" if fresh else "forkserver",
            preload=() if fresh else ("torch",),
        )


class SubprocessContext(PContext):
    """Processes that are a binary."""

    _reports_all = True

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: Args,
        envs: Envs,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: object | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        """See `PContext`."""
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
        self._numa_options = numa_options

    def _launch(self) -> LauncherContext[Any]:
        """Start them.

        Raises:
            FileNotFoundError: There is no such program.
            PermissionError: It may not be executed.
        """
        commands = tuple(self._command(rank) for rank in range(self.nprocs))
        for rank, command in enumerate(commands):
            check_program(command[0], {**os.environ, **self.envs[rank]})
        program = spec.Program(
            kind="executable",
            target=str(self.entrypoint),
            commands=commands,
            replaces_worker=True,
        )
        return self._start_run(None, preload=(), program=program)

    def _command(self, rank: int) -> tuple[str, ...]:
        command = (str(self.entrypoint), *map(str, self.args[rank]))
        if self._numa_options is None:
            return command
        from torch.numa.binding import (  # noqa: PLC0415 - torch before 2.9 has none
            _maybe_wrap_command_args_with_numa_binding,
        )

        return tuple(
            _maybe_wrap_command_args_with_numa_binding(
                command, gpu_index=rank, numa_options=self._numa_options
            )
        )


torch_api.PContext.register(PContext)  # isinstance() of code that asks for torch's

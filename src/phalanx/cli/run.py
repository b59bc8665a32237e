"""``phalanx run``: launch, wait, and say how it ended."""

from __future__ import annotations

import json
import logging
import signal
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.cli.pause import pauses
from phalanx.cli.plan import plan
from phalanx.cli.status import status_line
from phalanx.cli.usage import UsageError
from phalanx.launcher import exit as launcher_exit
from phalanx.launcher.launch import key_of_launch, launch
from phalanx.launcher.link import agent_link
from phalanx.launcher.prompts import prompts
from phalanx.launcher.signals import STOPS, stop_signals
from phalanx.system import kernel
from phalanx.values import events as ev
from phalanx.values.errors import PhalanxError, RunStoppedError, WorkerFailedError
from phalanx.values.failures import Exited

if TYPE_CHECKING:
    from types import FrameType

    from phalanx.cli.options import Options
    from phalanx.cli.status import StatusLine
    from phalanx.launcher.context import LauncherContext
    from phalanx.values.failures import Failure
    from phalanx.values.spec import LaunchSpec, ProcessImage

_OURS = (signal.SIGKILL, signal.SIGTERM)
"""What ends a worker that has failed already and does not go."""


class _Interrupted(BaseException):
    """A signal ends the command: before anything was launched, or while something is stuck."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class _Signals:
    """What signals mean while no run has them: before it the end, after it nothing more.

    The handler notes them only: an exception in the middle of an import or of native code could
    do anything.
    """

    def __init__(self, passed: tuple[int, ...]) -> None:
        self.noted: int | None = None
        self.kept: list[int] = []
        self._passed = passed

    def take(self, named: tuple[int, ...]) -> None:
        """Take the usual stops and the signals that were named; what is ignored stays so."""
        for signum in {*STOPS, *named}:
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                signal.signal(signum, self._handle)

    def check(self) -> None:
        """Raise if one has come."""
        if self.noted is not None:
            raise _Interrupted(self.noted)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if signum in self._passed:  # for workers, as soon as there are any
            self.kept.append(signum)
        elif not stop_signals.idle:  # once too often: something must be stuck
            raise _Interrupted(signum)
        elif self.noted is None:
            self.noted = signum


def run(options: Options) -> int:
    """Run to the end; return the exit code. Blocks."""
    kernel.fill_standard_fds()
    log = _log_to_stderr()
    named = options.values.signals_to_handle
    usual = {*STOPS, signal.SIGQUIT}
    passed = tuple(signum for signum in named if signum not in usual)
    signals = _Signals(passed)
    signals.take(named)
    stop_signals.also_handle(stops={signal.SIGQUIT} & set(named), passed=passed)
    context: LauncherContext[Any] | None = None
    error: PhalanxError | None = None
    try:
        spec, image = plan(options)
        with status_line(spec.world_size) as line:
            log.setStream(sys.stderr)
            if line is not None:
                prompts.watch(line.stay_away)
            try:
                context = _launch(spec, image, signals, line)
                with pauses(context, line):
                    error = _wait(context)
            finally:
                log.setStream(sys.__stderr__)
    except _Interrupted as interrupted:
        if context is not None:
            launcher_exit.forget(context)  # the agent ends the workers when this process ends
        return 128 + interrupted.signum
    except PhalanxError as refused:
        raise UsageError(str(refused)) from refused
    return _say(context, error, as_json=options.values.json)


def _launch(
    spec: LaunchSpec, image: ProcessImage, signals: _Signals, line: StatusLine | None
) -> LauncherContext[Any]:
    signals.check()
    agent_link(key_of_launch(spec, image), image)  # torch is imported while we go on
    on_event = None if line is None else line.follow
    # From the moment at which the run is there, its own handlers have the signals.
    context = launch(spec, image, on_event=on_event, port_option="--master-port")
    if signals.noted is not None:
        context.request_stop(kernel.signal_name(signals.noted))
    for signum in dict.fromkeys(signals.kept):
        context.pass_signal(signum)
    return context


def _wait(context: LauncherContext[Any]) -> PhalanxError | None:
    """Return what the run ended with, if not well."""
    try:
        context.wait()
    except PhalanxError as error:
        return error
    return None


def _say(context: LauncherContext[Any], error: PhalanxError | None, *, as_json: bool) -> int:
    """Report how it ended; return the exit code."""
    code = _exit_code(context, error)
    if error is not None and not isinstance(error, RunStoppedError):
        print(f"phalanx: {error}", file=sys.stderr)  # noqa: T201
    if as_json:
        print(json.dumps(_report(context, error, code)), file=sys.stderr)  # noqa: T201
    return code


def _exit_code(context: LauncherContext[Any], error: PhalanxError | None) -> int:
    if isinstance(error, WorkerFailedError):
        return exit_code_of_failure(error.root_cause)
    if context.state == "stopped":
        return 128 + _stop_signal(context)
    return 0 if error is None else 1


def exit_code_of_failure(root: Failure) -> int:
    """Return the exit code of a command whose run failed by this root cause."""
    if root.exit is None:
        return 1
    if isinstance(root.exit, Exited):
        return root.exit.code or 1
    if root.cause in ("exception", "exit") and root.exit.signum in _OURS:
        return 1  # it had failed before, and did not go by itself
    return 128 + root.exit.signum


def _stop_signal(context: LauncherContext[Any]) -> int:
    """Return the signal that stopped the run: the first that came."""
    for event in context.events():
        if isinstance(event, ev.StopRequested | ev.KillRequested):
            name = event.reason.partition(" ")[0]
            if name.startswith("SIG") and hasattr(signal, name):
                return int(getattr(signal, name))
    return int(signal.SIGTERM)


def _report(context: LauncherContext[Any], error: PhalanxError | None, code: int) -> dict[str, Any]:
    failures = error.failures if isinstance(error, WorkerFailedError) else ()
    return {
        "run_id": context.run_id,
        "state": context.state,
        "exit_code": code,
        "restart_count": context.restart_count,
        "run_dir": context.spec.run_dir,
        "message": None if error is None else str(error).partition("\n")[0],
        "failures": [_as_json(failure) for failure in failures],
    }


def _as_json(failure: Failure) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(failure, exception=None))
    del plain["exception"]
    return plain


def _log_to_stderr() -> logging.StreamHandler[Any]:
    """Print what the launcher has to say while the run goes on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("phalanx: %(message)s"))
    log = logging.getLogger("phalanx")
    log.addHandler(handler)
    log.propagate = False
    logging.raiseExceptions = False  # a reader of ours that went away is no error
    return handler

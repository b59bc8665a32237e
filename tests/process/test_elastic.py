"""`phalanx.elastic`: the contract of torch's ``distributed.elastic.multiprocessing``."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic import multiprocessing as theirs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import phalanx.elastic as ours
from phalanx import PayloadError
from phalanx.elastic import (
    DefaultLogsSpecs,
    MultiprocessContext,
    PContext,
    SignalException,
    Std,
    SubprocessContext,
    start_processes,
)
from tests.deadlines import Pipe

METHODS = pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
PAIR = {0: {}, 1: {}}


@pytest.fixture
def logs(tmp_path):
    def make(**options):
        return DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), **options)

    return make


def start(entrypoint, args, logs_specs, *, envs=None, **options) -> PContext:
    envs = {rank: {} for rank in args} if envs is None else envs
    return start_processes("job", entrypoint, args, envs, logs_specs, **options)


def gone(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def shell(*scripts):
    return {rank: ("-c", script) for rank, script in enumerate(scripts)}


# ── the surface ──────────────────────────────────────────────────────────────────────────


def test_the_names_and_the_signature_are_torchs():
    """Those of the newest torch: older ones lack the last parameters, which may be left out."""
    assert set(theirs.__all__) <= set(ours.__all__)
    for name in ("start_processes", "MultiprocessContext", "SubprocessContext"):
        wanted = list(inspect.signature(getattr(theirs, name)).parameters.values())
        found = list(inspect.signature(getattr(ours, name)).parameters.values())
        known, newer = found[: len(wanted)], found[len(wanted) :]
        assert [p.name for p in known] == [p.name for p in wanted]
        if name == "start_processes":
            assert [p.default for p in known] == [p.default for p in wanted]
        assert all(p.default is not p.empty for p in newer)


def test_values_are_torchs_own_classes():
    for name in ("Std", "DefaultLogsSpecs", "RunProcsResult", "ProcessFailure", "SignalException"):
        assert getattr(ours, name) is getattr(theirs, name)


def test_the_package_imports_no_torch():
    code = "import sys, phalanx.elastic, phalanx.elastic.worker; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def double(value):
    return value * 2


@pytest.mark.parametrize(
    ("args", "envs"),
    [({0: (1,)}, PAIR), ({0: (1,), 1: (2,)}, {0: {}}), ({0: (1,), 2: (2,)}, PAIR)],
)
def test_keys_that_are_not_the_local_ranks(args, envs, logs):
    with pytest.raises(RuntimeError, match="local ranks"):
        start(double, args, logs(), envs=envs)


def test_an_unknown_start_method(logs):
    with pytest.raises(ValueError, match="start_method"):
        start(double, {0: (1,)}, logs(), start_method="thread")


def test_no_processes_at_all(logs):
    result = start(double, {}, logs()).wait()
    assert not result.is_failed()
    assert result.return_values == {}


# ── functions ────────────────────────────────────────────────────────────────────────────


@METHODS
def test_functions_return_by_local_rank(start_method, logs):
    context = start(double, {0: (1,), 1: ("a",)}, logs(), start_method=start_method)
    assert isinstance(context, MultiprocessContext)
    assert isinstance(context, theirs.PContext)
    result = context.wait(period=0.1)
    assert result.return_values == {0: 2, 1: "aa"}
    assert not result.is_failed()
    assert result is context.wait(), "waiting again is harmless"
    pids = context.pids()
    assert sorted(pids) == [0, 1]
    assert gone(pids)
    context.close()


def test_closures_travel_too(logs):
    offset = 5
    context = start(lambda value: value + offset, {0: (1,)}, logs())
    assert context.wait().return_values == {0: 6}


def large(num_bytes):
    return b"x" * num_bytes


def test_large_return_values(logs):
    result = start(large, {0: (30_000_000,), 1: (1,)}, logs(), start_method="fork").wait()
    assert [len(result.return_values[rank]) for rank in range(2)] == [30_000_000, 1]


def environment():
    return dict(os.environ)


@METHODS
def test_a_rank_has_its_variables_and_the_launchers_and_no_others(start_method, logs, monkeypatch):
    monkeypatch.setenv("SAID_BEFORE", "1")
    envs = {0: {"RANK": "7", "SAID_BEFORE": "2"}, 1: {"MASTER_PORT": "29500"}}
    context = start(environment, {0: (), 1: ()}, logs(), envs=envs, start_method=start_method)
    for rank, found in context.wait().return_values.items():
        found.pop("PHALANX_WORKER")
        assert found == {**os.environ, **envs[rank]}


def reduce():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_a_process_group_by_the_ranks_own_variables(start_method, logs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    envs = {rank: {"RANK": str(rank), **common} for rank in range(2)}
    context = start(reduce, {0: (), 1: ()}, logs(), envs=envs, start_method=start_method)
    assert context.wait(60).return_values == {0: 3.0, 1: 3.0}


def num_threads():
    import torch

    return torch.get_num_threads()


def test_threads_are_those_of_the_ranks_variables(logs, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    envs = {0: {"OMP_NUM_THREADS": "1"}, 1: {"OMP_NUM_THREADS": "3"}, 2: {}}
    args = dict.fromkeys(range(3), ())
    result = start(num_threads, args, logs(), envs=envs, start_method="fork").wait()
    assert result.return_values == {0: 1, 1: 3, 2: len(os.sched_getaffinity(0))}


def fail(how):
    if how == "raise":
        raise ValueError("boom")
    if how == "exit":
        sys.exit(42)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@METHODS
def test_an_exception_is_in_the_error_file(start_method, logs):
    context = start(fail, {0: ("wait",), 1: ("raise",)}, logs(), start_method=start_method)
    result = context.wait()
    assert list(result.failures) == [1]
    assert result.return_values == {}
    failure = result.failures[1]
    assert failure.exitcode == 1
    assert failure.pid == context.pids()[1]
    assert failure.error_file == context.error_files[1]
    assert failure.message["message"] == "ValueError: boom"
    assert 'raise ValueError("boom")' in failure.message["extraInfo"]["py_callstack"]
    assert gone(context.pids())


def test_an_exit_code_has_no_error_file(logs):
    failure = start(fail, {0: ("exit",), 1: ("wait",)}, logs()).wait().failures[0]
    assert failure.exitcode == 42
    assert failure.error_file == "<N/A>"
    assert "To enable traceback" in failure.message


def test_a_signal_is_a_negative_exit_code(logs):
    context = start(fail, {0: ("signal",), 1: ("wait",)}, logs(), start_method="fork")
    result = context.wait()
    assert list(result.failures) == [0]
    failure = result.failures[0]
    assert (failure.exitcode, failure.signal_name()) == (-9, "SIGKILL")
    assert failure.pid == context.pids()[0]


def leave():
    os._exit(0)


def test_a_function_that_leaves_by_itself_has_returned_none(logs):
    assert start(leave, {0: ()}, logs(), start_method="fork").wait(20).return_values == {0: None}


def crash():
    import ctypes

    ctypes.string_at(0)


def test_a_crash_leaves_its_stack_in_the_log(logs):
    context = start(crash, {0: ()}, logs(redirects=Std.ERR), start_method="fork")
    failure = context.wait().failures[0]
    assert failure.signal_name() == "SIGSEGV"
    assert "in crash" in Path(context.stderrs[0]).read_text()


def test_what_can_not_travel_is_an_error_of_the_call(logs):
    with pytest.raises(PayloadError):
        start(double, {0: (threading.Lock(),)}, logs())


# ── binaries ─────────────────────────────────────────────────────────────────────────────


def test_binaries_succeed_with_zero(logs, caplog):
    scripts = shell("echo $$ $0 $RANK", "echo $$")
    envs = {0: {"RANK": "3"}, 1: {}}
    context = start("sh", scripts, logs(redirects=Std.OUT), envs=envs)
    assert isinstance(context, SubprocessContext)
    result = context.wait()
    assert result.return_values == {0: None, 1: None}
    pids = context.pids()
    assert Path(result.stdouts[0]).read_text() == f"{pids[0]} sh 3\n"
    assert Path(result.stdouts[1]).read_text() == f"{pids[1]}\n"
    assert result.stderrs == {0: "", 1: ""}
    assert not caplog.records, "leaving with 0 is how a program succeeds"


def test_arguments_are_converted(logs):
    context = start("printf", {0: ("%s|", 1, None, [2])}, logs(redirects=Std.OUT))
    context.wait()
    assert Path(context.stdouts[0]).read_text() == "1|None|[2]|"


def test_a_binary_that_fails_and_one_that_is_stopped(logs):
    context = start("sh", shell("exec sleep 60", "exit 138"), logs())
    result = context.wait()
    assert list(result.failures) == [1, 0], "the root cause first"
    assert [failure.exitcode for failure in result.failures.values()] == [138, -15]
    assert result.failures[0].message.startswith("Signal 15 (SIGTERM) received by PID")
    assert ChildFailedError("job", result.failures).get_first_failure()[0] == 1
    assert gone(context.pids())


def test_binaries_that_end_well_when_stopped_are_no_failures(logs, tmp_path):
    ready = tmp_path / "ready"
    patient = f"trap 'exit 0' TERM; touch {ready}; while :; do sleep 0.01; done"
    failing = f"while [ ! -e {ready} ]; do sleep 0.01; done; exit 3"
    result = start("sh", shell(patient, failing), logs()).wait()
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {1: 3}


def test_the_error_file_of_a_recorded_binary(logs, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise KeyError('missing')\nmain()\n"
    )
    context = start(sys.executable, {0: (str(script),)}, logs(redirects=Std.ERR))
    failure = context.wait().failures[0]
    assert failure.message["message"] == "KeyError: 'missing'"
    assert "KeyError" in Path(context.stderrs[0]).read_text()


def test_a_torn_error_file_loses_no_failure(logs):
    torn = shell("printf '{\"mess' > $TORCHELASTIC_ERROR_FILE; exit 5")
    failure = start("sh", torn, logs()).wait().failures[0]
    assert (failure.exitcode, failure.error_file) == (5, "<N/A>")


def test_a_binary_that_is_not_there_or_not_executable(logs, tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    with pytest.raises(FileNotFoundError, match="no_such_program"):
        start("no_such_program", {0: (), 1: ()}, logs())
    with pytest.raises(FileNotFoundError):
        start(str(tmp_path / "nothing"), {0: ()}, logs())
    with pytest.raises(PermissionError):
        start(str(plain), {0: ()}, logs())


def test_a_binary_gets_default_signals(logs):
    script = shell("grep SigIgn /proc/self/status")
    context = start("sh", script, logs(redirects=Std.OUT))
    context.wait()
    ignored = int(Path(context.stdouts[0]).read_text().split()[1], 16)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not ignored & (1 << (signum - 1))


# ── waiting and closing ──────────────────────────────────────────────────────────────────


def test_a_poll_says_none_until_there_is_a_result(logs, tmp_path):
    go = tmp_path / "go"
    context = start("sh", shell(f"while [ ! -e {go} ]; do sleep 0.01; done"), logs())
    assert context.wait(timeout=0) is None
    assert context.wait(timeout=0.05, period=10) is None, "the period delays nothing"
    go.touch()
    until = time.monotonic() + 20
    while (result := context.wait(timeout=0)) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert result.return_values == {0: None}


@pytest.mark.parametrize("entrypoint", ["sleep", time.sleep])
def test_close_ends_the_processes(entrypoint, logs):
    context = start(entrypoint, {0: (60,), 1: (60,)}, logs(), start_method="fork")
    pids = context.pids()
    assert not gone(pids)
    context.close()
    assert gone(pids)
    context.close()
    result = context.wait()
    assert result.is_failed()
    assert result.return_values == {}


def test_closing_before_anything_has_started_is_a_failure_too(logs):
    context = start(time.sleep, {0: (60,)}, logs())
    context.close()
    assert context.wait().is_failed()


def test_close_honours_its_signal_and_its_timeout(logs, tmp_path):
    loop = f"touch {tmp_path}/$RANK; while :; do sleep 0.01; done"
    scripts = shell(f"trap 'exit 9' INT; trap '' TERM; {loop}", f"trap '' INT TERM; {loop}")
    envs = {0: {"RANK": "0"}, 1: {"RANK": "1"}}
    context = start("sh", scripts, logs(), envs=envs)
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        time.sleep(0.01)
    began = time.monotonic()
    context.close(signal.SIGINT, timeout=0.5)
    assert 0.4 < time.monotonic() - began < 10
    codes = {rank: failure.exitcode for rank, failure in context.wait().failures.items()}
    assert codes == {0: 9, 1: -9}


def test_a_context_starts_once(logs):
    context = MultiprocessContext("job", double, {0: (1,)}, {0: {}}, "fork", logs())
    with pytest.raises(RuntimeError, match=r"start\(\)"):
        context.wait()
    context.close()
    context.start()
    with pytest.raises(ValueError, match="already"):
        context.start()
    assert context.wait().return_values == {0: 2}


def test_it_works_off_the_main_thread(logs):
    results = []

    def run():
        results.append(start(double, {0: (1,)}, logs(), start_method="fork").wait())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert results[0].return_values == {0: 2}


# ── output ───────────────────────────────────────────────────────────────────────────────


def speak(text):
    print(text, "out")
    print(text, "err", file=sys.stderr)


@pytest.mark.parametrize("entrypoint", [speak, "sh"])
def test_streams_go_to_files_to_the_console_or_to_both(entrypoint, logs, capfd):
    args = {0: ("a",), 1: ("b",), 2: ("c",)}
    if entrypoint == "sh":
        args = shell(*(f"echo {x} out; echo {x} err >&2" for x in "abc"))
    specs = logs(redirects={0: Std.ALL}, tee={1: Std.OUT, 2: Std.ALL})
    context = start(entrypoint, args, specs, start_method="fork", log_line_prefixes={2: "<2>"})
    assert all(Path(p).exists() for p in context.stdouts.values()), "from the start"
    result = context.wait()
    assert [Path(result.stdouts[r]).read_text() for r in range(3)] == [f"{x} out\n" for x in "abc"]
    assert result.stderrs[1] == ""
    assert Path(result.stderrs[0]).read_text() == "a err\n"
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["<2>c out", "[job1]:b out"]
    assert sorted(err.splitlines()) == ["<2>c err", "b err"]


def test_only_some_ranks_on_the_console(logs, capfd):
    specs = logs(tee={1: Std.OUT}, local_ranks_filter={0})
    context = start(speak, {0: ("a",), 1: ("b",)}, specs, start_method="fork")
    context.wait()
    out, err = capfd.readouterr()
    assert (out, err) == ("a out\n", "a err\n")
    assert Path(context.stdouts[1]).read_text() == "b out\n"


def test_filtered_lines_are_collected(logs):
    scripts = shell("echo good 1; echo bad 1", "echo good 2", "echo good 3")
    specs = logs(tee={0: Std.OUT, 1: Std.ALL}, redirects={2: Std.OUT})
    context = start("sh", scripts, specs, duplicate_stdout_filters=["good", "0"])
    context.wait()
    assert context.filtered_stdout.closed
    lines = Path(context.filtered_stdout.name).read_text().splitlines()
    assert sorted(lines) == ["[job0]:good 1", "[job1]:good 2"]
    assert context.filtered_stderr is None


def test_no_logs_at_all(capfd):
    context = start(
        "sh", shell("echo $TORCHELASTIC_ERROR_FILE.; exit 1"), theirs.DefaultLogsSpecs(os.devnull)
    )
    assert context.wait().is_failed()
    assert capfd.readouterr().out == ".\n"
    assert Path(os.devnull).is_char_device()


# ── signals, and what is left ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("entrypoint", ["sleep", time.sleep])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_this_process_raises_in_wait(entrypoint, signum, logs):
    before = signal.getsignal(signum)
    context = start(entrypoint, {0: (60,)}, logs(), start_method="fork")
    pids = context.pids()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signum))
    timer.start()
    with pytest.raises(SignalException) as caught:
        context.wait()
    timer.join(60)
    assert caught.value.sigval == signum
    assert not gone(pids)
    context.close(caught.value.sigval)
    assert gone(pids)
    assert signal.getsignal(signum) == before


def test_what_was_ignored_stays_ignored(logs):
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        context = start("sleep", {0: (0.3,)}, logs())
        os.kill(os.getpid(), signal.SIGHUP)
        assert not context.wait().is_failed()
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.parametrize("code", [0, 7])
def test_what_a_binary_leaves_behind_is_ended(code, logs):
    script = shell(f"setsid sleep 61 & echo $!; exit {code}")
    context = start("sh", script, logs(redirects=Std.OUT))
    context.wait()
    left = int(Path(context.stdouts[0]).read_text())
    assert gone({0: left})


def test_processes_die_with_their_launcher(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(
        "import json, os, sys\n"
        "from phalanx.elastic import *\n"
        f"specs = DefaultLogsSpecs({str(tmp_path / 'logs')!r})\n"
        "c = start_processes('job', 'sleep', {0: (60,), 1: (60,)}, {0: {}, 1: {}}, specs)\n"
        "print(json.dumps(c.pids()), flush=True)\n"
        "c.wait()\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as launcher:
        pids = json.loads(Pipe(launcher.stdout, text=True).line())
        assert not gone(pids)
        launcher.kill()
    until = time.monotonic() + 10
    while not gone(pids) and time.monotonic() < until:
        time.sleep(0.01)
    assert gone(pids)


def test_an_uncaught_signal_ends_launcher_and_processes(tmp_path):
    assert shutil.which("sleep")
    script = tmp_path / "launcher.py"
    script.write_text(
        "import os, signal\n"
        "from phalanx.elastic import *\n"
        f"specs = DefaultLogsSpecs({str(tmp_path / 'logs')!r})\n"
        "c = start_processes('job', 'sleep', {0: (60,)}, {0: {}}, specs)\n"
        "print(c.pids()[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "c.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "SignalException" in done.stderr
    assert gone({0: int(done.stdout)})

"""Runs from a launcher's point of view: what comes back, what goes wrong, what it says."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

import phalanx
from phalanx import (
    NotALauncherError,
    NotAWorkerError,
    PayloadError,
    PortInUseError,
    RunDirectoryError,
    RunStoppedError,
    SpecError,
    WorkerFailedError,
    get_context,
    start_processes,
)
from phalanx.values import events as ev

METHODS = pytest.mark.parametrize("start_method", ["forkserver", "spawn"])


def light(function, world_size=2, **options):
    """Start workers without torch: most of what is tested here does not need it."""
    return start_processes(function, world_size, preload=(), **options)


def add(rank, world_size, base, *, scale=1):
    return base + scale * rank


def boom(rank, world_size, culprit=1):
    if rank == culprit:
        raise ValueError(f"boom at {rank}")
    time.sleep(60)


@METHODS
def test_arguments_go_out_and_values_come_back_by_rank(start_method):
    context = light(add, 3, args=(10,), kwargs={"scale": 2}, start_method=start_method)
    result = context.wait()
    assert result.returns == (10, 12, 14)
    assert result.restart_count == 0
    assert result.run_id == context.run_id
    assert context.state == "succeeded"
    assert context.wait() == result, "waiting again is harmless"
    assert context.pids() == {}


def where_am_i(rank, world_size):
    context = get_context()
    return {
        "rank": (context.get_rank(), context.get_global_rank(), context.get_local_rank()),
        "node": context.node_rank,
        "world": context.get_world_size(),
        "master": (context.get_master_rank(), context.is_master),
        "count": context.restart_count,
        "run": context.run_id,
    }


def test_a_worker_learns_its_place_on_emulated_machines():
    context = light(where_am_i, 4, num_processes_per_machine=2)
    places = context.wait().returns
    assert [place["rank"] for place in places] == [(0, 0, 0), (1, 1, 1), (2, 2, 0), (3, 3, 1)]
    assert [place["node"] for place in places] == [0, 0, 1, 1]
    assert {place["world"] for place in places} == {4}
    assert [place["master"] for place in places] == [(0, i == 0) for i in range(4)]
    assert {place["run"] for place in places} == {context.run_id}


def ask_for_launcher_things(rank, world_size):
    context = get_context()
    said = []
    for ask in (
        context.wait,
        context.shutdown,
        context.pids,
        context.events,
        lambda: context.state,
    ):
        try:
            ask()
        except NotALauncherError as error:
            said.append(str(error))
    return said


def test_each_side_says_what_belongs_to_the_other():
    context = light(ask_for_launcher_things, 1)
    (said,) = context.wait().returns
    assert len(said) == 5
    assert all("launcher" in text for text in said)
    for ask in (
        context.get_rank, context.get_local_rank, context.should_stop, context.barrier,
        context.heartbeat, context.report, lambda: context.device, lambda: context.stop_requested,
    ):  # fmt: skip
        with pytest.raises(NotAWorkerError, match="get_context"):
            ask()
    with pytest.raises(NotAWorkerError, match="start_processes returned"):
        get_context()
    assert context.get_world_size() == 1
    assert context.get_master_rank() == 0
    assert context.get_backend() == "shm"


@METHODS
def test_an_exception_names_the_rank_and_brings_its_traceback(start_method):
    with pytest.raises(WorkerFailedError) as caught:
        light(boom, 3, start_method=start_method).wait()
    error = caught.value
    assert str(error).startswith("Rank 1 failed: ValueError: boom at 1")
    assert 'raise ValueError(f"boom at {rank}")' in str(error)
    root = error.root_cause
    assert (root.rank, root.cause, root.type_name, root.kind) == (
        1, "exception", "ValueError", "primary",
    )  # fmt: skip
    assert root.exit == phalanx.Exited(1)
    assert {f.rank: f.kind for f in error.failures[1:]} == {0: "stopped", 2: "stopped"}
    assert isinstance(error.exceptions[1], ValueError)
    assert "phalanx" not in root.traceback, "our own frames tell nobody anything"


def die_by(rank, world_size, signum):
    if rank == 0:
        print("last words", flush=True)
        os.kill(os.getpid(), signum)
    time.sleep(60)


def crash(rank, world_size):
    import ctypes

    ctypes.string_at(0)


def test_a_signal_is_named_and_the_last_words_arrive(capfd):
    with pytest.raises(WorkerFailedError, match="Rank 0 failed: .* SIGKILL") as caught:
        light(die_by, args=(signal.SIGKILL,)).wait()
    assert caught.value.root_cause.exit == phalanx.Signaled(9, "SIGKILL")
    assert "last words" in caught.value.root_cause.log_tail
    assert "[rank 0] last words\n" in capfd.readouterr().out


def test_a_crash_in_native_code_brings_a_native_stack():
    with pytest.raises(WorkerFailedError, match="SIGSEGV") as caught:
        light(crash, 1).wait()
    assert "string_at" in caught.value.root_cause.native_stack


class NeedsArguments(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raise_odd(rank, world_size, which):
    if which == "arguments":
        raise NeedsArguments(7, "because")
    if which == "unprintable":
        raise Unprintable
    if which == "local":

        class Local(Exception):
            lock = __import__("threading").Lock()

        raise Local("local class")
    if which == "huge":
        raise ValueError("x" * 100_000_000)
    if which == "surrogate":
        raise ValueError("bad \udcff text")
    if which == "closed":
        os.close(1)
        os.close(2)
        raise ValueError("after closing the streams")
    if which == "interrupt":
        raise KeyboardInterrupt
    if which == "base":
        raise GeneratorExit("base exception")
    raise AssertionError(which)


@pytest.mark.parametrize(
    ("which", "name", "text"),
    [
        ("arguments", "NeedsArguments", "7: because"),
        ("unprintable", "Unprintable", "can't be shown"),
        ("local", "Local", "local class"),
        ("huge", "ValueError", "characters left out"),
        ("surrogate", "ValueError", "bad \\udcff text"),
        ("closed", "ValueError", "after closing the streams"),
        ("interrupt", "KeyboardInterrupt", ""),
        ("base", "GeneratorExit", "base exception"),
    ],
)
def test_whatever_is_raised_arrives(which, name, text):
    with pytest.raises(WorkerFailedError) as caught:
        light(raise_odd, 1, args=(which,)).wait()
    root = caught.value.root_cause
    assert root.type_name.endswith(name)
    assert text in root.message
    assert len(root.message) < 20_000


def leave(rank, world_size, how):
    if how == "exit 3":
        sys.exit(3)
    if how == "exit text":
        sys.exit("the reason")
    if how == "exit 0":
        sys.exit(0)
    if how == "_exit 5":
        os._exit(5)
    if how == "_exit 0":
        os._exit(0)


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [("exit 3", 3, "exit"), ("exit text", 1, "exit"), ("_exit 5", 5, "exit")],
)
def test_leaving_with_a_code_is_a_failure(how, code, cause):
    with pytest.raises(WorkerFailedError) as caught:
        light(leave, 1, args=(how,)).wait()
    assert caught.value.root_cause.exit == phalanx.Exited(code)
    assert caught.value.root_cause.cause == cause


@pytest.mark.parametrize("how", ["exit 0", "_exit 0"])
def test_leaving_with_code_0_returns_none(how):
    assert light(leave, 1, args=(how,)).wait().returns == (None,)


def give_back(rank, world_size, what):
    if what == "lock":
        return __import__("threading").Lock()
    return bytes(what)


def test_a_value_that_can_not_travel_is_said_once_and_not_tried_again():
    context = light(give_back, 1, args=("lock",), max_restarts=3)
    with pytest.raises(WorkerFailedError, match="return value, a lock, can't travel"):
        context.wait()
    assert context.restart_count == 0


@pytest.mark.parametrize("size", [0, 65_000, 70_000, 300_000_000])
def test_large_values_come_back(size):
    (value,) = light(give_back, 1, args=(size,)).wait().returns
    assert len(value) == size


def count_generations(rank, world_size, path, fail_until):
    generation = get_context().restart_count
    if rank == 0 and generation < fail_until:
        Path(path, f"{generation}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if generation < fail_until:
        time.sleep(60)
    return generation


@METHODS
def test_the_group_is_started_again(tmp_path, start_method):
    context = light(
        count_generations, 2, args=(str(tmp_path), 2), max_restarts=2, start_method=start_method
    )
    result = context.wait()
    assert result.returns == (2, 2)
    assert result.restart_count == context.restart_count == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_max_restarts_is_a_limit(tmp_path):
    context = light(count_generations, 2, args=(str(tmp_path), 9), max_restarts=1)
    with pytest.raises(WorkerFailedError, match="1 of 1 were used"):
        context.wait()


def fall_once_alone(rank, world_size, path):
    marker = Path(path, f"fell-{rank}")
    if rank == 1 and not marker.exists():
        marker.touch()
        raise ValueError("once")
    time.sleep(0.3)
    return os.getpid()


def test_restart_worker_leaves_the_others_alone(tmp_path):
    context = light(fall_once_alone, 3, args=(str(tmp_path),), restart="worker", max_restarts=1)
    events = list(context.events())
    result = context.wait()
    assert result.restart_count == 1
    pids = [event.pid for event in events if isinstance(event, ev.WorkerStarted)]
    assert len(pids) == 4
    assert pids[0] == result.returns[0]
    assert pids[2] == result.returns[2]
    assert result.returns[1] == pids[3]
    (restarted,) = [event for event in events if isinstance(event, ev.WorkerRestarted)]
    assert restarted.failure.message == "once"


def sleep_long(rank, world_size):
    time.sleep(60)


def test_wait_has_a_timeout_and_the_run_goes_on():
    context = light(sleep_long)
    with pytest.raises(TimeoutError, match="still"):
        context.wait(timeout=timedelta(milliseconds=300))
    assert not context.state == "stopped"
    context.shutdown()
    assert context.state == "stopped"
    with pytest.raises(RunStoppedError, match="before rank"):
        context.wait()
    context.shutdown()
    with pytest.raises(RunStoppedError, match="start_processes again"):
        context.restart()


def restart_me(rank, world_size):
    if get_context().restart_count == 0:
        time.sleep(60)
    return get_context().restart_count


def test_restart_on_request():
    context = light(restart_me)
    for event in context.events():
        if isinstance(event, ev.GroupRan) and event.generation == 0:
            assert sorted(context.pids()) == [0, 1]
            assert context.state == "running"
            context.restart()
    assert context.wait().returns == (1, 1)


def test_leaving_a_block_waits_and_an_exception_shuts_down():
    with light(add, args=(1,)) as context:
        pass
    assert context.state == "succeeded"
    with pytest.raises(KeyError), light(sleep_long) as context:
        raise KeyError("leave")
    assert context.state == "stopped"
    with pytest.raises(WorkerFailedError), light(boom):
        pass


def poll_and_save(rank, world_size, path):
    context = get_context()
    while not context.stop_requested:
        time.sleep(0.01)
    Path(path, f"saved-{rank}").touch()
    return "saved"


def test_a_worker_that_polls_is_told_and_spared_the_signal(tmp_path):
    context = light(poll_and_save, args=(str(tmp_path),))
    wait_for(context, ev.GroupRan)
    time.sleep(0.1)
    context.shutdown(grace=20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved-0", "saved-1"]
    assert context.wait().returns == ("saved", "saved")
    assert context.state == "stopped"


def catch_sigterm(rank, world_size, path):
    def save(*_):
        Path(path, f"caught-{rank}").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    assert not get_context().stop_requested
    get_context().report(ready=True)
    time.sleep(60)


def test_a_worker_that_catches_sigterm_gets_it(tmp_path):
    context = light(catch_sigterm, args=(str(tmp_path),))
    wait_for(context, ev.WorkerReported, count=2)
    context.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["caught-0", "caught-1"]


def ignore_sigterm(rank, world_size):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    get_context().report(ready=True)
    time.sleep(60)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace():
    context = light(ignore_sigterm, 1)
    wait_for(context, ev.WorkerReported)
    context.shutdown(grace=0.2)
    exits = [event.exit for event in context.events() if isinstance(event, ev.WorkerExited)]
    assert exits == [phalanx.Signaled(9, "SIGKILL")]


def wait_for(context, kind, count=1):
    for event in context.events():
        count -= isinstance(event, kind)
        if count == 0:
            return event
    raise AssertionError(f"no {kind}")


def report_things(rank, world_size):
    context = get_context()
    context.heartbeat(step=3)
    context.report(loss=0.5, step=rank, name="a", fine=True, nothing=None)
    for bad in ([1], object()):
        try:
            context.report(bad=bad)
        except TypeError as error:
            said = str(error)
    return said


def test_reports_and_events_reach_the_launcher_and_the_log():
    heard = []
    context = light(report_things, 2, on_event=heard.append)
    assert "report(bad=…)" in context.wait().returns[0]
    events = list(context.events())
    reports = {
        event.rank: event.metrics for event in events if isinstance(event, ev.WorkerReported)
    }
    assert reports[1] == {"loss": 0.5, "step": 1, "name": "a", "fine": True, "nothing": None}
    names = [type(event).__name__ for event in events]
    assert names[0] == "RunStarted"
    assert names[-1] == "RunEnded"
    for kind in ("GenerationStarted", "WorkerStarted", "WorkerEntered", "GroupRan",
                 "WorkerReturned", "WorkerExited", "GenerationClosed"):  # fmt: skip
        assert kind in names
    assert all(event.at > 1e9 for event in events)
    until = time.monotonic() + 5
    while len(heard) < len(events) and time.monotonic() < until:
        time.sleep(0.01)
    assert heard == events
    lines = Path(context.spec.run_dir, "events.jsonl").read_bytes().splitlines()
    logged = [msgspec.json.decode(line, type=ev.Event) for line in lines]
    assert [event for event in logged if not isinstance(event, ev.TimePassed)] == events


def test_a_callback_that_raises_harms_nothing(caplog):
    def bad(event):
        raise RuntimeError("callback")

    assert light(add, args=(0,), on_event=bad).wait().returns == (0, 1)
    wait_until_logged(caplog, "on_event")


def wait_until_logged(caplog, text):
    until = time.monotonic() + 5
    while text not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_run_directory_is_private_and_tells_what_was_asked():
    context = light(add, args=(0,))
    context.wait()
    root = Path(context.spec.run_dir)
    assert root.stat().st_mode & 0o777 == 0o700
    spec = msgspec.json.decode((root / "spec.json").read_bytes())
    assert spec["world_size"] == 2
    assert spec["function"] == "add"
    assert "environment" not in str(spec)


# ── bad input: an error before anything is started ───────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"world_size": 0}, SpecError, "1 or more"),
        ({"world_size": -1}, SpecError, "1 or more"),
        ({"world_size": 2.0}, SpecError, "whole number"),
        ({"world_size": True}, SpecError, "whole number"),
        ({"num_processes_per_machine": 3}, SpecError, "multiple"),
        ({"main_process_port": -1}, SpecError, "main_process_port"),
        ({"max_restarts": -1}, SpecError, "max_restarts"),
        ({"restart": "some"}, SpecError, "restart must be one of"),
        ({"start_method": "thread"}, SpecError, "start_method must be one of"),
        ({"backend": "glo"}, SpecError, "did you mean 'gloo'"),
        ({"preload": ("no_such_module_x",)}, SpecError, "no module 'no_such_module_x'"),
        ({"preload": "torch"}, SpecError, "sequence"),
        ({"grace": -1}, SpecError, "grace"),
        ({"env": {"A": 1}}, SpecError, "env must map strings"),
        ({"env": {"A=B": "1"}}, SpecError, "environment variable"),
        ({"console": [7]}, SpecError, "no rank 7"),
        ({"console": "some"}, SpecError, "console must be"),
        ({"args": (open(os.devnull, "wb"),)}, PayloadError, "argument 'base' (index 0)"),
        (
            {"kwargs": {"lock": __import__("threading").Lock()}},
            PayloadError,
            "keyword argument 'lock'",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_at_once(options, error, words):
    arguments = {"world_size": 2, "preload": ()} | options
    with pytest.raises(error) as caught:
        start_processes(add, **arguments)
    assert words in str(caught.value)


def test_something_that_can_not_be_called_is_refused():
    with pytest.raises(SpecError, match="callable"):
        start_processes("add", 2)  # type: ignore[arg-type]


def test_a_taken_port_is_refused_and_a_free_one_is_used():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"main_process_port {port}"):
            light(add, main_process_port=port)
    context = light(read_port, 1, main_process_port=port)
    assert context.wait().returns == (str(port),)


def read_port(rank, world_size):
    return os.environ["MASTER_PORT"]


def test_directories_that_can_not_be_written_are_refused(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(RunDirectoryError, match="log_dir"):
        light(add, log_dir=blocker / "logs")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocker))
    with pytest.raises(RunDirectoryError, match="XDG_STATE_HOME"):
        light(add)


def test_a_run_directory_without_space_is_refused(monkeypatch):
    """/dev/full says what a full disk says."""
    real = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: real(Path("/dev/full"), data))
    with pytest.raises(RunDirectoryError, match="free some space"):
        light(add)

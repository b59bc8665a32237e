"""What the commands on runs say, without a run."""

from __future__ import annotations

import fcntl
import signal
import typing

import msgspec
import pytest

from phalanx.agent.recorder import Recorder
from phalanx.cli import completion, logs, main, parsers, ps, runs
from phalanx.cli import events as events_command
from phalanx.cli.usage import UsageError
from phalanx.system import paths
from phalanx.values import events as ev
from phalanx.values.failures import Exited, Failure
from phalanx.values.spec import LaunchSpec, Program

FAILURE = Failure(rank=2, cause="exception", message="loss is\nnan", type_name="ValueError")
EVENTS = (
    ev.RunStarted(run_id="r", world_size=4, function="main"),
    ev.RunEnded(state="failed", restart_count=1),
    ev.Warned(message="odd", rank=3),
    ev.GenerationStarted(generation=1),
    ev.GroupRan(generation=1),
    ev.GroupFell(generation=0, failure=FAILURE, restarting=True),
    ev.GenerationClosed(generation=0),
    ev.StoreContacted(),
    ev.WorkerStarted(rank=1, pid=77),
    ev.WorkerEntered(rank=1),
    ev.WorkerReturned(rank=1),
    ev.WorkerRaised(rank=2, failure=FAILURE),
    ev.WorkerExited(rank=2, exit=Exited(1)),
    ev.WorkerHung(rank=2, failure=FAILURE),
    ev.WorkerReported(rank=0, metrics={"loss": 0.5, "step": 3}),
    ev.StartFailed(rank=2, failure=FAILURE),
    ev.StartCancelled(rank=2),
    ev.WorkerRestarted(rank=2, failure=FAILURE),
    ev.StopRequested(grace_s=30, reason="SIGTERM"),
    ev.KillRequested(reason="phalanx kill"),
    ev.RestartRequested(grace_s=2.5),
    ev.HelperExited(failure=Failure(rank=-1, cause="helper", message="the store ended")),
)


@pytest.fixture
def run_main():
    """Call the command's entry point, which changes what SIGINT does."""
    old = signal.getsignal(signal.SIGINT)
    yield main.main
    signal.signal(signal.SIGINT, old)


def test_every_event_is_a_sentence_on_one_line():
    assert {type(event) for event in EVENTS} == set(typing.get_args(ev.Event)) - {ev.TimePassed}
    said = [events_command.describe(event) for event in EVENTS]
    assert len(set(said)) == len(said)
    for event, text in zip(EVENTS, said, strict=True):
        assert "\n" not in text
        assert type(event).__name__ not in text
    assert events_command.describe(ev.TimePassed()) is None
    assert said[1] == "run failed, 1 restart"
    assert said[5] == "generation 0 fell: rank 2 (ValueError: loss is); restarting"
    assert said[14] == "rank 0 reports loss=0.5, step=3"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (0, "0s"), (59.9, "59s"), (60, "1m00s"), (3599, "59m59s"), (7260, "2h01m"),
     (90000, "1d01h"), (8640000, "100d00h")],
)  # fmt: skip
def test_an_age_has_two_units(seconds, text):
    assert ps.age(seconds) == text


def test_a_table_has_columns():
    assert ps.table([("RUN", "STATE"), ("abcdef", "up")]) == ["RUN     STATE", "abcdef  up"]


def test_what_runs_is_said_as_it_was_typed():
    spec = LaunchSpec(run_id="r", function="main", world_size=1, num_processes_per_machine=1)
    assert ps.what_runs(spec) == "main"
    module = Program(kind="module", target="my.training", arguments=("--name", "a b"))
    program = msgspec.structs.replace(spec, program=module)
    assert ps.what_runs(program) == "-m my.training --name 'a b'"


def test_a_run_whose_files_are_missing_has_a_row(tmp_path):
    about = ps.describe(runs.KnownRun(paths=paths.RunPaths(root=tmp_path), lives=False))
    assert ps.row(about, 0.0) == (tmp_path.name, "?", "0/?", "0", "-", "lost", "-")


def test_a_status_follows_the_events():
    status = runs.Status()
    for event in (EVENTS[0], ev.GenerationStarted(generation=0), EVENTS[8], EVENTS[4]):
        status.follow(event)
    assert (status.state, status.pids, status.restart_count) == ("running", {1: 77}, 0)
    status.follow(EVENTS[5])
    status.follow(ev.WorkerExited(rank=1, exit=Exited(1)))
    assert (status.state, status.pids) == ("restarting", {})
    status.follow(EVENTS[3])
    assert (status.generation, status.restart_count) == (1, 1)
    status.follow(EVENTS[1])
    assert (status.state, status.restart_count) == ("failed", 1)


def test_a_growing_file_is_read_by_whole_lines(tmp_path):
    path = tmp_path / "log"
    reader = runs.LineReader(path)
    assert reader.read() == b""
    path.write_bytes(b"one\ntwo\nthr")
    assert (reader.read(), reader.read()) == (b"one\ntwo\n", b"")
    with path.open("ab") as file:
        file.write(b"ee")
    assert reader.read() == b""
    assert (reader.read(to_the_end=True), reader.read(to_the_end=True)) == (b"three", b"")
    long = b"x" * (3 << 20)
    with path.open("ab") as file:
        file.write(long)
    assert reader.read() == b""
    assert reader.read(to_the_end=True) == long


def test_events_of_another_version_are_left_out():
    lines = b'{"event":"Invented"}\n{"event":"GroupRan","generation":3}\nnonsense\n'
    assert runs.decode_events(lines) == [ev.GroupRan(generation=3)]


def test_lines_have_a_prefix_and_an_end():
    assert logs.prefixed(b"a\nb", b"[rank 1] ") == b"[rank 1] a\n[rank 1] b\n"
    assert logs.prefixed(b"a\n", b"") == b"a\n"


def test_all_commands_are_dispatched_helped_and_completed(run_main, capsys):
    assert set(main.COMMANDS) == set(completion.COMMANDS)
    assert run_main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in main.COMMANDS)
    for name in main.COMMANDS:
        assert run_main([name, "--help"]) == 0
        assert f"usage: phalanx {name} " in capsys.readouterr().out


def test_a_wrong_option_names_its_command(run_main, capsys):
    assert run_main(["stop", "--force"]) == 2
    assert capsys.readouterr().err.startswith("phalanx stop: ")
    with pytest.raises(UsageError, match="seconds, 0 or more"):
        parsers.parse(parsers.stop_parser, ["--grace", "soon"])


def test_fish_and_zsh_get_what_bash_gets():
    assert completion.bash_script() in completion.zsh_script()
    fish = completion.fish_script()
    assert "-l max-restarts -r" in fish
    assert "-a 'bash zsh fish'" in fish
    assert "==SUPPRESS==" not in fish


def test_who_looks_whether_a_run_lives_does_not_disturb_it(tmp_path):
    said: list[str] = []
    run = paths.RunPaths(root=tmp_path)
    recorder = Recorder(run.events, said.append)
    assert paths.is_live(run)
    recorder.record(ev.StoreContacted())
    recorder.close()
    assert not paths.is_live(run)
    assert not said
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_run_lives_on_when_its_disk_is_full(tmp_path, monkeypatch):
    said: list[str] = []
    run = paths.RunPaths(root=tmp_path)
    recorder = Recorder(run.events, said.append)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        recorder.record(ev.StoreContacted())
    recorder.record(ev.StoreContacted())
    assert len(said) == 1
    assert run.events.read_bytes() == b""
    assert paths.is_live(run)
    with run.events.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    recorder.close()

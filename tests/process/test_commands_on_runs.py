"""`phalanx ps`, `logs`, `events`, `stop` and `kill` on real runs, and whom the agent lets in."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from phalanx.system import paths
from phalanx.wire.control import Answered, KillRank, Visit, read_control
from phalanx.wire.frames import Channel, encode
from phalanx.wire.messages import CloseStore, KillRun, StopRun
from tests.conftest import SOURCE, Script, wait_until
from tests.deadlines import Pipe

NAP = """
import os, sys, time
print("hello from", os.environ["RANK"], "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
print("and to stderr", file=sys.stderr)
time.sleep(float(sys.argv[1]))
"""

FROM_A_SCRIPT = """
import time
from phalanx import start_processes
from phalanx.values import errors

def nap(rank, world_size):
    time.sleep(300)

context = start_processes(nap, 2, preload=())
try:
    context.wait()
except errors.PhalanxError as error:
    print(type(error).__name__, context.state, context.restart_count)
"""


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch) -> Path:
    """The runs of this test, which no others are among."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "phalanx" / "runs"


@pytest.fixture
def start(start_phalanx):
    """Start the command with these arguments."""
    return start_phalanx


@pytest.fixture
def command(start):
    """Run the command to its end."""

    def command(*arguments: str):
        return start(*arguments).finish()

    return command


@pytest.fixture
def nap(start, runs, tmp_path):
    """Start `phalanx run` with workers that print and sleep; return it when all of them run."""
    (tmp_path / "nap.py").write_text(NAP)

    def nap(*options: str) -> Script:
        known = set(living())
        script = start("run", "--preload", "", *options, "nap.py", "300")
        wait_until(lambda: set(living()) - known, 20, "a run that lives")
        (script.run_id,) = set(living()) - known
        wait_until(lambda: "GroupRan" in events_of(script.run_id), 20, "all workers run")
        wait_until((runs / script.run_id / "control.json").exists, 20)
        return script

    return nap


def living() -> list[str]:
    return [run.root.name for run in paths.run_directories() if paths.is_live(run)]


def events_of(run_id: str) -> list[str]:
    text = (paths.runs_root() / run_id / "events.jsonl").read_text()
    return [json.loads(line)["event"] for line in text.splitlines()]


def rows(listing: subprocess.CompletedProcess) -> list[list[str]]:
    return [line.split() for line in listing.stdout.splitlines()[1:]]


# ── ps ───────────────────────────────────────────────────────────────────────────────────


def test_ps_shows_living_runs_and_on_request_those_that_have_ended(nap, command):
    script = nap("--nproc-per-node", "2")
    listing = command("ps")
    assert listing.stdout.split()[:7] == "RUN WHAT RANKS RESTARTS AGE STATE LAUNCHER".split()
    ((run_id, *what, ranks, restarts, _, state, launcher),) = rows(listing)
    assert what == ["nap.py", "300"]
    assert (run_id, launcher) == (script.run_id, str(script.pid))
    assert (ranks, restarts, state) == ("2/2", "0", "running")
    about = json.loads(command("ps", "--json").stdout)
    assert about["lives"] is True
    assert sorted(about["pids"]) == ["0", "1"]
    assert all(psutil.pid_exists(pid) for pid in about["pids"].values())
    command("stop")
    second = nap()
    assert command("ps", "-q").stdout.split() == [second.run_id]
    everything = [json.loads(line) for line in command("ps", "-a", "--json").stdout.splitlines()]
    assert [(about["run_id"], about["state"]) for about in everything] == [
        (second.run_id, "running"),
        (script.run_id, "stopped"),
    ]


def test_a_run_whose_agent_was_killed_is_lost(nap, command, runs):
    script = nap()
    os.kill(read_control(runs / script.run_id / "control.json").agent_pid, signal.SIGKILL)
    script.finish()
    assert rows(command("ps")) == []
    assert "lost" in rows(command("ps", "--all"))[0]
    assert command("stop", script.run_id).returncode == 0
    assert command("kill", script.run_id, "--rank", "0").returncode == 1


# ── stop and kill ────────────────────────────────────────────────────────────────────────


def test_stop_waits_until_the_run_has_ended(nap, command, runs):
    script = nap("--nproc-per-node", "2")
    stopped = command("stop")
    assert (stopped.returncode, stopped.stderr) == (0, f"phalanx: run {script.run_id}: stopped\n")
    assert living() == []
    assert events_of(script.run_id)[-1] == "RunEnded"
    result = script.finish()
    assert result.returncode == 143
    assert "`phalanx stop`: the run is stopping" in result.stderr
    assert not (runs / script.run_id / "control.json").exists()
    again = command("stop", script.run_id)
    assert again.returncode == 0
    assert "has ended already" in again.stderr


def test_stop_with_a_grace_of_its_own(nap, command, runs):
    script = nap()
    assert command("stop", "--grace", "7.5", script.run_id).returncode == 0
    recorded = (runs / script.run_id / "events.jsonl").read_text()
    assert '"grace_s":7.5,"reason":"phalanx stop"' in recorded


@pytest.mark.parametrize("wish", ["stop", "kill"])
def test_a_run_of_start_processes_hears_it_too(script, command, wish):
    program = script(FROM_A_SCRIPT)
    wait_until(living, 20)
    (run_id,) = living()
    wait_until(lambda: "GroupRan" in events_of(run_id), 20)
    assert command(wish).returncode == 0
    assert program.finish().stdout.split() == ["RunStoppedError", "stopped", "0"]


def test_a_killed_rank_is_a_failure_like_any_other(nap, command):
    script = nap("--nproc-per-node", "2", "--max-restarts", "1")
    assert command("kill", "--rank", "1").returncode == 0
    wait_until(lambda: events_of(script.run_id).count("GroupRan") == 2, 20, "a second generation")
    assert json.loads(command("ps", "--json").stdout)["restart_count"] == 1
    assert command("kill", script.run_id, "--rank", "0").returncode == 0
    result = script.finish()
    assert result.returncode == 128 + signal.SIGKILL
    assert "Rank 0 failed" in result.stderr


def test_a_rank_that_there_is_not_is_named_and_nothing_happens(nap, command):
    script = nap("--nproc-per-node", "2")
    refused = command("kill", "--rank", "2")
    assert refused.returncode == 1
    assert refused.stderr == "phalanx kill: there is no rank 2 among 2: they are 0–1\n"
    assert living() == [script.run_id]


def test_a_killed_run_has_ended_when_the_command_returns(nap, command):
    script = nap("--nproc-per-node", "2")
    assert command("kill").returncode == 0
    assert living() == []
    assert script.finish().returncode != 0


def test_a_run_may_be_meant_by_the_beginning_of_its_id(nap, command):
    first, second = nap(), nap()
    assert "which run? There live" in command("stop").stderr
    pairs = enumerate(zip(first.run_id, second.run_id, strict=True))
    same = first.run_id[: next(number for number, (one, two) in pairs if one != two)]
    both = command("stop", same)
    assert both.returncode == 2
    assert first.run_id in both.stderr
    assert second.run_id in both.stderr
    assert command("stop", first.run_id[: len(same) + 1]).returncode == 0
    assert living() == [second.run_id]
    typo = command("events", f"x{second.run_id}")
    assert typo.returncode == 2
    assert f"did you mean {second.run_id}?" in typo.stderr
    assert command("stop").returncode == 0, "one is left, so it need not be named"
    none = command("logs")
    assert none.returncode == 2
    assert f"the last one was {second.run_id}" in none.stderr


# ── logs and events ──────────────────────────────────────────────────────────────────────


def test_logs_are_those_of_the_latest_generation_and_of_the_wanted_ranks(nap, command):
    script = nap("--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", "logs")
    command("kill", "--rank", "1")
    wait_until(lambda: command("logs").stdout.count("attempt 1") == 2, 20)
    wait_until(lambda: command("logs").stdout.count("stderr") == 2, 20)
    assert sorted(command("logs").stdout.splitlines()) == [
        "[rank 0] and to stderr", "[rank 0] hello from 0 attempt 1",
        "[rank 1] and to stderr", "[rank 1] hello from 1 attempt 1",
    ]  # fmt: skip
    old = command("logs", "--generation", "0", "--rank", "1", script.run_id)
    assert old.stdout.startswith("[rank 1] hello from 1 attempt 0\n")
    early = command("logs", "--generation", "5")
    assert early.returncode == 2
    assert "the latest is 1" in early.stderr
    assert "no rank 9 among 2" in command("logs", "--rank", "9").stderr


def test_logs_can_be_followed_over_a_restart_to_the_end(nap, start, command):
    nap("--nproc-per-node", "2", "--max-restarts", "1", "--redirects", "3")
    follower = start("logs", "-f", "--rank", "0")
    follower.wait_for_line("hello from 0 attempt 0")
    command("kill", "--rank", "1")
    follower.wait_for_line("hello from 0 attempt 1")
    command("stop")
    assert follower.finish().returncode == 0


def test_logs_of_ranks_that_only_print_to_the_console_say_how_to_get_files(nap, command):
    nap("--nproc-per-node", "2")
    nothing = command("logs")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "ranks 0, 1 printed to the console only" in nothing.stderr
    assert "--log-dir" in nothing.stderr


def test_who_stops_waiting_gets_no_traceback(nap, start):
    nap("--log-dir", "logs")
    follower = start("logs", "-f")
    follower.wait_for_line("hello")
    follower.process.send_signal(signal.SIGINT)
    result = follower.finish()
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")


def test_who_stops_reading_gets_no_traceback(nap, start, command, runs):
    script = nap()
    follower = start("events", "-f")
    follower.wait_for_line("started")
    follower.close_stdout()
    command("stop")
    assert follower.process.wait(20) == 0
    assert follower.err.rest() == ""
    assert script.finish().returncode == 143


def test_events_are_readable_and_can_be_followed(nap, start, command, runs):
    script = nap()
    follower, raw = start("events", "-f"), start("events", "-f", "--json")
    follower.wait_for_line("generation 0: all ranks run")
    raw_lines = raw.wait_for_line("RunStarted")
    command("stop")
    assert follower.finish().stdout.splitlines()[-1].endswith("run stopped, 0 restarts")
    kept = (runs / script.run_id / "events.jsonl").read_text()
    assert raw_lines + raw.out.rest() == kept
    assert command("events", script.run_id).stdout.splitlines()[0].endswith("nap.py, 1 rank")


# ── whom the agent lets in ───────────────────────────────────────────────────────────────


@pytest.fixture
def visit(nap, runs):
    """A run, and what connects to its agent."""
    script = nap("--nproc-per-node", "2")
    address = read_control(runs / script.run_id / "control.json").address
    sockets: list[socket.socket] = []

    def connect() -> socket.socket:
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].settimeout(20)
        sockets[-1].connect(f"\0{address}")
        return sockets[-1]

    yield script, connect
    for one in sockets:
        one.close()


def test_the_address_is_for_the_owner_only(visit, runs):
    script, _ = visit
    assert (runs / script.run_id / "control.json").stat().st_mode & 0o777 == 0o600
    assert (runs / script.run_id).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "noise",
    [b"", encode(Visit()), encode(Visit()) + b"GET / HTTP/1.1\r\n\r\n",
     encode(Visit()) + struct.pack("<II", 2**31, 0), encode(Visit())[:5],
     encode(Visit()) + encode(CloseStore(run_id="x")), encode(KillRank(run_id="x", rank=0))],
    ids=["nothing", "only a visit", "text", "too long", "half a frame", "a launcher's message",
         "no visit before"],
)  # fmt: skip
def test_a_visitor_that_goes_or_talks_nonsense_ends_nothing(visit, command, noise):
    script, connect = visit
    stranger = connect()
    stranger.sendall(noise)
    stranger.shutdown(socket.SHUT_WR)
    assert stranger.recv(100) == b"", "it is hung up on"
    channel: Channel[Answered] = Channel(connect(), Answered)
    channel.send(Visit())
    channel.send(StopRun(run_id="another"))
    assert channel.receive()[0].problem == "run another has ended"
    channel.close()
    assert json.loads(command("ps", "--json").stdout)["state"] == "running"
    assert living() == [script.run_id]


def test_descriptors_of_a_visitor_are_not_kept(visit, runs):
    script, connect = visit
    agent = psutil.Process(read_control(runs / script.run_id / "control.json").agent_pid)
    before = agent.num_fds()
    with open(os.devnull) as null:
        channel: Channel[Answered] = Channel(connect(), Answered)
        channel.send(Visit(), [null.fileno()] * 4)
        channel.send(KillRun(run_id="another"), [null.fileno()] * 4)
        channel.receive()
    assert agent.num_fds() <= before + 1
    assert script.process.poll() is None


def test_another_user_is_hung_up_on(visit, runs):
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    script, _ = visit
    address = read_control(runs / script.run_id / "control.json").address
    probe = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        f"s.connect({chr(0) + address!r}); s.settimeout(10); sys.exit(len(s.recv(10)))"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0
    assert living() == [script.run_id]


def test_somebody_else_at_a_stale_address_is_not_talked_to(visit, command, runs):
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    script, _ = visit
    name = f"phalanx-stale-{os.getpid()}"
    taken = (
        "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        f"s.bind('\\0{name}'); s.listen(); print('up', flush=True); "
        "c = s.accept()[0]; print(len(c.recv(100)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", taken], stdout=subprocess.PIPE, text=True
    ) as other:
        heard = Pipe(other.stdout, text=True)
        assert heard.line() == "up\n"
        path = runs / script.run_id / "control.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"address": name}))
        refused = command("stop")
        assert refused.returncode == 1
        assert "another user listens there" in refused.stderr
        assert heard.line() == "0\n"
    assert living() == [script.run_id]


# ── completion ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def complete(tmp_path):
    """Ask a real bash what it would offer."""

    def complete(*words: str) -> list[str]:
        asked = " ".join(f"'{word}'" for word in words)
        script = (
            f'phalanx() {{ {sys.executable} -m phalanx "$@"; }}\n'
            'eval "$(phalanx completion bash)"\n'
            f"COMP_WORDS=(phalanx {asked}); COMP_CWORD={len(words)}\n"
            'set -u; _phalanx; printf "%s\\n" ${COMPREPLY[@]+"${COMPREPLY[@]}"}\n'
        )
        result = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60,
            check=True, env={**os.environ, "PYTHONPATH": SOURCE},
        )  # fmt: skip
        assert result.stderr == ""
        return result.stdout.split()

    return complete


def test_bash_completes_commands_options_and_runs(nap, command, complete):
    script = nap()
    assert complete("ev") == ["events"]
    assert complete("run", "--nproc") == ["--nproc-per-node"]
    assert complete("run", "--restart", "") == ["group", "worker"]
    assert complete("run", "train") == [], "files are completed by default"
    assert complete("kill", "--rank", "") == []
    assert complete("kill", "") == [script.run_id]
    command("stop")
    assert complete("kill", "") == []
    assert complete("logs", script.run_id[:4]) == [script.run_id]

"""What goes wrong under torchrun 2.13, or was reported against it: here it must not.

Others of that list stand where their subject is: a dead launcher or agent in `test_orphans`, nohup
and signals in `test_signals` and `test_run_command`, formats in `test_cli`, hangs in `test_hangs`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import Script, tagged_processes, wait_until

LIGHT = ("--preload", "")


@pytest.fixture
def start(start_phalanx):
    """Start `phalanx run` with a script of this source."""

    def start(source: str, *options: str, **env: str) -> Script:
        return start_phalanx("run", "--no-fold", *options, "train.py", source=source, env=env)

    return start


# ── ends ─────────────────────────────────────────────────────────────────────────────────

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("WORKING", os.environ["RANK"])
time.sleep(1000)
"""


def test_a_third_sigterm_leaves_no_orphans(start):
    started = start(STUBBORN, *LIGHT, "--nproc-per-node=2", "--rdzv-id=thrice", "--grace=2")
    started.wait_for_line("WORKING")
    started.wait_for_line("WORKING")
    for _ in range(3):
        os.kill(started.pid, signal.SIGTERM)
    assert started.finish(30).returncode in (143, -signal.SIGTERM)
    wait_until(lambda: not tagged_processes("thrice"), 10)


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_worker_has_started_ends_with_it(start, tmp_path, code):
    """Also in a session of its own, and however the worker ends."""
    source = f"""
import os, subprocess, sys
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
rank = os.environ["RANK"]  # the first to fail has its peer ended, perhaps while that one writes
with open("new-" + rank, "w") as file:
    file.write(str(child.pid))
os.rename("new-" + rank, "pid-" + rank)
sys.exit({code})
"""
    done = start(source, *LIGHT, "--nproc-per-node=2").finish()
    assert done.returncode == code
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    assert pids
    wait_until(lambda: not any(_runs_sleep(pid) for pid in pids), 10)


def _runs_sleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")
    except OSError:
        return False


def test_a_run_leaves_no_temporary_files(start, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    source = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo'); dist.barrier(); dist.destroy_process_group()\n"
    )
    done = start(source, "--nproc-per-node=2", "--redirects=3", TMPDIR=str(temporary)).finish()
    assert (done.returncode, done.stderr) == (0, "")
    assert list(temporary.iterdir()) == []


def test_the_store_lives_until_the_last_rank_has_left(start):
    """Rank 0, which hosts the store under plain torch, is gone while others still use it."""
    source = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
dist.barrier()
if dist.get_rank():
    time.sleep(0.3)
    store.set(f"late-{dist.get_rank()}", "x")
    assert store.get(f"late-{dist.get_rank()}") == b"x"
os._exit(0)
"""
    for _ in range(3):
        done = start(source, "--nproc-per-node=3").finish()
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ── who is to blame ──────────────────────────────────────────────────────────────────────


def test_the_first_of_two_that_die_together_is_blamed(start, tmp_path):
    source = """
import os, pathlib, signal, time
if os.environ["RANK"] == "1":
    while not os.path.exists("here"):
        time.sleep(0.001)
    pathlib.Path("dying").touch()
    os.kill(os.getpid(), signal.SIGSEGV)
pathlib.Path("here").touch()
while not os.path.exists("dying"):
    time.sleep(0.001)
time.sleep(0.03)
os._exit(77)
"""
    for _ in range(5):
        for name in ("here", "dying"):
            (tmp_path / name).unlink(missing_ok=True)
        done = start(source, *LIGHT, "--nproc-per-node=2").finish()
        assert done.returncode == 128 + signal.SIGSEGV, done.stderr
        assert "Rank 1 failed" in done.stderr


def test_a_plain_exception_is_told_whole(start):
    source = "import os\nif os.environ['RANK'] == '2': 1 / 0\nimport time; time.sleep(100)"
    done = start(source, *LIGHT, "--nproc-per-node=3").finish()
    assert done.returncode == 1
    report = done.stderr.partition("phalanx: ")[2]
    assert report.startswith("Rank 2 failed: ZeroDivisionError: division by zero")
    assert 'train.py", line 2' in report


def test_a_torn_error_file_hides_nothing(start):
    source = """
import os
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write('{"message": {"mess')
os._exit(5)
"""
    done = start(source, *LIGHT, "--nproc-per-node=2").finish()
    assert done.returncode == 5
    assert "Traceback" not in done.stderr


# ── starts ───────────────────────────────────────────────────────────────────────────────


def test_a_group_comes_back_five_times(start):
    """No key of an earlier generation misleads a later one."""
    source = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "5" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(tensor)
print("came through", int(tensor))
"""
    done = start(source, "--nproc-per-node=2", "--max-restarts=5").finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("came through 4") == 2


def test_another_local_address(start):
    source = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("met at", os.environ["MASTER_ADDR"])
"""
    done = start(source, "--nproc-per-node=2", "--local-addr=127.0.0.2").finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("met at 127.0.0.2") == 2


# ── output ───────────────────────────────────────────────────────────────────────────────


def test_a_line_of_ten_megabytes(start):
    source = "import sys\nsys.stdout.write('x' * 10_000_000)\nsys.stdout.flush()\n"
    done = start(source, *LIGHT, "--nproc-per-node=2").finish()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert sum(line.count("x") for line in lines) == 20_000_000
    assert {line.strip("x") for line in lines} == {"[rank 0] ", "[rank 1] "}


def test_unfinished_lines_are_not_mixed(start, tmp_path):
    """A line that has begun waits for its end, whatever other ranks print meanwhile."""
    source = """
import os, sys, time, pathlib
if os.environ["RANK"] == "0":
    sys.stdout.write("begun, "); sys.stdout.flush()
    pathlib.Path("begun").touch()
    while not os.path.exists("said"):
        time.sleep(0.01)
    print("ended")
else:
    while not os.path.exists("begun"):
        time.sleep(0.01)
    print("in between")
    time.sleep(0.2)
    pathlib.Path("said").touch()
"""
    done = start(source, *LIGHT, "--nproc-per-node=2").finish()
    assert done.stdout.splitlines() == ["[rank 1] in between", "[rank 0] begun, ended"]


def test_a_worker_that_closes_its_output_goes_on(start, tmp_path):
    source = "import os, time\nos.close(1); os.close(2); time.sleep(0.3)\nopen('done', 'w').close()"
    done = start(source, *LIGHT).finish()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "done").exists()


def test_characters_that_the_locale_does_not_know(start):
    source = "import sys\nsys.stdout.buffer.write('größer →\\n'.encode())\nsys.stdout.flush()\n" * 2
    done = start(
        source, *LIGHT, "--nproc-per-node=2", LANG="C", LC_ALL="C", PYTHONUTF8="0"
    ).finish()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("größer →") == 4

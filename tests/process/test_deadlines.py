"""A test that hangs fails alone, says why, and leaves nothing, whatever ends pytest."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import Script, end_scripts, tagged_processes, wait_until
from tests.deadlines import SOURCE

ROOT = str(Path(__file__).parents[2])
HANGING = """
import sys, time
from pathlib import Path
import pytest
from tests.conftest import Script

RUN = '''
import os, time
from phalanx import start_processes
def stuck_here(rank, world_size):
    print("WORKING", "tag", flush=True)
    time.sleep(1000)
start_processes(stuck_here, 2, preload=()).wait()
'''

def test_that_hangs(tmp_path):
    (tmp_path / "run.py").write_text(RUN.replace("tag", sys.argv[-1]))
    script = Script([sys.executable, "run.py", sys.argv[-1]], tmp_path)
    script.wait_for_line("WORKING")
    print("HANGING", file=sys.__stderr__, flush=True)
    {how}

def test_after_it():
    pass
"""


@pytest.fixture
def inner_pytest(tmp_path):
    """Run pytest on a test that hangs; return it with what its processes are known by."""
    scripts: list[Script] = []

    def start(how: str, *options: str) -> tuple[Script, str]:
        tag = f"inner-{os.getpid()}-{tmp_path.name}"
        (tmp_path / "test_it.py").write_text(HANGING.replace("{how}", how))
        argv = [sys.executable, "-m", "pytest", "-p", "tests.deadlines", "-p", "no:cacheprovider",
                "-c", os.devnull, "--rootdir", ".", "test_it.py", *options, "--junit-prefix", tag]  # fmt: skip
        env = {"PYTHONPATH": f"{SOURCE}:{ROOT}", "XDG_STATE_HOME": str(tmp_path / "state")}
        scripts.append(Script(argv, tmp_path, env=env))
        return scripts[-1], tag

    yield start
    end_scripts(scripts)


def test_a_hanging_test_fails_alone_with_its_output_and_stacks(inner_pytest):
    started, tag = inner_pytest("script.out.rest(1000)", "--timeout=4")
    done = started.finish(60)
    assert "1 failed, 1 passed" in done.stdout
    assert "test_that_hangs took longer than 4.0 s" in done.stdout
    assert f"WORKING {tag}" in done.stdout.partition("so far ───")[2]
    assert "in stuck_here" in done.stdout
    assert not tagged_processes(tag)


def test_native_code_that_begins_anew_is_freed_by_the_end_of_whom_it_waits_for(inner_pytest):
    """Such code lets no handler run: it must come back first."""
    started, tag = inner_pytest("import os; os.system('sleep 1000')", "--timeout=4")
    done = started.finish(60)
    assert "1 failed, 1 passed" in done.stdout
    assert not tagged_processes(tag)


def test_nothing_outlives_a_pytest_that_is_killed(inner_pytest):
    started, tag = inner_pytest("time.sleep(1000)", "-s")
    while "HANGING" not in started.err.line():
        assert not started.err.ended
    assert len(tagged_processes(tag)) > 1
    os.kill(started.pid, signal.SIGKILL)
    wait_until(lambda: not tagged_processes(tag), 20)
    started.finish()

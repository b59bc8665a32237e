"""A module beside the script, or on PYTHONPATH, that workers would otherwise have preloaded."""

from __future__ import annotations

import os

import pytest

from tests.conftest import SOURCE

PROGRAM = """
import {name} as module
{body}
"""
FOR_RUN = "print('took', module.Z, __name__)"
FOR_FUNCTION = """
from phalanx import start_processes

def work(rank, world_size):
    import {name} as own
    return own.Z

if __name__ == "__main__":
    print(start_processes(work, 2, preload=("filelock",)).wait(60).returns)
"""


@pytest.fixture
def place(tmp_path):
    def put(name, folder="."):
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("Z = 'mine'\n")
        return str(path)

    return put


@pytest.mark.parametrize("name", ["logging.py", "queue.py", "sympy/__init__.py"])
def test_the_command_starts_a_real_python(start_phalanx, place, tmp_path, name):
    path = place(name)
    module = name.partition("/")[0].removesuffix(".py")
    (tmp_path / "train.py").write_text(PROGRAM.format(name=module, body=FOR_RUN))
    done = start_phalanx("run", "--nproc-per-node", "2", "--preload", module, "train.py").finish()
    assert done.returncode == 0, done.stderr
    assert "took mine __main__" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "stands before" in line]
    assert len(lines) == 1, done.stderr
    assert path.removesuffix("/__init__.py") in lines[0]
    assert "--start-method spawn" in lines[0]


def test_a_folder_of_pythonpath_shadows_for_functions(script, place, tmp_path):
    path = place("filelock.py", "elsewhere")
    place("queue.py", "elsewhere")  # the agent and its fork server must live with it
    environ = {"PYTHONPATH": os.pathsep.join([SOURCE, str(tmp_path / "elsewhere")])}
    done = script(FOR_FUNCTION.format(name="queue"), env=environ).finish()
    assert done.returncode == 0, done.stderr
    assert "('mine', 'mine')" in done.stdout
    assert done.stderr.count("stands before") == 1, (path, done.stderr)


def test_a_folder_without_init_shadows_nothing(start_phalanx, tmp_path):
    (tmp_path / "logging").mkdir()
    (tmp_path / "train.py").write_text("import logging; print(logging.INFO)")
    done = start_phalanx("run", "--preload", "json", "train.py").finish()
    assert done.stdout == "20\n"
    assert "stands before" not in done.stderr

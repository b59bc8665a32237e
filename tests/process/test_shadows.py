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
import sys
from phalanx import start_processes

def work(rank, world_size):
    import colorsys, uuid
    return getattr(colorsys, "Z", "theirs"), getattr(uuid, "Z", "theirs")

for start_method in ("forkserver", "forkserver", "spawn"):
    context = start_processes(work, 2, preload=("colorsys",), start_method=start_method)
    print(context.wait(60).returns)
    if "elsewhere" not in sys.path[0]:
        sys.path.insert(0, "elsewhere")  # what workers are forked from has imported the others
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


def test_a_function_gets_them_too(script, place):
    path = place("colorsys.py", "elsewhere")
    place("uuid.py", "elsewhere")  # Phalanx imports it in each worker
    done = script(FOR_FUNCTION).finish()
    assert done.returncode == 0, done.stderr
    theirs, mine = ("theirs", "theirs"), ("mine", "mine")
    assert done.stdout.splitlines() == [str((what, what)) for what in (theirs, mine, mine)]
    lines = [line for line in done.stderr.splitlines() if "stands before" in line]
    assert len(lines) == 1, done.stderr
    assert 'start_method="spawn"' in lines[0]
    assert path.rpartition("/")[0] in lines[0]


def test_phalanx_itself_does_not_take_a_module_on_pythonpath(script, place, tmp_path):
    place("asyncio.py", "elsewhere")
    path = os.pathsep.join([SOURCE, str(tmp_path / "elsewhere")])
    source = """
from phalanx import start_processes
def work(rank, world_size):
    import asyncio
    return asyncio.Z
print(start_processes(work, 1, preload=()).wait(60).returns)
"""
    done = script(source, env={"PYTHONPATH": path}).finish()
    assert done.stdout == "('mine',)\n", done.stderr


def test_a_folder_without_init_shadows_nothing(start_phalanx, tmp_path):
    (tmp_path / "logging").mkdir()
    (tmp_path / "train.py").write_text("import logging; print(logging.INFO)")
    done = start_phalanx("run", "--preload", "json", "train.py").finish()
    assert done.stdout == "20\n"
    assert "stands before" not in done.stderr

"""The same script, without a guard, from everywhere Python code comes from."""

from __future__ import annotations

import subprocess
import sys

import pytest

PLAIN = """
from phalanx import start_processes

def main_worker(rank, world_size):
    print("rank", context.get_rank(), "of", context.get_world_size(), flush=True)
    context.barrier()

context = start_processes(
    main_worker, world_size=4, num_processes_per_machine=1, main_process_port=0
)
"""


def said_by_all(out: str) -> bool:
    lines = sorted(line for line in out.splitlines() if "of 4" in line)
    return lines == [f"[rank {rank}] rank {rank} of 4" for rank in range(4)]


def test_a_script_without_a_guard(run_script):
    done = run_script(PLAIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert said_by_all(done.stdout)


def test_standard_input(script, tmp_path):
    done = subprocess.run(
        [sys.executable, "-"], input=PLAIN, text=True, capture_output=True, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert said_by_all(done.stdout)


def test_dash_c(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], text=True, capture_output=True, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert said_by_all(done.stdout)


def test_dash_m(tmp_path):
    (tmp_path / "mod.py").write_text(PLAIN)
    done = subprocess.run(
        [sys.executable, "-m", "mod"], text=True, capture_output=True, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert said_by_all(done.stdout)


def test_a_repl_waits_when_asked_and_shuts_down_when_left(tmp_path):
    session = (
        PLAIN.replace("\n\ncontext", "\n\n\ncontext")
        + """
result = context.wait()
print("returns", result.returns)
def forever(rank, world_size):
    import time
    time.sleep(1000)

context = start_processes(forever, 2)
"""
    )
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=session, text=True, capture_output=True, timeout=60,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert said_by_all(done.stdout)
    assert "returns (None, None, None, None)" in done.stdout


def test_a_notebook(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    second = PLAIN.rsplit("\n\n", maxsplit=1)[-1]
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(PLAIN),
            nbformat.v4.new_code_cell("print(context.wait().returns)"),
            nbformat.v4.new_code_cell(second + "\nprint(context.wait().returns)"),
            nbformat.v4.new_code_cell(
                "def fail(rank, world_size):\n    raise ValueError('in a notebook')\n"
                "try:\n    start_processes(fail, 2).wait()\n"
                "except Exception as error:\n    print(str(error).splitlines()[0])"
            ),
            nbformat.v4.new_code_cell(
                "start_processes(main_worker, 2, preload=('torch',)) and None"
            ),
        ]
    )
    client = nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    text = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert said_by_all(text[0] + text[1])
    assert "(None, None, None, None)" in text[1]
    assert said_by_all(text[2]), "the cell that ran again uses the new context"
    assert "Rank" in text[3]
    assert "ValueError: in a notebook" in text[3]


CLASSES = """
import pickle
from phalanx import start_processes, get_context

class Point:
    def __init__(self, x): self.x = x

class Sub(Point):
    def double(self): return Sub(super().__class__ is not None and self.x * 2)

SCALE = 3
UNPICKLABLE = open(__file__)          # not reached, so it does not matter

def helper(x): return x * SCALE
def main(rank, world_size, start):
    again = pickle.loads(pickle.dumps(start))      # plain pickle finds the class in __main__
    assert type(again) is Sub, type(again)
    assert __name__ == "__main__"
    return Sub(helper(again.double().x + rank))

result = start_processes(main, 2, args=(Sub(5),), preload=()).wait()
assert all(type(p) is Sub for p in result.returns), result
print([p.x for p in result.returns])
add = lambda rank, world_size: rank + SCALE
print(start_processes(add, 2, preload=()).wait().returns)
"""


def test_classes_of_the_script_pickle_both_ways(run_script):
    done = run_script(CLASSES)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["[30, 33]", "(3, 4)"]


def test_a_failed_run_fails_the_script_that_did_not_wait(run_script):
    done = run_script(
        "from phalanx import start_processes\n"
        "def f(rank, world_size):\n    if rank == 1: raise ValueError('late')\n"
        "start_processes(f, 2, preload=())\nprint('end of script', flush=True)\n"
    )
    assert done.returncode == 1
    assert done.stdout == "end of script\n"
    assert "WorkerFailedError: Rank 1 failed: ValueError: late" in done.stderr


def test_after_an_uncaught_exception_the_workers_are_stopped(run_script):
    done = run_script(
        "import time\nfrom phalanx import start_processes\n"
        "def f(rank, world_size):\n    time.sleep(1000)\n"
        "start_processes(f, 2, preload=())\nraise KeyError('script')\n",
        timeout=20,
    )
    assert done.returncode == 1
    assert "KeyError: 'script'" in done.stderr


def test_sys_exit_waits_and_keeps_its_code(run_script):
    done = run_script(
        "import sys, time\nfrom phalanx import start_processes\n"
        "def f(rank, world_size):\n    time.sleep(0.3); print('done', flush=True)\n"
        "start_processes(f, 1, preload=())\nsys.exit(7)\n"
    )
    assert (done.returncode, done.stdout) == (7, "done\n")


def test_a_fork_of_the_launcher_is_inert(run_script):
    done = run_script(
        "import os, sys, time\nfrom phalanx import start_processes\n"
        "def f(rank, world_size):\n    time.sleep(0.5); return rank\n"
        "context = start_processes(f, 2, preload=())\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    context.shutdown()\n    sys.exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "print(context.wait().returns)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(0, 1)\n", "")


def test_several_runs_at_once_share_one_agent(run_script):
    done = run_script(
        "import psutil\nfrom phalanx import start_processes\n"
        "def f(rank, world_size, base):\n    import time; time.sleep(0.2); return base + rank\n"
        "contexts = [start_processes(f, 2, args=(10 * i,), preload=()) for i in range(3)]\n"
        "print([c.wait().returns for c in contexts])\n"
        "print(len(psutil.Process().children()), len(psutil.Process().children(recursive=True)))\n"
    )
    assert done.stdout.splitlines() == ["[(0, 1), (10, 11), (20, 21)]", "1 2"], done.stderr


def test_a_missing_argument_of_the_function_is_an_exception_of_the_workers(run_script):
    done = run_script(
        "from phalanx import start_processes\n"
        "def f(rank): pass\n"
        "start_processes(f, 2, preload=()).wait()\n"
    )
    assert done.returncode == 1
    assert "TypeError: f() takes 1 positional argument but 2 were given" in done.stderr

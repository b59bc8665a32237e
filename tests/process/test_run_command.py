"""`phalanx run` from outside: scripts that run as under python, and exit codes that tell."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from phalanx.system import kernel
from tests.conftest import SOURCE, tagged_processes, wait_until

LIGHT = ("--preload", "")
"""Most of what is tested here does not need torch."""
METHODS = pytest.mark.parametrize(
    "how", [LIGHT, ("--start-method", "spawn")], ids=["fork", "spawn"]
)


@pytest.fixture
def start(start_phalanx):
    """Start `phalanx run` with these arguments.

    Unless asked for, equal lines are not folded: most tests count them.
    """

    def start(*arguments: str, module="phalanx", fold=False, **options):
        words = ("run",) if module == "phalanx" else ()
        words = words if fold else (*words, "--no-fold")
        return start_phalanx(*words, *arguments, module=module, **options)

    return start


@pytest.fixture
def run(start):
    """Run `phalanx run` to its end."""

    def run(*arguments: str, timeout: float = 60, **options):
        return start(*arguments, **options).finish(timeout)

    return run


@pytest.fixture
def python(tmp_path):
    """Run Python itself, to compare."""

    def python(*arguments: str, **options):
        return subprocess.run(
            [sys.executable, *map(str, arguments)], cwd=options.pop("cwd", tmp_path), text=True,
            capture_output=True, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": SOURCE}, **options,
        )  # fmt: skip

    return python


@pytest.fixture
def write(tmp_path):
    def write(source: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return name

    return write


# ── as under python ──────────────────────────────────────────────────────────────────────

WHO_AM_I = """
import sys, os, __main__
print(sorted(n for n in globals()))
for name in ("__name__", "__file__", "__cached__", "__package__", "__doc__", "__annotations__"):
    print(name, repr(globals()[name]))
print(__spec__ and (__spec__.name, __spec__.origin), type(__loader__).__name__, __builtins__)
print(sys.argv, sys.path, os.getcwd())
print(__main__.__dict__ is globals(), sys.modules["__main__"] is __main__)
print(sys.flags, sys.warnoptions)
"""


@METHODS
@pytest.mark.parametrize(
    "what",
    [
        ("script.py", "a", "--b", "c d", "--nproc-per-node", "7", "--", "-m"),
        ("sub/deep.py",),
        ("./link.py", "x"),
        ("-m", "package", "--flag"),
        ("-m", "package.module"),
        ("-m", "script"),
        ("folder", "y"),
        ("archive.zip", "z"),
        ("compiled.pyc", "--help"),
    ],
    ids=lambda what: what[-1] if what[0] == "-m" else what[0],
)
def test_a_script_finds_what_it_finds_under_python(run, python, write, tmp_path, what, how):
    for name in (
        "script.py",
        "sub/deep.py",
        "package/__main__.py",
        "package/module.py",
        "folder/__main__.py",
    ):
        write(WHO_AM_I, name)
    write("", "package/__init__.py")
    (tmp_path / "link.py").symlink_to("sub/deep.py")
    if what[0] == "archive.zip":
        python("-m", "zipfile", "-c", "archive.zip", "folder/__main__.py", cwd=tmp_path)
        python(
            "-c",
            "import zipfile; zipfile.ZipFile('archive.zip', 'w').write('folder/__main__.py', '__main__.py')",
        )
    if what[0] == "compiled.pyc":
        python("-c", "import py_compile; py_compile.compile('script.py', 'compiled.pyc')")
    expected = python(*what)
    assert expected.returncode == 0, expected
    done = run(*how, *what)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected.stdout


PICKLES = """
import pickle, multiprocessing as mp, sys

class Point:
    def __init__(self, x): self.x = x

def double(point):
    return Point(point.x * 2)

def main():
    again = pickle.loads(pickle.dumps(Point(3)))
    assert type(again) is Point
    with mp.get_context(sys.argv[1]).Pool(1) as pool:
        print(type(pool.apply(double, (again,))) is Point, pool.apply(double, (again,)).x)

if __name__ == "__main__":
    main()
"""


@METHODS
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing_inside_a_script(run, write, method, how):
    done = run(*how, write(PICKLES), method)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 6\n", "")


def test_multiprocessing_inside_a_module(run, write):
    write("", "package/__init__.py")
    write(PICKLES, "package/module.py")
    done = run(*LIGHT, "-m", "package.module", "spawn")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 6\n", "")


LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.tensor(i * i)

if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    print([batch.tolist() for batch in loader], flush=True)
"""


def test_a_data_loader_with_spawned_workers(run, write):
    done = run(write(LOADER))
    assert (done.returncode, done.stdout) == (0, "[[0, 1], [4, 9]]\n"), done


@METHODS
def test_what_the_interpreter_does_at_its_end(run, python, write, how):
    name = write(
        "import atexit, sys, threading, time, tempfile, gzip\n"
        "atexit.register(print, 'at exit')\n"
        "class Last:\n    def __del__(self): print('deleted')\n"
        "last = Last()\n"
        "unclosed = open('unclosed.txt', 'w'); unclosed.write('whole')\n"
        "packed = gzip.open('packed.gz', 'wt'); packed.write('whole')\n"
        "temporary = tempfile.NamedTemporaryFile(dir='.', prefix='phalanx-test')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
    )
    done = run(*how, name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "thread\nat exit\ndeleted\n", "")
    said = python(
        "-c",
        "import gzip, os; print(open('unclosed.txt').read(), gzip.open('packed.gz', 'rt').read(),"
        " [n for n in os.listdir('.') if n.startswith('phalanx-test')])",
    )
    assert said.stdout == "whole whole []\n"


@METHODS
def test_a_script_has_ended_when_its_threads_have(run, write, how):
    name = write(
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(1), print('thread'))).start()\n"
    )
    done = run(*how, "--grace", "0.1", name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "thread\n", "")


@METHODS
@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(3)", "raise ValueError('child')"])
def test_a_script_that_forks(run, write, how, end):
    """What a forked child runs into is its own end, not the worker's."""
    name = write(
        "import os, sys\n"
        "pid = os.fork()\n"
        f"if pid == 0:\n    print('child', flush=True); {end}\n"
        "else:\n    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
    )
    done = run(*how, name)
    code = {"": 0, "sys.exit()": 0, "sys.exit(3)": 3}.get(end, 1)
    assert (done.returncode, done.stdout) == (0, f"child\n{code}\n"), done
    assert ("ValueError: child" in done.stderr) == (code == 1)


@METHODS
@pytest.mark.parametrize("binding", ["node", "socket", "exclusive", "core-complex"])
def test_workers_are_bound_to_cpus_without_cuda(run, write, how, binding):
    name = write("import os; print(sorted(os.sched_getaffinity(0)))")
    done = run(*how, "--nproc-per-node=2", "--numa-binding", binding, name)
    assert (done.returncode, done.stderr) == (0, "")
    for line in done.stdout.splitlines():
        cpus = set(json.loads(line.partition("] ")[2]))
        assert cpus
        assert cpus <= os.sched_getaffinity(0)


def test_each_worker_sees_its_own_gpu_as_the_first(run, write):
    name = write(
        "import os, phalanx\n"
        "print(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'],"
        " phalanx.get_context().get_local_rank())"
    )
    done = run(
        *LIGHT, "--nproc-per-node=2", "--virtual-local-rank", name,
        env={"CUDA_VISIBLE_DEVICES": "5,GPU-7"},
    )  # fmt: skip
    assert sorted_lines(done.stdout) == ["[rank 0] 0 5 0", "[rank 1] 0 GPU-7 1"]


def test_a_script_has_the_context_and_torchruns_environment(run, write):
    done = run(
        *LIGHT, "--nproc-per-node", "2", "--role", "trainer", "--rdzv-id", "job7",
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--max_restarts=2",
        write(
            "import os, phalanx\n"
            "context = phalanx.get_context()\n"
            "names = ('RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE "
            "GROUP_WORLD_SIZE ROLE_WORLD_SIZE TORCHELASTIC_RUN_ID TORCHELASTIC_MAX_RESTARTS "
            "TORCHELASTIC_RESTART_COUNT OMP_NUM_THREADS MASTER_ADDR').split()\n"
            "if context.get_rank() == 1: print(*(os.environ[n] for n in names))\n"
        ),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[rank 1] 1 1 0 1 trainer 2 2 1 2 job7 2 0 1 localhost\n"


@METHODS
def test_local_ranks_are_filled_in_and_dollars_stay(run, write, how):
    name = write("import sys; print(*sys.argv[1:])")
    done = run(*how, "--nproc-per-node", "2", name, "${local_rank}", "a$$b", "r${local_rank}")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 a$$b r0", "[rank 1] 1 a$$b r1"], done


def test_a_script_beside_modules_with_well_known_names(write, tmp_path):
    """By the command: `python -m phalanx` looks into the folder before we can say anything."""
    for name in ("random.py", "socket.py", "signal.py", "resource.py", "msgspec.py", "torch.py"):
        write("raise ImportError('the wrong one')", name)
    command = [str(Path(sys.executable).with_name("phalanx")), "run", write("print('fine')")]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "fine\n")
    (line,) = done.stderr.splitlines()  # the fork server has imported another torch
    assert "torch.py stands before the module 'torch'" in line


def test_any_program(run):
    done = run("--no-python", "--nproc-per-node=2", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"')
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_of_its_own(run, write):
    done = run(*LIGHT, write("print(__name__)"), module="phalanx.run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "__main__\n", "")


# ── exit codes ───────────────────────────────────────────────────────────────────────────


@METHODS
@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit(256)", 0),
        ("import sys; sys.exit(257)", 1),
        ("import sys; sys.exit(-1)", 255),
        ("import sys; sys.exit(2**80)", 255),
        ("import sys; sys.exit(True)", 1),
        ("import sys; sys.exit('a message')", 1),
        ("import sys; sys.exit((1, 2))", 1),
        ("exit(3)", 3),
        ("raise SystemExit(4)", 4),
        ("import os; os._exit(3)", 3),
        ("import os; os._exit(0)", 0),
        ("1 / 0", 1),
        ("def", 1),
        ("import nothing_like_that", 1),
        ("raise KeyboardInterrupt", 130),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.abort()", 134),
        ("import ctypes; ctypes.string_at(0)", 139),
    ],
)
def test_exit_codes_are_those_of_python(run, python, write, source, code, how):
    name = write(source + "\n")
    expected = python(name)
    assert expected.returncode in (code, 128 - code)
    done = run(*how, name)
    assert done.returncode == code, done
    said, _, report = done.stderr.partition("phalanx: Rank 0 failed")
    assert said == expected.stderr
    assert bool(report) == bool(code)
    assert "/phalanx/worker/" not in report, "our own frames tell nobody anything"


def test_the_root_cause_gives_the_exit_code(run, write):
    name = write(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(42)\ntime.sleep(60)\n"
    )
    done = run(*LIGHT, "--nproc-per-node", "3", name)
    assert done.returncode == 42
    assert "phalanx: Rank 1 failed: SystemExit: 42" in done.stderr
    assert "rank 0, node 0" in done.stderr


def test_the_report_as_json(run, write):
    name = write(
        "import os\nif os.environ['RANK'] == '1': raise ValueError('loss is nan')\n"
        "import time; time.sleep(60)"
    )
    done = run(*LIGHT, "--json", "--nproc-per-node=2", name)
    assert done.returncode == 1
    report = json.loads(done.stderr.splitlines()[-1])
    assert (report["state"], report["exit_code"], report["restart_count"]) == ("failed", 1, 0)
    root, other = report["failures"]
    assert (root["rank"], root["type_name"], root["message"]) == (1, "ValueError", "loss is nan")
    assert "raise ValueError('loss is nan')" in root["traceback"]
    assert (other["rank"], other["kind"]) == (0, "stopped")
    done = run(*LIGHT, "--json", write("pass", "fine.py"))
    report = json.loads(done.stderr)
    assert (report["state"], report["exit_code"], report["failures"]) == ("succeeded", 0, [])


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        (("nothing.py",), 2, "there is no script"),
        (("empty_folder",), 1, "without a __main__.py"),
        (("-m", "nothing_like_that"), 1, "Rank 0 failed: No module named nothing_like_that"),
        (("--max-restarts=3", "-m", "nothing_like_that"), 1, "0 of 3 were used"),
        (("--no-python", "./no_interpreter"), 126, "is its first line `#!`"),
        (("-m", "empty_package"), 1, "cannot be directly executed"),
        (("--no-python", "nothing-like-that"), 127, "there is no program"),
        (("--no-python", "not_executable"), 126, "./not_executable"),
        (("--nproc-per-node", "0", "script.py"), 2, "--nproc-per-node 0"),
        (("--nproc-per-node", "many", "script.py"), 2, "number"),
        (("--nproc-per-node", "gpu", "script.py"), 2, "no GPU"),
        (("--nnodes", "2", "script.py"), 2, "one machine"),
        (("--nnodes", "1:4", "script.py"), 2, "one machine"),
        (("--rdzv-backend", "etcd", "script.py"), 2, "--standalone"),
        (("--node-rank", "1", "script.py"), 2, "rank is 0"),
        (("--preload", "nothing_like_that", "script.py"), 2, "no module 'nothing_like_that'"),
        (("--master-addr", "192.0.2.1", "script.py"), 2, "no address of this machine"),
        (("--master-addr", "nothing.invalid", "script.py"), 2, "no address of this machine"),
        (("--redirects", "5", "script.py"), 2, "--redirects"),
        (("--tee", "3:1", "script.py"), 2, "no local rank 3"),
        (("--log-dir", "script.py", "script.py"), 2, "log_dir"),
        (("--npoc-per-node", "2", "script.py"), 2, "did you mean --nproc-per-node?"),
        (("script",), 2, "was `-m` meant?"),
        ((), 2, "which script?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_can_not_be_run_says_why(run, write, tmp_path, what, code, text):
    write("pass")
    write("", "empty_package/__init__.py")
    (tmp_path / "empty_folder").mkdir()
    write("#!/bin/sh\n", "not_executable")
    write("nothing of the kind", "no_interpreter")
    (tmp_path / "no_interpreter").chmod(0o755)
    done = run(*LIGHT, *what, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == code, done
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_port_that_is_taken(run, write):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(*LIGHT, "--master-port", port, write("pass"))
        assert done.returncode == 2
        assert f"--master-port {port} can't be used" in done.stderr


# ── signals ──────────────────────────────────────────────────────────────────────────────

SLEEPY = """
import os, sys, time
print("WORKING", os.environ["TORCHELASTIC_RUN_ID"], flush=True)
time.sleep(1000)
"""


@METHODS
@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_a_signal_stops_the_run_and_gives_the_exit_code(start, write, signum, code, how):
    started = start(*how, "--nproc-per-node=2", "--max-restarts=3", write(SLEEPY))
    run_id = started.wait_for_line("WORKING").split()[-1]
    started.wait_for_line("WORKING")
    os.kill(started.pid, signum)
    done = started.finish(20)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    wait_until(lambda: not tagged_processes(run_id), 10)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_of_a_start(start, write, delay_s, signum):
    import time

    started = start(write(SLEEPY))
    time.sleep(delay_s)
    os.kill(started.pid, signum)
    done = started.finish(20)
    if "KeyboardInterrupt" in done.stderr:  # Python itself was not yet ready
        assert "/phalanx/cli/run.py" not in done.stderr
    else:
        assert done.returncode in (128 + signum, -signum), done
        assert "Traceback" not in done.stderr


SAVING = """
import os, signal, sys, time
def save(signum, frame):
    os.write(1, b"saved %s\\n" % signal.Signals(signum).name.encode())  # print may be interrupted
    if signum == signal.SIGTERM: sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
print("WORKING", flush=True)
while True: time.sleep(0.05)
"""


@METHODS
def test_workers_save_within_the_grace_and_the_exit_code_says_so(start, write, how):
    started = start(*how, write(SAVING))
    started.wait_for_line("WORKING")
    os.kill(started.pid, signal.SIGTERM)
    done = started.finish(20)
    assert (done.returncode, done.stdout) == (143, "saved SIGTERM\n"), done


def test_a_script_can_ask_whether_to_stop(start, write):
    started = start(
        *LIGHT,
        write(
            "import time, phalanx\n"
            "context = phalanx.get_context()\n"
            "print('WORKING', context.stop_requested, flush=True)\n"
            "while not context.stop_requested: time.sleep(0.01)\n"
            "print('saved', flush=True)\n"
        ),
    )
    started.wait_for_line("WORKING")
    os.kill(started.pid, signal.SIGTERM)
    done = started.finish(20)
    assert (done.returncode, done.stdout) == (143, "saved\n"), done


def test_a_signal_to_every_process_at_once_is_a_stop(start, write):
    """As a batch system sends it."""
    started = start(*LIGHT, "--nproc-per-node=2", "--max-restarts=3", write(SLEEPY))
    for _ in range(2):
        started.wait_for_line("WORKING")
    launcher = psutil.Process(started.pid)
    for process in (*launcher.children(recursive=True), launcher):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    assert started.finish(20).returncode == 143


def test_an_agent_that_is_killed_is_said(start, write):
    started = start(*LIGHT, write(SLEEPY))
    started.wait_for_line("WORKING")
    (agent,) = psutil.Process(started.pid).children()
    agent.kill()
    done = started.finish(20)
    assert done.returncode == 1
    assert "phalanx: the agent of run" in done.stderr
    assert "Traceback" not in done.stderr


@METHODS
def test_a_signal_that_workers_catch_ends_nothing(start, write, how):
    started = start(*how, "--signals-to-handle", "SIGTERM,SIGUSR1", write(SAVING))
    started.wait_for_line("WORKING")
    for _ in range(2):
        os.kill(started.pid, signal.SIGUSR1)
        assert started.wait_for_line("saved") == "saved SIGUSR1\n"
    assert started.process.poll() is None
    os.kill(started.pid, signal.SIGTERM)
    assert started.finish(20).returncode == 143


LATE = """
import os, signal, time
from pathlib import Path
Path("entered" + os.environ["RANK"]).touch()
while not Path("go").exists(): time.sleep(0.01)
def save(signum, frame):
    os.write(1, b"saved by %s\\n" % os.environ["RANK"].encode())
signal.signal(signal.SIGUSR1, save)
while True: time.sleep(0.05)
"""


@METHODS
@pytest.mark.parametrize("moment", ["before_workers", "before_handlers"])
def test_a_signal_that_comes_before_the_handlers_is_kept(start, write, tmp_path, how, moment):
    started = start(
        *how, "--signals-to-handle=SIGUSR1", "--nproc-per-node=2", "--max-restarts=0", write(LATE)
    )
    entered = [tmp_path / "entered0", tmp_path / "entered1"]
    if moment == "before_workers":
        wait_until(lambda: kernel.catches_signal(started.pid, signal.SIGUSR1), 30)
        os.kill(started.pid, signal.SIGUSR1)
    wait_until(lambda: all(path.exists() for path in entered), 60)
    if moment == "before_handlers":
        os.kill(started.pid, signal.SIGUSR1)
    (tmp_path / "go").touch()
    said = {started.wait_for_line("saved by").split()[-1] for _ in range(2)}
    assert said == {"0", "1"}
    os.kill(started.pid, signal.SIGTERM)
    done = started.finish(20)
    assert (done.returncode, "saved by" in done.stdout) == (143, False), "each had it once"


def test_a_signal_that_is_named_and_that_nobody_catches_is_a_stop(start, write):
    started = start(*LIGHT, "--signals_to_handle=SIGUSR2", write(SLEEPY))
    started.wait_for_line("WORKING")
    os.kill(started.pid, signal.SIGUSR2)
    done = started.finish(20)
    assert done.returncode == 128 + signal.SIGUSR2, done


def test_the_grace_ends(start, write):
    started = start(
        *LIGHT, "--shutdown-timeout=0.5",
        write("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
              "print('WORKING', flush=True)\ntime.sleep(1000)\n"),
    )  # fmt: skip
    started.wait_for_line("WORKING")
    os.kill(started.pid, signal.SIGTERM)
    assert started.finish(20).returncode == 143


def test_a_failure_does_not_wait_for_the_grace(run, write):
    done = run(
        *LIGHT, "--shutdown-timeout=1000", "--nproc-per-node=2",
        write("import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
              "if os.environ['RANK'] == '0': time.sleep(0.3); sys.exit(5)\ntime.sleep(1000)\n"),
        timeout=20,
    )  # fmt: skip
    assert done.returncode == 5


def test_nohup_stays_nohup(start, write):
    started = start(
        *LIGHT, write("import time\nprint('WORKING', flush=True)\ntime.sleep(0.7)\n"),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    started.wait_for_line("WORKING")
    os.kill(started.pid, signal.SIGHUP)
    assert started.finish(20).returncode == 0


# ── failures and restarts ────────────────────────────────────────────────────────────────


@METHODS
def test_a_script_is_started_again(run, write, how):
    name = write(
        "import os, sys\n"
        "count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('count', count, flush=True)\n"
        "if count < 2: sys.exit(9)\n"
    )
    done = run(*how, "--max-restarts=2", name)
    assert (done.returncode, done.stdout.split()) == (0, ["count", "0", "count", "1", "count", "2"])
    assert done.stderr.count("restarting") == 2
    done = run(*how, "--max-restarts=1", name)
    assert done.returncode == 9
    assert "1 of 1 were used" in done.stderr


def test_only_the_fallen_worker_is_started_again(run, write):
    name = write(
        "import os, sys, time\n"
        "rank, count = os.environ['RANK'], int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print(rank, count, flush=True)\n"
        "if rank == '1' and count == 0: sys.exit(9)\n"
        "time.sleep(0.5)\n"
    )
    done = run(*LIGHT, "--nproc-per-node=2", "--restart=worker", "--max-restarts=1", name)
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 0", "[rank 1] 1 0", "[rank 1] 1 1"]


RECORDED = """
import atexit, os, time, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "1":
        atexit.register(time.sleep, 0.5)  # its peer is the first to end
        try:
            raise ValueError("told by: record")
        finally:
            dist.destroy_process_group()
    dist.barrier()

main()
"""


@METHODS
def test_record_of_torchelastic_names_the_rank_that_began_it(run, write, how):
    done = run(*how, "--nproc-per-node=2", "--json", write(RECORDED))
    assert done.returncode == 1
    root, effect = json.loads(done.stderr.splitlines()[-1])["failures"]
    said = (root["rank"], root["type_name"], root["message"], root["kind"])
    assert said == (1, "ValueError", "told by: record", "primary")
    assert "in main\n    raise ValueError(" in root["traceback"]
    assert (effect["rank"], effect["type_name"], effect["kind"]) == (0, "RuntimeError", "effect")


# ── output ───────────────────────────────────────────────────────────────────────────────


@METHODS
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_goes_away(start, write, tmp_path, how, lines):
    name = write(f"for n in range({lines}): print('line', n)\n")
    started = start(*how, name)
    assert started.out.line() == "line 0\n"
    started.close_stdout()
    done = started.finish(30)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_bytes_bars_and_dumb_terminals(run, write):
    name = write(
        "import sys\n"
        "sys.stdout.buffer.write(bytes(range(256)) + b'\\n')\n"
        "for n in range(3): print(f'\\r{n}/3', end='')\n"
        "print()\n"
    )
    done = run(
        *LIGHT, "--nproc-per-node=2", name, env={"TERM": "dumb", "NO_COLOR": "1"}, text=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(bytes(range(14, 256))) == 2
    assert done.stdout.count(b"2/3") == 2
    assert b"\x1b[" not in done.stdout.replace(bytes(range(14, 256)), b"")


PRINTS = """
import os, sys
print("loss", os.environ["RANK"], flush=True)
print("other", os.environ["RANK"], flush=True)
print("error", os.environ["RANK"], file=sys.stderr, flush=True)
"""


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "0").iterdir())}


def sorted_lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_a_log_folder_gets_everything_beside_the_console(run, write, tmp_path):
    done = run(*LIGHT, "--nproc-per-node=2", "--log-dir=logs", write(PRINTS))
    assert len(done.stdout.splitlines()) == 4
    assert len(done.stderr.splitlines()) == 2
    assert files_of(tmp_path / "logs") == {
        "rank-0.err": "error 0\n", "rank-0.out": "loss 0\nother 0\n",
        "rank-1.err": "error 1\n", "rank-1.out": "loss 1\nother 1\n",
    }  # fmt: skip


def test_redirects_tee_and_filters_by_rank_and_stream(run, write, tmp_path):
    done = run(
        *LIGHT, "--nproc-per-node=2", "--log_dir", "logs", "--redirects", "0:1,1:2", "-t0:2",
        "--duplicate-stdout-filters", "loss,nothing", write(PRINTS),
    )  # fmt: skip
    assert sorted_lines(done.stdout) == ["loss 1", "other 1"], "one rank needs no prefix"
    assert sorted_lines(done.stderr) == ["error 0"]
    files = files_of(tmp_path / "logs")
    assert sorted_lines(files.pop("filtered.out")) == ["[rank 0] loss 0", "[rank 1] loss 1"]
    assert files == {
        "rank-0.err": "error 0\n", "rank-0.out": "loss 0\nother 0\n", "rank-1.err": "error 1\n",
    }  # fmt: skip


@pytest.mark.parametrize("how", ["option", "PET", "torch's variable"])
def test_what_stands_before_lines_can_be_chosen(run, write, how):
    template = "${hostname}/${role_name}/${rank}/${local_rank}/${other}> "
    options, env = (), {}
    if how == "option":
        options = ("--log-line-prefix-template", template)
    else:
        name = "PET_" if how == "PET" else "TORCHELASTIC_"
        env = {f"{name}LOG_LINE_PREFIX_TEMPLATE": template}
    words = ("--nproc-per-node=2", "--role=trainer", *options)
    done = run(*LIGHT, *words, write("print('same')"), env=env, fold=True)
    host = socket.gethostname()
    assert sorted_lines(done.stdout) == [
        f"{host}/trainer/{rank}/{rank}/${{other}}> same" for rank in range(2)
    ]


def test_one_rank_and_copied_lines_have_the_chosen_prefix_too(run, write, tmp_path):
    done = run(
        *LIGHT, "--log-dir", "logs", "--log-line-prefix-template", "${rank}: ",
        "--duplicate-stdout-filters", "loss", write(PRINTS),
    )  # fmt: skip
    assert sorted_lines(done.stdout) == ["0: loss 0", "0: other 0"]
    files = files_of(tmp_path / "logs")
    assert (files["filtered.out"], files["rank-0.err"]) == ("0: loss 0\n", "error 0\n")


def test_only_some_ranks_print(run, write):
    done = run(*LIGHT, "--nproc-per-node=3", "--local-ranks-filter=0,2", write(PRINTS))
    assert sorted_lines(done.stderr) == ["[rank 0] error 0", "[rank 2] error 2"]
    assert len(done.stdout.splitlines()) == 4


def test_no_console_at_all(write, tmp_path):
    """Standard streams that are closed are no reason not to work."""
    name = write("open('done.txt', 'w').write('done')")
    command = f"exec {sys.executable} -m phalanx run --preload '' {name} <&- >&- 2>&-"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "done.txt").read_text() == "done"


def test_real_interpreters_meet_in_one_group(run, write):
    name = write(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1.0]); dist.all_reduce(total)\n"
        "os.write(1, f'{total.item()}\\n'.encode())\n"
        "os._exit(0)  # torch may abort at a real interpreter's end\n"
    )
    done = run("--start-method=spawn", "--nproc-per-node", "2", name)
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in sorted_lines(done.stdout) if "[Gloo]" not in line]  # torch 2.9's own
    assert said == ["[rank 0] 3.0", "[rank 1] 3.0"]

"""A worker made by fork can't be told from a fresh interpreter: point by point.

Each probe runs in a worker made by fork and in one made by spawn, and they must agree (or,
for what must differ between processes, differ).
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import textwrap

import pytest

from phalanx import WorkerFailedError, start_processes

BOTH = pytest.mark.parametrize("start_method", ["forkserver", "spawn"])


def ask(probe, world_size=1, **options):
    return start_processes(probe, world_size, **options).wait().returns


def agree(probe, **options):
    """Ask a forked worker and a fresh one; return what both say."""
    (forked,) = ask(probe, **options)
    (fresh,) = ask(probe, start_method="spawn", **options)
    assert forked == fresh
    return forked


def surroundings(rank, world_size):
    umask = os.umask(0)
    os.umask(umask)
    ours = (
        "RANK",
        "MASTER_PORT",
        "PHALANX_WORKER",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_ERROR_FILE",
    )
    return {
        "environment": {k: v for k, v in os.environ.items() if k not in ours},
        "from C": __import__("ctypes").CDLL(None).getenv(b"PROBE") != 0,
        "directory": os.getcwd(),
        "path": [p for p in sys.path],
        "argv": sys.argv,
        "umask": umask,
        "limits": resource.getrlimit(resource.RLIMIT_CORE),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


def test_environment_directory_path_arguments_umask_and_limits(tmp_path, monkeypatch):
    monkeypatch.setenv("PROBE", "first")
    assert agree(surroundings, preload=())["environment"]["PROBE"] == "first"
    # … and they are those of the call, not those of the fork server's first day:
    monkeypatch.setenv("PROBE", "second")
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setattr(sys, "argv", ["prog", "--flag"])
    old_umask = os.umask(0o027)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        said = agree(surroundings, preload=(), env={"EXTRA": "x"})
    finally:
        os.umask(old_umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert said["environment"]["PROBE"] == "second"
    assert said["environment"]["EXTRA"] == "x"
    assert "HOME" not in said["environment"]
    assert said["directory"] == str(tmp_path)
    assert said["path"][0] == str(tmp_path / "lib")
    assert said["argv"] == ["prog", "--flag"]
    assert said["umask"] == 0o027
    assert said["nofile"][0] == soft - 1


def random_states(rank, world_size):
    import random
    import uuid

    import numpy
    import torch

    return {
        "random": random.random(),
        "numpy": float(numpy.random.rand()),
        "uuid": str(uuid.uuid4()),
        "torch": torch.rand(1).item(),
        "seed": torch.initial_seed(),
    }


def test_random_states_are_each_workers_own():
    """Also torch's: a fresh process draws the seed of its CPU generator at random."""
    forked = [*ask(random_states, 3), *ask(random_states, 1)]
    (fresh,) = ask(random_states, 1, start_method="spawn")
    for name in ("random", "numpy", "uuid", "torch", "seed"):
        assert len({said[name] for said in [*forked, fresh]}) == 5, name


def threads_and_descriptors(rank, world_size):
    import threading

    return {
        "os threads": len(os.listdir("/proc/self/task")),
        "threads": [t.name for t in threading.enumerate()],
        "main": threading.current_thread() is threading.main_thread(),
        "descriptors": sorted(
            os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "leader": os.getsid(0) == os.getpid(),
    }


def test_no_thread_and_no_descriptor_of_anybody_else():
    said = ask(threads_and_descriptors, 3)
    for worker in said:
        assert worker["os threads"] == 1
        assert worker["threads"] == ["MainThread"]
        assert worker["main"]
        assert worker["children"] == ""
        assert worker["leader"]
        # standard input, output and error; the agent's line; the file for native stacks;
        # the mapped control page; the folder that is being listed
        assert len(worker["descriptors"]) <= 7, worker["descriptors"]
        assert worker["descriptors"].count("socket") == 1


def no_cuda(rank, world_size):
    import torch

    return torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()


def test_no_cuda_context_and_no_bad_fork():
    assert ask(no_cuda) == ((False, False),)


def thread_counts(rank, world_size):
    import threadpoolctl
    import torch

    blas = {i["num_threads"] for i in threadpoolctl.threadpool_info() if i["user_api"] == "blas"}
    return torch.get_num_threads(), blas


@pytest.mark.parametrize("count", ["1", "2", "3"])
def test_thread_counts_are_set_by_the_environment(count, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", count)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    wanted = (int(count), {min(int(count), os.cpu_count())})
    (forked,) = ask(thread_counts)
    assert forked[0] == wanted[0]
    assert forked[1] in ({int(count)}, wanted[1])


def test_several_workers_on_a_machine_get_one_thread_each(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ask(thread_counts, 2) == ((1, {1}), (1, {1}))


def interpreter_state(rank, world_size):
    import faulthandler
    import gc
    import multiprocessing
    import multiprocessing.process
    import warnings

    main = sys.modules["__main__"]
    return {
        "signals": {
            n: getattr(signal.getsignal(n), "__name__", str(signal.getsignal(n)))
            for n in sorted(signal.valid_signals())
        },
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "wakeup": signal.set_wakeup_fd(-1),
        "main": (main.__name__, getattr(main, "__file__", None), main.__spec__ is None),
        "process": (multiprocessing.current_process().name, multiprocessing.parent_process()),
        "children": multiprocessing.active_children(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "faulthandler can be enabled": faulthandler.enable() is None,
        "line buffered": sys.stdout.line_buffering,
        "stdin": sys.stdin.read(),
        "torch imported": "torch" in sys.modules,
        "recursion": sys.getrecursionlimit(),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "warnings": sum("phalanx" in str(f) for f in warnings.filters),
    }


def test_signals_main_multiprocessing_and_the_rest_are_as_in_a_fresh_interpreter():
    said = agree(interpreter_state, preload=())
    assert said["signals"][signal.SIGTERM] == "0"
    assert said["signals"][signal.SIGINT] == "default_int_handler"
    assert said["mask"] == []
    assert said["line buffered"]
    assert said["stdin"] == ""
    assert not said["torch imported"]


def use_exit_handlers(rank, world_size, path):
    import atexit
    import threading
    import time

    def late():
        time.sleep(0.2)
        open(f"{path}/thread", "w").close()

    atexit.register(lambda: open(f"{path}/atexit", "w").close())
    threading.Thread(target=late).start()


@BOTH
def test_exit_handlers_run_and_threads_are_waited_for(tmp_path, start_method):
    ask(use_exit_handlers, args=(str(tmp_path),), preload=(), start_method=start_method)
    assert sorted(os.listdir(tmp_path)) == ["atexit", "thread"]


def auth_key(rank, world_size):
    import multiprocessing

    return bytes(multiprocessing.current_process().authkey)


def test_multiprocessing_has_the_launchers_key():
    """As a child of multiprocessing has: else a manager's proxies could not connect."""
    import multiprocessing

    keys = ask(auth_key, 2, preload=())
    assert set(keys) == {bytes(multiprocessing.current_process().authkey)}


def test_a_preload_does_not_freeze_the_users_own_modules(tmp_path, monkeypatch):
    """Edits between two runs are seen."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_probe.py").write_text("VALUE = 1\n")
    assert ask(read_mine, preload=()) == (1,)
    (tmp_path / "mine_probe.py").write_text("VALUE = 22\n")
    assert ask(read_mine, preload=()) == (22,)


def read_mine(rank, world_size):
    import mine_probe

    return mine_probe.VALUE


def test_a_warm_fork_server_is_used_again_and_another_environment_gets_another(run_script):
    done = run_script(
        textwrap.dedent("""
        import os
        from phalanx import start_processes
        def parent(rank, world_size): return os.getppid()
        def once(**options):
            (pid,) = start_processes(parent, 1, preload=("json",), **options).wait().returns
            return pid
        first = once()
        os.environ["UNRELATED"] = "x"
        assert once() == first
        assert once(env={"MINE": "y"}) == first
        assert once(env={"TORCH_LOGS": ""}) != first
        assert once() == first
        """)
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise RuntimeError('bad preload')", "RuntimeError: bad preload"),
        ("import no_such_thing_y", "No module named 'no_such_thing_y'"),
        ("import sys; sys.exit(3)", "SystemExit"),
    ],
)
def test_a_preload_that_fails_is_a_startup_failure_and_not_tried_again(
    tmp_path, monkeypatch, body, words
):
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"bad_preload_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body)
    context = start_processes(auth_key, 2, preload=(name,), max_restarts=3)
    with pytest.raises(WorkerFailedError, match=f"preloading '{name}' failed") as caught:
        context.wait()
    assert words in str(caught.value)
    assert caught.value.root_cause.cause == "startup"
    assert context.restart_count == 0


def test_a_preload_that_starts_threads_is_named_and_workers_are_spawned(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "threaded_preload.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    assert ask(auth_key, 2, preload=("threaded_preload",))[0] is not None
    assert "importing 'threaded_preload' started 1 thread" in caplog.text


def import_late(rank, world_size):
    raise AssertionError("never reached")


def test_a_function_whose_module_fails_in_the_worker_is_a_startup_failure(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "only_here.py").write_text(
        "import os\n"
        "if 'PHALANX_WORKER' in os.environ: raise ImportError('not in a worker')\n"
        "def f(rank, world_size): pass\n"
    )
    import only_here

    context = start_processes(only_here.f, 2, preload=(), max_restarts=3)
    with pytest.raises(WorkerFailedError, match="not in a worker") as caught:
        context.wait()
    assert caught.value.root_cause.cause == "startup"
    assert context.restart_count == 0
    del sys.modules["only_here"]


@pytest.mark.parametrize("without", [{}, {"PHALANX_WITHOUT_PIDFD": "1"}])
def test_everything_works_without_pidfds(run_script, without):
    done = run_script(
        textwrap.dedent("""
        import os, signal, time
        from phalanx import start_processes, get_context
        def f(rank, world_size):
            if get_context().restart_count == 0:
                if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(100)
            return rank
        print(start_processes(f, 3, preload=(), max_restarts=1).wait().returns)
        """),
        env=without,
        timeout=20,
    )
    assert done.stdout == "(0, 1, 2)\n", done.stderr

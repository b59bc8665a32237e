"""The programs that are measured: the same work under Phalanx and under torchrun.

Each writes stamps (seconds since the epoch) as ``rank name time`` lines into the file that
STAMPS names; a line is one small append, so ranks don't tear each other's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

_PATIENCE_S = 60
"""How long a command may take; torchrun's groups sometimes never come back."""

WORK = """
import os, signal, sys, time

def stamp(name):
    fd = os.open(os.environ["STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{os.environ['RANK']} {name} {time.time()}\\n".encode())
    os.close(fd)

def work(rank, world_size, what):
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    stamp(f"collective-{generation}")
    if what == "start":
        return
    if what == "step":
        model = torch.nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        stamp(f"step-{generation}")
    if generation == "0":
        dist.barrier()
        time.sleep(float(os.environ.get("SETTLE", "0.3")))
        if rank == 1:
            stamp("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)  # the survivors sit in a collective
        dist.all_reduce(tensor)
"""

PHALANX = (
    WORK
    + """
from phalanx import start_processes
WHAT, WORLD_SIZE, RUNS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(RUNS):
    os.environ["RANK"] = "-1"
    stamp(f"call-{number}")
    context = start_processes(work, WORLD_SIZE, args=(WHAT,), max_restarts=3)
    for event in context.events():
        if type(event).__name__ == "GroupFell":
            stamp("seen")
    context.wait()
    stamp(f"ended-{number}")
"""
)

TORCHRUN = (
    WORK
    + """
work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1])
"""
)


def clean_environment(**extra: str) -> dict[str, str]:
    """A user's environment: bytecode is cached, one thread per rank."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return environment | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | extra


def run(
    kind: str, what: str, world_size: int, runs: int = 1, *, quiet: bool = False, **extra: str
) -> list[list[str]]:
    """Run a program to its end; return its stamps, preceded by one of the command's start."""
    with tempfile.TemporaryDirectory() as folder:
        script, stamps = Path(folder, "program.py"), Path(folder, "stamps")
        if kind == "phalanx":
            script.write_text(PHALANX)
            command = [sys.executable, str(script), what, str(world_size), str(runs)]
        else:
            script.write_text(TORCHRUN)
            module = ("phalanx", "run") if kind == "phalanx run" else ("torch.distributed.run",)
            command = [
                sys.executable, "-m", *module, "--standalone",
                f"--nproc-per-node={world_size}", "--max-restarts=3", str(script), what,
            ]  # fmt: skip
        environment = clean_environment(
            STAMPS=str(stamps), XDG_STATE_HOME=str(Path(folder, "state")), **extra
        )
        started = time.time()
        done = _finish(command, environment, folder)
        ended = time.time()
        if done.returncode:
            if not quiet:
                print(f"{kind} {what} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
            return []
        lines = [line.split() for line in stamps.read_text().splitlines()]
        return [["-1", "command", str(started)], *lines, ["-1", "exit", str(ended)]]


def _finish(
    command: list[str], environment: dict[str, str], folder: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; one that hangs is ended with all that it has started."""
    with subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            family = [psutil.Process(process.pid)]
            family += family[0].children(recursive=True)
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            out, err = process.communicate()
            err += f"\nno end within {_PATIENCE_S} s"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def times(stamps: list[list[str]], name: str) -> list[float]:
    """Return all times of one name, in the order in which they were written."""
    return [float(time_) for _, known, time_ in stamps if known == name]


def import_torch_seconds() -> float:
    """One bare ``import torch`` in a new interpreter, its teardown not counted."""
    command = [sys.executable, "-c", "import torch, os; os._exit(0)"]
    started = time.perf_counter()
    subprocess.run(command, env=clean_environment(), check=True)
    return time.perf_counter() - started

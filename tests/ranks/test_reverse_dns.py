"""A start must not wait for a name server."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

SCRIPT = """
from phalanx import start_processes
def work(rank, world_size):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    context.barrier()
context = start_processes(work, 3)
context.wait()
"""


def test_workers_ask_no_name_server(tmp_path):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is needed to see it")
    log = tmp_path / "calls"
    command = [
        strace,
        "-f",
        "-qq",
        "-e",
        "trace=connect",
        "-o",
        str(log),
        sys.executable,
        "-c",
        SCRIPT,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    if "Operation not permitted" in done.stderr:
        pytest.skip("tracing is not allowed here")
    assert done.returncode == 0, done.stderr
    calls = log.read_text()
    assert "127.0.0.1" in calls, "the workers did connect to each other"
    assert "htons(53)" not in calls

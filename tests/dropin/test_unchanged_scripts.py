"""Scripts that torchrun starts do the same under `phalanx run`, down to the last bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.dropin.conftest import ended


def needs(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed")


@pytest.mark.parametrize(
    ("name", "arguments", "env"),
    [
        pytest.param("sharded.py", ("out.json",), {}, id="fsdp2-and-tensor-parallel"),
        pytest.param("parameter_server.py", ("out.json",), {}, id="rpc"),
        pytest.param("data_loaders.py", ("out.json", "fork,spawn"), {}, id="data-loaders"),
        pytest.param("nested_spawn.py", ("out.json",), {}, id="multiprocessing-spawn"),
        pytest.param(
            "with_accelerate.py",
            ("out.json",),
            {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"},
            marks=needs("accelerate"),
            id="accelerate",
        ),
        pytest.param(
            "with_lightning.py", ("out.json",), {}, marks=needs("lightning"), id="lightning"
        ),
        pytest.param(
            "with_deepspeed.py",
            ("out.json",),
            {"DS_ACCELERATOR": "cpu"},
            marks=needs("deepspeed"),
            id="deepspeed",
        ),
    ],
)
def test_the_result_is_the_same(results, name, arguments, env):
    ours, theirs = results(name, *arguments, **env)
    assert ours == theirs


def test_the_tutorials_trainer_goes_on_from_its_snapshot(ours, theirs):
    """DDP. A rank is killed by SIGKILL; the end is that of torchrun's run, in which none was."""
    arguments = ("snapshots.py", "6", "1", "--batch_size", "16")
    undisturbed = theirs.start(*arguments)
    killed = ours.start(
        *arguments, "--fail_at", "3", options=("--max-restarts", "3", "--json", "--no-fold")
    )
    undisturbed, killed = undisturbed.finish(75), killed.finish(75)
    assert killed.returncode == 0, ended(killed)
    assert json.loads(killed.stderr.splitlines()[-1])["restart_count"] == 1
    assert killed.stdout.count("Resuming training from snapshot at Epoch 3") == 2
    assert theirs.result()["resumed_from"] == 0, ended(undisturbed)
    assert ours.result() == {**theirs.result(), "resumed_from": 3}


def test_a_distributed_checkpoint_is_resumed_from(ours, theirs):
    """FSDP2 and its optimizer come back from DCP after a SIGKILL, bit for bit."""
    arguments = ("checkpoint.py", "--out", "out.json", "--checkpoints", "checkpoints")
    undisturbed = theirs.start(*arguments)
    killed = ours.start(*arguments, "--kill-step", "5", options=("--max-restarts", "3"))
    undisturbed, killed = undisturbed.finish(75), killed.finish(75)
    assert killed.returncode == 0, ended(killed)
    assert "rank 1 failed (the process was ended by SIGKILL); restarting" in killed.stderr
    assert theirs.result()["restarts"] == 0, ended(undisturbed)
    assert ours.result() == {**theirs.result(), "first_step": 4, "restarts": 1}


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_recorded_exception_is_reported(ours, how):
    """`@record` leaves its error file where it was told to; the report has what is in it."""
    done = ours.start("recorded.py", options=("--start-method", how, "--json")).finish(60)
    assert done.returncode == 1, ended(done)
    report = json.loads(done.stderr.splitlines()[-1])
    root = report["failures"][0]
    assert report["message"] == "Rank 1 failed: DataError: shard 1 is damaged"
    assert (root["rank"], root["type_name"], root["message"]) == (
        1, "DataError", "shard 1 is damaged",
    )  # fmt: skip
    assert "in load\n    raise DataError(" in root["traceback"]

    file = Path(report["run_dir"], "errors", "0", "rank-1.json")
    assert f"[rank 1] errors go to {file}" in done.stdout
    assert "shard 1 is damaged" in json.loads(file.read_text())["message"]["message"]
    assert not file.with_name("rank-0.json").exists()

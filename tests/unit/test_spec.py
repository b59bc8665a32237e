from __future__ import annotations

from datetime import timedelta

import pytest

from phalanx.values import spec
from phalanx.values.errors import SpecError


def launch(**changes) -> spec.LaunchSpec:
    fields = {
        "run_id": "r",
        "function": "f",
        "world_size": 4,
        "num_processes_per_machine": 4,
        "run_dir": "/run",
    }
    return spec.LaunchSpec(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 0}, "world_size must be 1 or more"),
        ({"world_size": -3}, "world_size must be 1 or more"),
        ({"num_processes_per_machine": 0}, "num_processes_per_machine must be 1 or more"),
        ({"num_processes_per_machine": 3}, "can be one of [1, 2, 4]"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"restart": "all"}, "'group', 'worker'"),
        ({"start_method": "fork"}, "'forkserver', 'spawn'"),
        ({"master_port": 70000}, "1–65535"),
        ({"start_timeout_s": 0}, "start_timeout"),
        ({"restart_window_s": 0}, "restart_window"),
    ],
)
def test_bad_launches_are_refused_with_a_next_step(changes, words):
    with pytest.raises(SpecError) as caught:
        spec.check_launch(launch(**changes))
    assert words in str(caught.value)


@pytest.mark.parametrize("backend", ["auto", "gloo", "NCCL", "cpu:gloo,cuda:nccl"])
def test_known_backends_pass(backend):
    assert spec.check_backend(backend) is None


def test_an_unknown_backend_suggests_the_nearest():
    with pytest.raises(SpecError, match="did you mean 'gloo'"):
        spec.check_backend("glo")


def test_a_registered_backend_passes():
    with pytest.raises(SpecError):
        spec.check_backend("mine")
    spec.check_backend("mine", ["mine"])


def test_durations_are_seconds_or_timedeltas():
    assert spec.to_seconds("grace", 2) == 2.0
    assert spec.to_seconds("grace", timedelta(minutes=1)) == 60.0
    for bad in (-1, float("nan"), float("inf"), "3", True, None):
        with pytest.raises(SpecError, match="grace"):
            spec.to_seconds("grace", bad)


def test_emulated_machines_have_ranks_of_their_own():
    four = launch(num_processes_per_machine=2)
    places = [spec.worker_spec(four, rank, 0, 0) for rank in range(4)]
    assert [(p.node_rank, p.local_rank) for p in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {p.num_nodes for p in places} == {2}


def test_the_environment_is_the_one_torchrun_gives():
    four = launch(num_processes_per_machine=2, master_port=29500, max_restarts=3)
    place = spec.worker_spec(four, 3, 1, 1)
    environment = spec.worker_environment(four, place, {"HOME": "/h"})
    expected = {
        "HOME": "/h", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/run/errors/1/rank-3.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1", "PHALANX_WORKER": "r/1/3",
    }  # fmt: skip
    assert environment == expected


def test_what_the_user_set_is_kept():
    four = launch()
    place = spec.worker_spec(four, 0, 0, 0)
    environment = spec.worker_environment(four, place, {"OMP_NUM_THREADS": "7"})
    assert environment["OMP_NUM_THREADS"] == "7"
    assert "CUDA_VISIBLE_DEVICES" not in environment


@pytest.mark.parametrize(
    ("per_machine", "gpus", "shares"),
    [
        (1, ("0", "1", "2", "3"), ["0", "1", "2", "3"]),
        (2, ("0", "1", "2", "3"), ["0,1", "0,1", "2,3", "2,3"]),
        (1, ("5",), ["5", "5", "5", "5"]),
    ],
)
def test_emulated_machines_share_the_gpus_out(per_machine, gpus, shares):
    four = launch(num_processes_per_machine=per_machine)
    found = [
        spec.worker_environment(four, spec.worker_spec(four, rank, 0, 0), {}, gpus)[
            "CUDA_VISIBLE_DEVICES"
        ]
        for rank in range(4)
    ]
    assert found == shares

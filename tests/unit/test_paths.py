from __future__ import annotations

import fcntl

import pytest

from phalanx.system import paths
from phalanx.values.errors import RunDirectoryError


@pytest.fixture(autouse=True)
def own_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "phalanx" / "runs"


def test_old_runs_are_pruned_and_living_ones_never(own_runs):
    made = [paths.create_run_directory(f"run-{number}") for number in range(5)]
    for run in made:
        run.events.touch()
    with made[0].events.open() as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        paths.prune_runs(keep=2)
        assert sorted(p.name for p in own_runs.iterdir()) == ["run-0", "run-3", "run-4"]
    paths.prune_runs(keep=2)
    assert sorted(p.name for p in own_runs.iterdir()) == ["run-3", "run-4"]


def test_a_run_that_is_just_starting_is_not_pruned(own_runs):
    paths.create_run_directory("run-0")
    paths.create_run_directory("run-1")
    paths.prune_runs(keep=1)
    assert (own_runs / "run-0").exists()


def test_run_ids_sort_by_time_and_differ():
    assert len({paths.new_run_id() for _ in range(20)}) == 20


def test_a_file_is_written_wholly_or_not_at_all(tmp_path):
    paths.write_whole(tmp_path / "a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"
    with pytest.raises(RunDirectoryError):
        paths.write_whole(tmp_path / "missing" / "a", b"1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]

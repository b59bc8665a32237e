"""Which versions of a key are whole, which are kept, and what is let go."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from phalanx.tensors.store.versions import Versions


def commit_all(versions: Versions[str], version: int, *, generation: str = "") -> list[str]:
    dropped = []
    for rank in range(versions.world_size):
        dropped += versions.commit(version, rank, f"{generation}{version}/{rank}")
    return dropped


def test_a_version_is_whole_when_every_rank_has_committed_it():
    versions = Versions[str](world_size=3)
    assert versions.get(0) is None
    for rank in (2, 0):
        assert versions.commit(5, rank, f"5/{rank}") == []
        assert versions.newest_whole is None
        assert versions.get(rank) is None
    assert versions.commit(5, 1, "5/1") == []
    assert versions.newest_whole == 5
    assert [versions.get(rank) for rank in range(3)] == [(5, f"5/{rank}") for rank in range(3)]


def test_one_rank_alone_makes_a_version_whole():
    versions = Versions[str](world_size=1)
    assert versions.commit(1, 0, "1/0") == []
    assert versions.get(0) == (1, "1/0")
    assert versions.commit(2, 0, "2/0") == ["1/0"]
    assert versions.get(0) == (2, "2/0")


def test_what_is_older_than_a_whole_version_is_let_go():
    versions = Versions[str](world_size=2)
    commit_all(versions, 1)
    assert versions.commit(2, 0, "2/0") == [], "not whole: the one before is still wanted"
    assert versions.commit(3, 1, "3/1") == []
    assert versions.get(1) == (1, "1/1")
    dropped = versions.commit(3, 0, "3/0")
    assert sorted(dropped) == ["1/0", "1/1", "2/0"]
    assert versions.get(1) == (3, "3/1")


def test_what_is_newer_than_a_whole_version_is_kept():
    versions = Versions[str](world_size=2)
    versions.commit(20, 0, "20/0")
    assert commit_all(versions, 10) == []
    assert versions.get(0) == (10, "10/0")
    assert sorted(versions.commit(20, 1, "20/1")) == ["10/0", "10/1"]
    assert versions.get(0) == (20, "20/0")


def test_a_rank_that_commits_a_version_again_replaces_its_part():
    versions = Versions[str](world_size=2)
    assert versions.commit(1, 0, "first") == []
    assert versions.commit(1, 0, "second") == ["first"]
    assert versions.newest_whole is None, "twice the same rank is not two ranks"
    assert versions.commit(1, 1, "other") == []
    assert versions.get(0) == (1, "second")


def test_only_newer_versions_than_the_newest_whole_one_are_taken():
    versions = Versions[str](world_size=2)
    assert versions.takes(0)
    assert versions.takes(-1)
    versions.commit(10, 0, "10/0")
    assert versions.takes(9), "10 is not whole"
    assert versions.takes(10)
    versions.commit(10, 1, "10/1")
    assert not versions.takes(9)
    assert not versions.takes(10)
    assert versions.takes(11)


def test_version_zero_counts():
    versions = Versions[str](world_size=1)
    versions.commit(0, 0, "0/0")
    assert versions.get(0) == (0, "0/0")
    assert not versions.takes(0)
    assert versions.begin_generation() == []
    assert versions.get(0) == (0, "0/0")


def test_a_new_generation_forgets_what_is_not_whole():
    versions = Versions[str](world_size=2)
    commit_all(versions, 1)
    versions.commit(2, 0, "2/0")
    versions.commit(3, 1, "3/1")
    assert sorted(versions.begin_generation()) == ["2/0", "3/1"]
    assert versions.get(0) == (1, "1/0")
    assert versions.takes(2), "the new generation commits it anew"
    versions.commit(2, 1, "new 2/1")
    assert versions.newest_whole == 1, "a part of the fallen generation does not count"
    assert sorted(versions.commit(2, 0, "new 2/0")) == ["1/0", "1/1"]
    assert versions.get(0) == (2, "new 2/0")


def test_a_new_generation_without_a_whole_version_begins_with_nothing():
    versions = Versions[str](world_size=2)
    versions.commit(7, 1, "7/1")
    assert versions.begin_generation() == ["7/1"]
    assert versions.begin_generation() == []
    assert versions.commit(7, 0, "7/0") == []
    assert versions.get(0) is None


def test_clearing_returns_everything_once_and_begins_anew():
    versions = Versions[str](world_size=2)
    commit_all(versions, 5)
    versions.commit(6, 0, "6/0")
    assert sorted(versions.clear()) == ["5/0", "5/1", "6/0"]
    assert versions.get(0) is None
    assert versions.takes(1)
    assert versions.clear() == []
    commit_all(versions, 1)
    assert versions.get(1) == (1, "1/1")


@settings(max_examples=100, deadline=None)
@given(
    world_size=st.integers(1, 3),
    steps=st.lists(
        st.one_of(st.tuples(st.integers(0, 4), st.integers(0, 2)), st.just("begin")), max_size=40
    ),
)
def test_parts_are_let_go_once_and_are_of_one_generation(world_size, steps):
    versions = Versions[tuple[int, int, int, int]](world_size=world_size)
    generation, given_in, let_go = 0, set(), []
    for number, step in enumerate(steps):
        newest = versions.newest_whole
        if step == "begin":
            generation += 1
            let_go += versions.begin_generation()
            assert versions.newest_whole == newest
            continue
        version, rank = step
        if rank >= world_size or not versions.takes(version):
            continue
        part = (generation, version, rank, number)
        given_in.add(part)
        let_go += versions.commit(version, rank, part)
        if versions.newest_whole is not None:
            found = [versions.get(rank) for rank in range(world_size)]
            assert {whole for whole, _ in found} == {versions.newest_whole}
            assert [(part[1], part[2]) for _, part in found] == [
                (versions.newest_whole, rank) for rank in range(world_size)
            ]
            assert len({part[0] for _, part in found}) == 1, "mixes generations"
            assert not {part for _, part in found} & set(let_go)
    let_go += versions.clear()
    assert len(let_go) == len(set(let_go))
    assert set(let_go) == given_in

"""Who is to blame for a silence, and what a stack says, without a process."""

from __future__ import annotations

from datetime import timedelta

import pytest

from phalanx import SpecError
from phalanx.lifecycle.hangs import Sighting, find_hung, next_look
from phalanx.system.whereabouts import as_text, grouped, own_frame, parse_frames, waits_for_others
from phalanx.values.spec import to_seconds

TIMEOUT_S = 10.0


def seen(rank: int, since_s: float = 0.0, **known) -> Sighting:
    return Sighting(rank=rank, since_s=since_s, **known)


def culprit(now: float, *sightings: Sighting) -> int | None:
    hung = find_hung(sightings, TIMEOUT_S, now)
    return None if hung is None else hung.rank


def test_nobody_hangs_who_was_seen_in_time():
    assert culprit(9.9, seen(0), seen(1)) is None
    assert culprit(10.0, seen(0), seen(1, since_s=5)) == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"is_stuck": True}, {}),
        ({"is_stuck": True, "num_signs": 9}, {"num_signs": 1}),
        ({"num_signs": 9}, {"waits": True}),
        ({"num_signs": 2}, {"num_signs": 3}),
        ({"num_signs": 3, "since_s": 1.0}, {"num_signs": 3, "since_s": 2.0}),
        ({"num_signs": 9}, {}),
        ({}, {"num_signs": 9, "waits": True}),
    ],
    ids=["stuck", "stuck in spite of signs", "not waiting", "fewer signs", "older sign",
         "spoke before", "silent, but the other waits"],
)  # fmt: skip
def test_the_culprit_is_the_one_that_explains_the_silence(first, second):
    assert culprit(20, seen(0, **first), seen(1, **second)) == 0
    assert culprit(20, seen(0, **second), seen(1, **first)) == 1


def test_otherwise_it_is_the_lowest_rank():
    assert culprit(10, seen(0), seen(1)) == 0
    assert culprit(10, seen(0, waits=True), seen(1, waits=True)) == 0


def test_who_waits_is_not_blamed_while_the_others_may_yet_fall_silent():
    waiting, slower = seen(0, waits=True), seen(1, since_s=3)
    assert culprit(11, waiting, slower) is None
    assert next_look([waiting, slower], TIMEOUT_S, 11) == 2.5, "not oftener than that"
    assert culprit(13, waiting, slower) == 1


def test_who_waits_for_ever_while_others_go_on_hangs():
    assert culprit(19, seen(0, waits=True), seen(1, since_s=18)) is None
    assert culprit(20, seen(0, waits=True), seen(1, since_s=19)) == 0


def test_the_next_look_is_when_somebody_could_be_overdue():
    assert next_look([seen(0, since_s=4), seen(1, since_s=6)], TIMEOUT_S, 7) == 7
    assert next_look([seen(0), seen(1)], TIMEOUT_S, 9.9) == 2.5
    assert next_look([seen(0)], TIMEOUT_S, 100) == TIMEOUT_S


WRITTEN = """\
Current thread 0x00007f (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in reduce
  File "/home/me/train.py", line 31 in <module>
  File "/venv/lib/python3.11/site-packages/phalanx/worker/script.py", line 150 in _run_code
  File "<string>", line 1 in <module>
"""


def test_a_stack_is_cut_where_user_code_begins():
    frames = parse_frames(WRITTEN)
    assert [frame.rpartition(" ")[2] for frame in frames] == ["reduce", "<module>"]
    assert own_frame(frames) == 'File "/home/me/train.py", line 31, in <module>'
    text = as_text(frames, "S").splitlines()
    assert text[0] == '  File "/home/me/train.py", line 31, in <module>', "the innermost is last"


def test_a_worker_that_is_between_our_own_frames_has_a_stack_too():
    own = '  File "/x/phalanx/worker/bootstrap.py", line 1 in _finish\n'
    assert (
        len(parse_frames('  File "/usr/lib/python3.11/threading.py", line 1 in join\n' + own)) == 1
    )
    assert len(parse_frames(own)) == 1


SITE = "/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("waits", "files"),
    [
        (True, [f"{SITE}/torch/distributed/distributed_c10d.py", "/me/train.py"]),
        (True, [f"{SITE}/torch/autograd/graph.py", f"{SITE}/torch/_tensor.py", "/me/train.py"]),
        (
            True,
            [
                f"{SITE}/phalanx/wire/frames.py",
                f"{SITE}/phalanx/tensors/store/conversation.py",
                "/me/a.py",
            ],
        ),
        (
            True,
            [
                "/usr/lib/python3.11/threading.py",
                f"{SITE}/phalanx/tensors/sync/shm/work.py",
                "/a.py",
            ],
        ),
        (True, [f"{SITE}/phalanx/worker/group.py", f"{SITE}/phalanx/worker/context.py", "/a.py"]),
        (False, ["/me/train.py"]),
        (False, ["/usr/lib/python3.11/queue.py", "/me/train.py"]),
        (False, ["/me/model.py", f"{SITE}/torch/distributed/fsdp/api.py", "/me/train.py"]),
        (False, [f"{SITE}/PIL/Image.py", f"{SITE}/torch/autograd/function.py", "/me/train.py"]),
        (False, []),
    ],
)
def test_waiting_for_others_shows_in_what_user_code_has_called(waits, files):
    assert waits_for_others([f'File "{file}", line 1, in f' for file in files]) == waits


def test_equal_stacks_are_shown_once():
    a, b = '  File "a.py", line 1, in f', '  File "b.py", line 2, in g'
    stopped = as_text((), "T")
    assert grouped({0: a, 1: b, 2: a, 3: stopped}, first=1).splitlines() == [
        "rank 1 is in:", b, "ranks 0, 2 are in:", a,
        "rank 3:", "  no Python stack: the process is stopped (SIGSTOP, Ctrl-Z)",
    ]  # fmt: skip
    assert "and 4 more stacks" in grouped({n: f"  File {n}" for n in range(20)})


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), "10", True, timedelta(0)])
def test_a_hang_timeout_is_more_than_nothing(wrong):
    with pytest.raises(SpecError, match=r"hang_timeout must be"):
        to_seconds("hang_timeout", wrong, above_zero=True)
    assert to_seconds("hang_timeout", timedelta(minutes=1), above_zero=True) == 60

from __future__ import annotations

import pickle

from phalanx.launcher.report import failure_page
from phalanx.values.errors import WorkerFailedError
from phalanx.values.failures import Exited, Failure, Signaled, by_cause
from phalanx.values.spec import LaunchSpec

SPEC = LaunchSpec(
    run_id="r", function="train", world_size=4, num_processes_per_machine=4,
    max_restarts=2, run_dir="/runs/r",
)  # fmt: skip


def failure(rank: int, kind: str = "primary", **changes) -> Failure:
    return Failure(rank=rank, kind=kind, cause="exception", message=f"m{rank}", **changes)


def test_the_cause_comes_first_then_effects_then_those_we_stopped():
    seen = (failure(0, "stopped"), failure(1, "effect"), failure(2), failure(3, "effect"))
    assert [f.rank for f in by_cause(seen)] == [2, 1, 3, 0]


def test_the_page_tells_what_broke_where_why_and_what_followed():
    root = Failure(
        rank=2, node_rank=1, pid=77, generation=1, cause="exception", type_name="ValueError",
        message="loss is nan", exit=Exited(1), log_tail="epoch 3\nstep 9\n",
        traceback='Traceback (most recent call last):\n  File "t.py", line 3\nValueError: loss is nan\n',
    )  # fmt: skip
    page = failure_page(SPEC, (root, failure(0, "effect"), failure(1, "stopped")), 1)
    assert page.startswith("Rank 2 failed: ValueError: loss is nan\n")
    order = ["rank 2 of 4, node 1, pid 77, generation 1", "1 of 2 were used", "/runs/r",
             'File "t.py", line 3', "step 9", "Because of that:", "rank 0, node 0: lost its peers",
             "rank 1, node 0: m1"]  # fmt: skip
    positions = [page.index(text) for text in order]
    assert positions == sorted(positions)


def test_the_log_tail_does_not_repeat_the_traceback():
    text = "Traceback (most recent call last):\n  ...\nValueError: x\n"
    root = failure(0, traceback=text, log_tail=f"before\n{text}")
    page = failure_page(SPEC, (root,), 0)
    assert page.count("ValueError: x") == 1
    assert "before" in page


def test_a_signal_is_named():
    root = Failure(rank=0, cause="signal", message="the process was ended by SIGSEGV",
                   exit=Signaled(11, "SIGSEGV"), native_stack="Fatal Python error")  # fmt: skip
    page = failure_page(SPEC, (root,), 0)
    assert "SIGSEGV" in page.splitlines()[0]
    assert "Fatal Python error" in page


def test_the_error_pickles_with_its_records():
    error = WorkerFailedError("page", (failure(1),), {1: ValueError("x")})
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == "page"
    assert copy.root_cause == failure(1)
    assert isinstance(copy.exceptions[1], ValueError)

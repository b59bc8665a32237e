"""Whole runs, crashes and restarts included, without a process and without waiting."""

from __future__ import annotations

import dataclasses
import signal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import lifecycle
from phalanx.lifecycle import ABORT_GRACE_S, UNKILLABLE_S, VERDICT_S, Policy
from phalanx.testing import FakeProcesses
from phalanx.values import commands as do
from phalanx.values import events as ev
from phalanx.values.errors import IllegalTransitionError
from phalanx.values.failures import Exited, Failure, Signaled

SIGKILLED = Signaled(9, "SIGKILL")


def run_of(world_size: int = 4, **options) -> FakeProcesses:
    fakes = {k: options.pop(k) for k in ("stubborn", "unkillable", "slow") if k in options}
    run = FakeProcesses(Policy(world_size=world_size, **options), **fakes)
    run.begin()
    return run


def lost_peer(rank: int) -> Failure:
    return Failure(
        rank=rank, cause="exception", kind="effect", type_name="RuntimeError", message="closed"
    )


def announced(run: FakeProcesses, kind: type) -> list:
    return [event for event in run.announced if isinstance(event, kind)]


def ordered(run: FakeProcesses, kind: type) -> list[int]:
    return [order.rank for order in run.orders if isinstance(order, kind)]


@pytest.fixture(autouse=True)
def invariants(monkeypatch):
    """After every step of every test here the state must make sense."""
    real = lifecycle.step

    def checked(state, event, now):
        after, orders = real(state, event, now)
        ranks = [worker.rank for worker in after.workers]
        assert ranks == list(range(after.policy.world_size))
        if after.ended or after.phase in ("ending", "restarting"):
            assert after.all_gone
            assert lifecycle.next_deadline(after) is None
        if after.phase == "starting":
            assert any(w.phase in ("pending", "starting") for w in after.workers)
        if after.phase == "stopping":
            assert not after.all_gone
            assert all(w.due_s is not None for w in after.workers if not w.gone)
        assert after.restart_count >= after.generation
        return after, orders

    monkeypatch.setattr(lifecycle, "step", checked)


def test_a_run_in_which_everybody_returns_succeeds():
    run = run_of(2)
    assert run.state.phase == "running"
    run.finish(0)
    assert run.state.phase == "running"
    run.finish(1)
    assert run.state.phase == "succeeded"
    assert announced(run, ev.RunEnded) == [ev.RunEnded(state="succeeded", restart_count=0)]


def test_the_group_runs_once_every_worker_has_entered():
    run = run_of(2, slow=frozenset({1}))
    assert run.state.phase == "starting"
    run.start(1)
    assert run.state.phase == "running"
    assert announced(run, ev.GroupRan) == [ev.GroupRan(generation=0)]


def test_a_killed_worker_ends_the_generation_and_a_new_one_starts():
    run = run_of(4, max_restarts=1)
    run.die(2, signal.SIGKILL)
    assert ordered(run, do.StopWorker) == [0, 1, 3]
    assert run.state.generation == 1
    assert run.state.phase == "running"
    assert run.state.restart_count == 1
    (fell,) = announced(run, ev.GroupFell)
    assert fell.restarting
    assert (fell.failure.rank, fell.failure.cause, fell.failure.exit) == (2, "signal", SIGKILLED)


def test_without_a_restart_left_the_run_fails_and_names_the_culprit():
    run = run_of(3, max_restarts=1)
    run.die(1, signal.SIGKILL)
    run.die(0, signal.SIGSEGV)
    assert run.state.phase == "failed"
    first, *others = run.state.failures
    assert (first.rank, first.exit) == (0, Signaled(11, "SIGSEGV"))
    assert {failure.kind for failure in others} == {"stopped"}


def test_restarts_outside_the_window_do_not_count():
    run = run_of(1, max_restarts=1, restart_window_s=60.0)
    run.die(0, signal.SIGKILL)
    run.pass_time(61)
    run.die(0, signal.SIGKILL)
    assert run.state.phase == "running"
    assert run.state.restart_count == 2
    run.die(0, signal.SIGKILL)
    assert run.state.phase == "failed"


def test_a_worker_that_never_entered_is_not_started_again():
    run = run_of(2, max_restarts=5, slow=frozenset({0, 1}))
    run.feed(ev.WorkerStarted(rank=0, pid=1))
    run.feed(ev.WorkerExited(rank=0, exit=Exited(1)))
    assert run.state.phase == "failed"
    assert run.state.failures[0].cause == "startup"
    assert run.state.restart_count == 0


def test_a_worker_that_a_signal_ended_before_it_entered_is_started_again():
    run = run_of(2, max_restarts=5, slow=frozenset({0, 1}))
    run.feed(ev.WorkerStarted(rank=0, pid=1))
    run.feed(ev.WorkerExited(rank=0, exit=SIGKILLED))
    assert run.state.restart_count == 1
    assert run.state.generation == 1


def test_a_start_that_fails_takes_the_other_starts_back():
    run = run_of(3, max_restarts=5, slow=frozenset({0, 1, 2}))
    failure = Failure(rank=0, cause="startup", message="no module", retry=False)
    run.feed(ev.StartFailed(rank=0, failure=failure))
    assert ordered(run, do.CancelStart) == [1, 2]
    assert run.state.phase == "failed"
    assert run.state.failures == (failure,)


def test_workers_that_take_too_long_to_start_fail_the_run():
    run = run_of(2, start_timeout_s=10.0, slow=frozenset({1}))
    run.pass_time(9.9)
    assert run.state.phase == "starting"
    run.pass_time(0.2)
    assert run.state.phase == "failed"
    assert run.state.failures[0].rank == 1
    assert "start_timeout" in run.state.failures[0].message


def test_a_lost_peer_waits_for_the_rank_that_caused_it():
    run = run_of(3)
    run.feed(ev.WorkerRaised(rank=0, failure=lost_peer(0)))
    assert run.state.phase == "running", "the verdict is still open"
    run.die(2, signal.SIGKILL)
    (fell,) = announced(run, ev.GroupFell)
    assert fell.failure.rank == 2
    assert run.state.phase == "stopping", "rank 0 has spoken, and is still on its way out"
    run.feed(ev.WorkerExited(rank=0, exit=Exited(1)))
    assert run.state.phase == "failed"


def test_a_lost_peer_is_the_cause_when_no_other_comes():
    run = run_of(3, stubborn=frozenset({0}))
    run.feed(ev.WorkerRaised(rank=0, failure=lost_peer(0)))
    run.pass_time(VERDICT_S - 0.01)
    assert run.state.phase == "running"
    run.pass_time(0.02)
    assert run.state.phase == "stopping"
    assert announced(run, ev.GroupFell)[0].failure.rank == 0


def test_when_all_ranks_are_victims_the_first_counts_at_once():
    run = run_of(2)
    run.fail(0, lost_peer(0))
    run.fail(1, lost_peer(1))
    assert run.state.phase == "failed"
    assert announced(run, ev.GroupFell)[0].failure.rank == 0


def test_peers_of_a_failed_worker_get_a_second_not_the_grace():
    run = run_of(2, grace_s=30.0, stubborn=frozenset({1}))
    run.die(0, signal.SIGKILL)
    run.pass_time(ABORT_GRACE_S - 0.01)
    assert run.state.phase == "stopping"
    run.pass_time(0.02)
    assert ordered(run, do.KillWorker) == [1]
    assert run.state.phase == "failed"


def test_a_stop_gives_the_grace_then_kills():
    run = run_of(2, grace_s=30.0, stubborn=frozenset({1}))
    run.feed(ev.StopRequested(grace_s=5.0))
    assert do.AnnounceStop() in run.orders
    assert run.state.phase == "stopping"
    run.pass_time(4.9)
    assert ordered(run, do.KillWorker) == []
    run.pass_time(0.2)
    assert ordered(run, do.KillWorker) == [1]
    assert run.state.phase == "stopped"


def test_a_stop_may_be_by_another_signal():
    run = run_of(2)
    run.feed(ev.StopRequested(grace_s=5.0, signum=signal.SIGINT))
    stops = [order for order in run.orders if isinstance(order, do.StopWorker)]
    assert [order.signum for order in stops] == [signal.SIGINT] * 2


@pytest.mark.parametrize("programs", [True, False])
def test_leaving_with_zero_is_how_programs_succeed(programs):
    run = run_of(1, runs_program=programs)
    run.feed(ev.WorkerExited(rank=0, exit=Exited(0)))
    assert run.state.phase == "succeeded"
    assert len(announced(run, ev.Warned)) == (0 if programs else 1)


def test_workers_that_return_on_a_stop_are_not_killed():
    run = run_of(1, stubborn=frozenset({0}))
    run.feed(ev.StopRequested(grace_s=5.0))
    run.finish(0)
    assert run.state.phase == "stopped"
    assert run.state.workers[0].phase == "succeeded"
    assert ordered(run, do.KillWorker) == []


def test_a_stop_takes_the_place_of_a_restart_that_is_under_way():
    run = run_of(2, max_restarts=1, stubborn=frozenset({1}))
    run.die(0, signal.SIGKILL)
    assert run.state.goal == "restart"
    run.feed(ev.StopRequested(grace_s=5.0))
    run.pass_time(ABORT_GRACE_S + 0.1)
    assert run.state.phase == "stopped"
    assert run.state.generation == 0


def test_a_stop_does_not_hide_a_failure():
    run = run_of(2, stubborn=frozenset({1}))
    run.die(0, signal.SIGKILL)
    run.feed(ev.StopRequested(grace_s=5.0))
    run.pass_time(ABORT_GRACE_S + 0.1)
    assert run.state.phase == "failed"


def test_a_kill_does_not_wait():
    run = run_of(3, stubborn=frozenset({0, 1, 2}))
    run.feed(ev.StopRequested(grace_s=1000.0))
    run.feed(ev.KillRequested())
    assert ordered(run, do.KillWorker) == [0, 1, 2]
    assert run.state.phase == "stopped"


def test_a_stop_while_starting_takes_the_starts_back():
    run = run_of(2, slow=frozenset({0, 1}))
    run.feed(ev.StopRequested(grace_s=5.0))
    assert run.state.phase == "stopped"


def test_a_worker_that_comes_into_being_too_late_is_killed():
    state, _ = lifecycle.begin(Policy(world_size=1), 0.0)
    state, orders = lifecycle.step(state, ev.StopRequested(grace_s=5.0), 0.0)
    assert do.CancelStart(rank=0) in orders
    state, orders = lifecycle.step(state, ev.WorkerStarted(rank=0, pid=1), 0.0)
    assert orders == (do.KillWorker(rank=0),)
    state, orders = lifecycle.step(state, ev.WorkerExited(rank=0, exit=SIGKILLED), 0.0)
    assert orders == (do.CloseGeneration(),)


def test_an_unkillable_process_is_reported_and_left():
    run = run_of(2, unkillable=frozenset({1}))
    run.die(0, signal.SIGKILL)
    run.pass_time(ABORT_GRACE_S + UNKILLABLE_S + 0.1)
    assert run.state.phase == "failed"
    assert ordered(run, do.AbandonWorker) == [1]
    assert "state D" in announced(run, ev.Warned)[0].message


def test_an_abort_at_exit_after_the_return_is_a_warning():
    run = run_of(1, max_restarts=3)
    run.finish(0, Signaled(6, "SIGABRT"))
    assert run.state.phase == "succeeded"
    assert run.state.restart_count == 0
    assert "SIGABRT" in announced(run, ev.Warned)[0].message


def test_a_process_that_hangs_after_the_return_is_killed_and_has_returned():
    run = run_of(1, grace_s=10.0)
    run.feed(ev.WorkerReturned(rank=0))
    run.pass_time(10.1)
    assert run.state.phase == "succeeded"
    assert ordered(run, do.KillWorker) == [0]
    assert "was killed" in announced(run, ev.Warned)[0].message


def test_leaving_with_code_0_counts_as_success_and_is_said():
    run = run_of(1)
    run.feed(ev.WorkerExited(rank=0, exit=Exited(0)))
    assert run.state.phase == "succeeded"
    assert "before its function returned" in announced(run, ev.Warned)[0].message


def test_a_program_returns_by_exit_code_0():
    run = run_of(2, runs_program=True)
    run.feed(ev.WorkerExited(rank=0, exit=Exited(0)))
    assert run.state.phase == "running"
    run.feed(ev.WorkerExited(rank=1, exit=Exited(0)))
    assert run.state.phase == "succeeded"
    assert not announced(run, ev.Warned)


def test_a_program_that_ends_by_code_0_while_it_is_stopped_has_succeeded():
    run = run_of(2, runs_program=True, stubborn=frozenset({0, 1}))
    run.feed(ev.StopRequested(grace_s=30.0, reason="SIGTERM"))
    run.feed(ev.WorkerExited(rank=0, exit=Exited(0)))
    run.feed(ev.WorkerExited(rank=1, exit=Signaled(15, "SIGTERM")))
    assert run.state.phase == "stopped"
    assert [worker.phase for worker in run.state.workers] == ["succeeded", "stopped"]
    assert [failure.rank for failure in run.state.failures] == [1]


def test_a_program_that_leaves_by_another_code_is_started_again():
    run = run_of(1, runs_program=True, max_restarts=1)
    run.feed(ev.WorkerExited(rank=0, exit=Exited(3)))
    assert (run.state.phase, run.state.generation) == ("running", 1)


def test_restart_worker_replaces_only_the_fallen_one():
    run = run_of(3, max_restarts=2, restart="worker")
    run.die(1, signal.SIGKILL)
    assert run.state.phase == "running"
    assert (run.state.generation, run.state.restart_count) == (0, 1)
    assert ordered(run, do.StopWorker) == []
    assert ordered(run, do.StartWorker) == [0, 1, 2, 1]
    run.fail(2)
    assert run.state.restart_count == 2
    run.fail(2)
    assert run.state.phase == "failed"


def test_restart_worker_with_a_process_group_is_an_error_that_says_so():
    run = run_of(2, max_restarts=2, restart="worker")
    run.feed(ev.StoreContacted())
    run.die(1, signal.SIGKILL)
    assert run.state.phase == "failed"
    assert 'restart="group"' in run.state.failures[0].message


def test_a_restart_on_request_uses_up_nothing():
    run = run_of(2, max_restarts=0)
    run.feed(ev.RestartRequested(grace_s=1.0))
    assert run.state.phase == "running"
    assert (run.state.generation, run.state.restart_count) == (1, 1)
    assert run.state.restarted_at == ()


def test_a_return_value_that_can_not_travel_is_not_tried_again():
    run = run_of(1, max_restarts=5)
    run.fail(0, Failure(rank=0, cause="exception", message="can't pickle", retry=False))
    assert run.state.phase == "failed"


def test_an_exit_completes_the_record_of_the_rank_that_raised():
    run = run_of(1)
    run.fail(0)
    assert run.state.failures[0].exit == Exited(1)


@pytest.mark.parametrize(
    "event",
    [
        ev.WorkerStarted(rank=0, pid=7),
        ev.WorkerEntered(rank=0),
        ev.WorkerReturned(rank=9),
        ev.GenerationClosed(generation=0),
        ev.StartCancelled(rank=0),
    ],
)
def test_an_illegal_pair_raises_with_the_story_and_changes_nothing(event):
    run = run_of(2)
    before = run.state
    with pytest.raises(IllegalTransitionError) as caught:
        lifecycle.step(run.state, event, run.clock.now)
    assert run.state == before
    assert caught.value.story[-1] == "WorkerEntered(1)"
    assert type(event).__name__ in str(caught.value)


def test_a_recorded_log_replays():
    run = run_of(3, max_restarts=1)
    run.die(1, signal.SIGKILL)
    for rank in range(3):
        run.finish(rank)
    lines = [msgspec.json.encode(event) for event in run.fed]
    state, _ = lifecycle.begin(run.policy, 0.0)
    for line in lines:
        state, _ = lifecycle.step(state, msgspec.json.decode(line, type=ev.Event), 0.0)
    assert state.phase == "succeeded"
    assert state.restart_count == 1


def test_a_hang_is_a_failure_of_that_rank_and_sigkill_ends_it():
    run = run_of(3, stubborn=frozenset({1}))
    run.hang(1)
    assert ordered(run, do.KillWorker) == [1]
    assert ordered(run, do.StopWorker) == [0, 2]
    assert run.state.phase == "failed"
    first, *others = run.state.failures
    assert (first.rank, first.cause, first.exit) == (1, "hang", SIGKILLED)
    assert {failure.kind for failure in others} == {"stopped"}


def test_a_hang_is_answered_by_a_restart_while_one_is_left():
    run = run_of(3, max_restarts=1)
    run.hang(2)
    assert (run.state.phase, run.state.generation, run.state.restart_count) == ("running", 1, 1)
    run.hang(2)
    assert run.state.phase == "failed"


def test_only_the_rank_that_hangs_is_started_again_where_that_was_asked_for():
    run = run_of(3, max_restarts=1, restart="worker")
    run.hang(2)
    assert ordered(run, do.KillWorker) == [2]
    assert ordered(run, do.StopWorker) == []
    assert ordered(run, do.StartWorker) == [0, 1, 2, 2]
    assert run.state.generation == 0


def test_a_hang_that_is_noticed_too_late_is_none():
    run = run_of(2, stubborn=frozenset({0, 1}))
    stale = Failure(rank=0, pid=1, cause="hang", message="of an earlier process")
    run.feed(ev.WorkerHung(rank=0, failure=stale))
    run.feed(ev.WorkerReturned(rank=1))
    run.hang(1)
    assert run.state.phase == "running"
    run.feed(ev.StopRequested(grace_s=30))
    run.hang(0)
    assert run.state.phase == "stopping"
    assert ordered(run, do.KillWorker) == []


@pytest.mark.parametrize("restart", ["group", "worker"])
def test_what_a_rank_says_after_its_hang_was_noticed_changes_nothing(restart):
    said = Failure(rank=1, cause="exception", message="timeout of a collective")
    for word in (ev.WorkerReturned(rank=1), ev.WorkerRaised(rank=1, failure=said)):
        run = run_of(2, unkillable=frozenset({1}), max_restarts=1, restart=restart)
        run.hang(1)
        run.feed(word)
        run.feed(ev.WorkerExited(rank=1, exit=SIGKILLED))
        assert run.state.phase == "running"
        assert run.state.restart_count == 1


def test_a_rank_that_enters_after_its_time_to_start_was_over_does_no_harm():
    run = run_of(2, start_timeout_s=5.0, slow=frozenset({1}), unkillable=frozenset({1}))
    run.feed(ev.WorkerStarted(rank=1, pid=7))
    run.pass_time(5)
    run.feed(ev.WorkerEntered(rank=1))
    run.feed(ev.WorkerReturned(rank=1))
    run.feed(ev.WorkerExited(rank=1, exit=Exited(0)))
    assert run.state.phase == "failed"


def test_the_end_of_a_helper_is_a_failure_of_the_whole_run():
    run = run_of(2)
    run.fail(0, lost_peer(0))  # which its end brought about, and which was noticed first
    run.lose_helper(SIGKILLED)
    assert run.state.phase == "failed"
    root = next(f for f in run.state.failures if f.kind == "primary")
    assert (root.rank, root.cause, root.exit) == (-1, "helper", SIGKILLED)
    assert announced(run, ev.GroupFell)[0].failure == root


def test_the_end_of_a_helper_uses_up_a_restart():
    run = run_of(2, max_restarts=1)
    run.lose_helper(SIGKILLED)
    assert (run.state.phase, run.state.generation, run.state.restart_count) == ("running", 1, 1)
    run.lose_helper(SIGKILLED)
    assert run.state.phase == "failed"


@pytest.mark.parametrize(("exit_", "phase"), [(SIGKILLED, "starting"), (Exited(1), "failed")])
def test_a_helper_that_leaves_by_itself_at_the_start_would_do_so_again(exit_, phase):
    run = run_of(2, max_restarts=3, slow=frozenset({1}))
    run.lose_helper(exit_)
    assert run.state.phase == phase
    if phase == "starting":
        assert run.state.generation == 1


def test_the_end_of_a_helper_does_not_matter_any_more_when_all_have_returned():
    run = run_of(1)
    run.feed(ev.WorkerReturned(rank=0))
    run.lose_helper(SIGKILLED)
    run.feed(ev.WorkerExited(rank=0, exit=Exited(0)))
    assert run.state.phase == "succeeded"
    assert announced(run, ev.Warned)[0].message == "the store ended"


def test_where_ranks_are_started_again_alone_each_falls_for_itself():
    run = run_of(2, max_restarts=2, restart="worker")
    run.lose_helper(SIGKILLED)
    for rank in range(2):
        run.die(rank, signal.SIGKILL)
    assert (run.state.phase, run.state.restart_count) == ("running", 2)


@pytest.mark.parametrize("stubborn", [{0, 1}, set()])
def test_the_end_of_a_helper_is_of_no_interest_while_and_after_all_are_ended(stubborn):
    run = run_of(2, stubborn=frozenset(stubborn))
    run.feed(ev.StopRequested(grace_s=3.0))
    run.lose_helper(SIGKILLED)
    run.pass_time(4)
    run.lose_helper(SIGKILLED)
    assert run.state.phase == "stopped"


_WISHES = (
    ev.StopRequested(grace_s=3.0),
    ev.KillRequested(),
    ev.RestartRequested(grace_s=2.0),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_happens_a_run_comes_to_an_end(data):
    """Random faults, wishes and delays: never an illegal pair, and always an end."""
    world_size = data.draw(st.integers(1, 4))
    ranks = st.frozensets(st.integers(0, world_size - 1))
    run = FakeProcesses(
        Policy(
            world_size=world_size,
            max_restarts=data.draw(st.integers(0, 3)),
            restart=data.draw(st.sampled_from(["group", "worker"])),
        ),
        stubborn=data.draw(ranks),
        unkillable=data.draw(ranks),
        slow=data.draw(ranks),
    )
    run.begin()
    for _ in range(data.draw(st.integers(0, 12))):
        _disturb(run, data)
    run.feed(ev.KillRequested())
    run.pass_time(UNKILLABLE_S * 4)
    assert run.state.ended
    assert isinstance(run.announced[-1], ev.RunEnded)


def _disturb(run: FakeProcesses, data) -> None:
    living = [w for w in run.state.workers if w.alive]
    choices = ["die", "fail", "lost", "finish", "hang", "helper", "wish", "time"]
    choice = data.draw(st.sampled_from(choices))
    if choice == "helper":
        run.lose_helper(data.draw(st.sampled_from([SIGKILLED, Exited(1)])))
    elif choice == "wish":
        run.feed(data.draw(st.sampled_from(_WISHES)))
    elif choice == "time":
        run.pass_time(data.draw(st.floats(0, 40)))
    elif living:
        worker = data.draw(st.sampled_from(living))
        if choice == "die":
            run.die(worker.rank, signal.SIGKILL)
        elif worker.phase == "running" and choice == "finish":
            run.finish(worker.rank)
        elif choice == "hang":
            run.hang(worker.rank)
        elif worker.phase == "running":
            run.fail(worker.rank, lost_peer(worker.rank) if choice == "lost" else None)


def test_states_are_values():
    state, _ = lifecycle.begin(Policy(world_size=2), 0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.phase = "failed"  # type: ignore[misc]

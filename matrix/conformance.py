"""Which tests every pair of Python and torch must pass, by what they prove.

They use real processes and take a minute or two together. A name without brackets stands for
all cases of its test.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

AREAS: dict[str, tuple[str, ...]] = {
    "starts": (
        "tests/process/test_runs.py::test_arguments_go_out_and_values_come_back_by_rank",
        "tests/process/test_runs.py::test_an_exception_names_the_rank_and_brings_its_traceback",
        "tests/ranks/test_groups.py::test_init_process_group_just_works",
        "tests/ranks/test_groups.py::test_the_contexts_group_and_torchs_do_not_collide",
        "tests/ranks/test_store_host.py",
    ),
    "restart": (
        "tests/ranks/test_groups.py::test_the_group_comes_back_again_and_again",
        "tests/ranks/test_groups.py::test_every_generation_has_a_fresh_store_on_the_same_port",
        "tests/ranks/test_groups.py::test_the_culprit_is_named_not_its_victims",
        "tests/ranks/test_groups.py::test_ddp_and_loader_workers_run_unchanged",
        "tests/ranks/test_groups.py::test_all_ranks_stop_at_the_same_step",
    ),
    "store": (
        "tests/unit/test_store_layout.py::test_every_dtype_comes_back_bit_by_bit",
        "tests/ranks/test_tensors.py::test_every_rank_reads_what_another_put",
        "tests/ranks/test_tensors.py::test_no_addition_is_lost",
        "tests/ranks/test_tensors.py::test_values_survive_a_worker",
        (
            "tests/ranks/test_tensors.py::"
            "test_resuming_from_the_newest_version_that_all_ranks_have_committed"
        ),
    ),
    "sync": (
        "tests/ranks/test_synchronize.py::test_it_trains_as_ddp_does[gloo-mlp-2]",
        "tests/ranks/test_synchronize.py::test_it_trains_as_ddp_does[shm-transformer-4]",
        "tests/ranks/test_synchronize.py::test_targets",
        "tests/ranks/test_synchronize.py::test_accumulation_and_clipping_before_the_call",
        "tests/ranks/test_synchronize.py::test_a_step_with_a_gradient_that_nobody_averaged_raises",
    ),
    "shm": (
        "tests/ranks/test_shm_group.py::test_reductions",
        "tests/ranks/test_shm_group.py::test_movements",
        "tests/ranks/test_shm_group.py::test_messages",
        "tests/ranks/test_shm_group.py::test_torch_may_ask_the_group_for_its_backend",
        "tests/ranks/test_shm_group.py::test_any_sequence_gives_what_gloo_gives",
        "tests/ranks/test_shm_group.py::test_ddp_gives_what_it_gives_over_gloo",
        "tests/ranks/test_shm_group.py::test_fsdp2_runs_and_all_ranks_agree",
        "tests/ranks/test_shm_group.py::test_auto_takes_it_on_one_machine",
    ),
    "run": (
        "tests/unit/test_cli.py::test_torchruns_options_are_all_there",
        (
            "tests/process/test_run_command.py::"
            "test_a_script_has_the_context_and_torchruns_environment"
        ),
        "tests/process/test_run_command.py::test_the_root_cause_gives_the_exit_code",
        "tests/process/test_run_command.py::test_a_script_is_started_again",
        "tests/process/test_run_command.py::test_redirects_tee_and_filters_by_rank_and_stream",
        "tests/process/test_run_command.py::test_what_stands_before_lines_can_be_chosen",
        "tests/process/test_run_command.py::test_record_of_torchelastic_names_the_rank_that_began_it",
        "tests/process/test_run_command.py::test_real_interpreters_meet_in_one_group",
    ),
    "elastic": (
        "tests/process/test_elastic.py::test_the_names_and_the_signature_are_torchs",
        "tests/process/test_elastic.py::test_values_are_torchs_own_classes",
        "tests/process/test_elastic.py::test_functions_return_by_local_rank",
        "tests/process/test_elastic.py::test_a_process_group_by_the_ranks_own_variables",
        "tests/process/test_elastic.py::test_an_exception_is_in_the_error_file",
        "tests/process/test_elastic.py::test_streams_go_to_files_to_the_console_or_to_both",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How an area's tests ended."""

    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: int = 0

    def with_case(self, name: str, outcome: str) -> Tally:
        """Count one more."""
        return Tally(
            passed=self.passed + (outcome == "passed"),
            failed=(*self.failed, name) if outcome == "failed" else self.failed,
            skipped=self.skipped + (outcome == "skipped"),
        )


def all_tests() -> list[str]:
    """Return what pytest is asked for."""
    return [test for tests in AREAS.values() for test in tests]


def read_report(path: Path) -> dict[str, Tally]:
    """Return the tally of each area, from pytest's JUnit file.

    A test that was asked for and that the report does not have counts as failed: pytest found
    no such test, or was ended before it came to it.
    """
    tallies = {area: Tally() for area in AREAS}
    missing = {test: area for area, tests in AREAS.items() for test in tests}
    cases = ET.parse(path).getroot().iter("testcase") if path.exists() else ()  # noqa: S314
    for case in cases:
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = f"{file}::{case.get('name')}"
        wanted = next(
            (test for test in (name, name.partition("[")[0], file) if area_of(test)), None
        )
        if wanted is None:  # a file that could not be collected
            continue
        missing.pop(wanted, None)
        area = area_of(wanted)
        tallies[area] = tallies[area].with_case(name, _outcome(case))
    for test, area in missing.items():
        tallies[area] = tallies[area].with_case(f"{test} (did not run)", "failed")
    return tallies


def area_of(test: str) -> str:
    """Return the area that asks for a test; empty: none."""
    return next((area for area, tests in AREAS.items() if test in tests), "")


def _outcome(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"

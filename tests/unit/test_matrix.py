"""The tool behind `make matrix`: what it counts, and that its page tells what was found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from matrix import report
from matrix.conformance import AREAS, Tally, all_tests, read_report
from matrix.environments import DEFAULT_PAIRS, Pair, PairError, find_python

ROOT = Path(__file__).parents[2]


def result(**changes) -> report.Result:
    tallies = {area: Tally(passed=2) for area in AREAS}
    fields = {"date": "2026-01-31", "phalanx": "abc", "python": "3.11.7", "torch": "2.13.0"}
    return report.Result(**{**fields, "tallies": tallies, **changes})


@pytest.mark.parametrize("test", all_tests())
def test_every_test_that_is_asked_for_is_there(test):
    file, _, name = test.partition("::")
    text, name = (ROOT / file).read_text(), name.partition("[")[0]
    assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), f"{test} is gone"


def test_all_promised_pythons_are_tested():
    promised = {f"3.{minor}" for minor in range(10, 14)}
    assert {pair.python for pair in DEFAULT_PAIRS} == promised


def test_the_page_is_what_was_found():
    assert report.PAGE.read_text() == report.render(report.load())


def test_a_report_is_counted_by_area_and_what_is_missing_has_failed(tmp_path):
    path = tmp_path / "report.xml"
    runs = "tests.process.test_runs"
    name = "test_arguments_go_out_and_values_come_back_by_rank"
    path.write_text(
        "<testsuites><testsuite>"
        f'<testcase classname="{runs}" name="{name}[spawn]"/>'
        f'<testcase classname="{runs}" name="{name}[fork]"><failure/></testcase>'
        '<testcase classname="tests.ranks.test_store_host" name="test_any"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    tally = read_report(path)["starts"]
    assert (tally.passed, tally.skipped) == (1, 1)
    assert f"tests/process/test_runs.py::{name}[fork]" in tally.failed
    assert len(tally.failed) == len(AREAS["starts"]) - 1, "its other tests did not run"
    for area, tests in AREAS.items():
        if area != "starts":
            assert len(read_report(path)[area].failed) == len(tests)


def test_no_report_at_all_is_a_failure_of_everything(tmp_path):
    tallies = read_report(tmp_path / "none.xml")
    assert not result(tallies=tallies).works


def test_a_failed_pair_stands_in_the_table_with_its_tests(tmp_path):
    pair, other = Pair.parse("3.11:2.13.0"), Pair.parse("3.9:2.6.0")
    failed = {"starts": Tally(passed=3, failed=("tests/a.py::test_b",))}
    results = {
        pair: result(tallies=failed),
        other: result(python="3.9", why_not="there is no Python 3.9 here", tallies={}),
    }
    report.save(results, tmp_path / "results.json", tmp_path / "support.md")
    assert report.load(tmp_path / "results.json") == results
    page = (tmp_path / "support.md").read_text()
    assert "| 3.11.7 | 2.13.0 | **no** | **1 failed** of 4 |" in page
    assert "- `tests/a.py::test_b`" in page
    assert "| 3.9 | 2.13.0 | not tested |" in page
    assert "was not tested: there is no Python 3.9 here." in page


def test_pairs_that_are_none():
    with pytest.raises(ValueError, match=r"like 3\.11:2\.13\.0"):
        Pair.parse("3.11")
    with pytest.raises(PairError, match=r"no Python 3\.99 here"):
        find_python("3.99")

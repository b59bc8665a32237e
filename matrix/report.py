"""What is known about each pair, as a file of results and as the page docs/support.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from matrix.conformance import AREAS, Tally
from matrix.environments import DEFAULT_PAIRS, ROOT, Pair

PAGE = ROOT / "docs" / "support.md"
RESULTS = ROOT / "matrix" / "results.json"

_HEAD = """\
# Which versions work

<!-- written by `make matrix`; change matrix/report.py, not this page -->

Phalanx promises Python 3.10 to 3.13 and torch 2.6 or newer, on Linux. Each pair below had an
environment of its own, in which the built package was installed and a part of the test suite ran,
with real processes and real process groups: starts, restarts, the tensor store, `synchronize()`,
the `shm` backend, `phalanx run` and `phalanx.elastic`. A cell says how many tests passed.

"""
_NOTES = """
Torch 2.6 differs: the group's store is served without libuv, which can't take over a socket there;
torch's sockets ask the name server about each address that they connect to, so a slow one makes
starts slow; and there is no FSDP2 on the CPU.

Other pairs may well work: `make matrix PAIRS="3.12:2.10.0"` tells. It installs 1–7 GB for each pair
and deletes them again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a pair did.

    Attributes:
        date: When it was tested, as ``2026-01-31``.
        phalanx: The commit that was tested.
        python: The full version.
        torch: The full version.
        tallies: By area.
        why_not: Why nothing was tested; empty: it was.
    """

    date: str
    phalanx: str
    python: str
    torch: str
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    why_not: str = ""

    @property
    def works(self) -> bool:
        """Whether all that is asked for passed."""
        return not self.why_not and not any(tally.failed for tally in self.tallies.values())


Results = dict[Pair, Result]


def load(path: Path = RESULTS) -> Results:
    """Return what earlier calls have found."""
    if not path.exists():
        return {}
    return {Pair.parse(text): _result(one) for text, one in json.loads(path.read_text()).items()}


def _result(one: dict[str, object]) -> Result:
    tallies: dict[str, dict[str, object]] = one.pop("tallies")  # type: ignore[assignment]
    for tally in tallies.values():
        tally["failed"] = tuple(tally["failed"])  # type: ignore[arg-type]
    made = {area: Tally(**tally) for area, tally in tallies.items()}  # type: ignore[arg-type]
    return Result(**one, tallies=made)  # type: ignore[arg-type]


def save(results: Results, path: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the results, and the page that shows them."""
    pairs = sorted(results, key=_by_version)
    found = {str(pair): asdict(results[pair]) for pair in pairs}
    path.write_text(json.dumps(found, indent=1) + "\n")
    page.write_text(render(results))


def render(results: Results) -> str:
    """Return the page."""
    pairs = sorted(results, key=_by_version)
    lines = [
        "| Python | torch | works | " + " | ".join(AREAS) + " | tested on | commit |",
        "| --- " * (len(AREAS) + 5) + "|",
        *(_row(results[pair]) for pair in pairs),
    ]
    found = _failures(results[pair] for pair in pairs) + _missing(results)
    return _HEAD + "\n".join(lines) + "\n" + found + _NOTES


def _missing(results: Results) -> str:
    missing = [f"Python {p.python} with torch {p.torch}" for p in DEFAULT_PAIRS if p not in results]
    return f"\nNot tested yet: {', '.join(missing)}.\n" if missing else ""


def _row(result: Result) -> str:
    if result.why_not:
        works, cells = "not tested", ["–"] * len(AREAS)
    else:
        works = "yes" if result.works else "**no**"
        cells = [_cell(result.tallies.get(area)) for area in AREAS]
    words = (result.python, result.torch, works, *cells, result.date, result.phalanx)
    return "| " + " | ".join(words) + " |"


def _cell(tally: Tally | None) -> str:
    if tally is None:
        return "–"
    skipped = f", {tally.skipped} skipped" if tally.skipped else ""
    if tally.failed:
        return f"**{len(tally.failed)} failed** of {tally.passed + len(tally.failed)}{skipped}"
    return f"{tally.passed}{skipped}"


def _failures(results: Iterable[Result]) -> str:
    text = ""
    for result in results:
        name = f"Python {result.python} with torch {result.torch}"
        if result.why_not:
            text += f"\n{name} was not tested: {result.why_not}.\n"
        failed = [test for tally in result.tallies.values() for test in tally.failed]
        if failed:
            text += f"\nWhat fails on {name}:\n\n" + "".join(f"- `{test}`\n" for test in failed)
    return text


def _by_version(pair: Pair) -> list[list[int]]:
    return [
        [int(part) for part in text.split(".") if part.isdigit()]
        for text in (pair.python, pair.torch)
    ]

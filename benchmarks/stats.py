"""Samples, and the table that is printed of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Row:
    """One line of the table: what was measured, in which unit, and the samples."""

    what: str
    unit: str = "s"
    samples: list[float] = field(default_factory=list)
    target: str = ""
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def __str__(self) -> str:
        if not self.samples:
            return f"| {self.what} | – | – | 0 | {self.target} | {self.note} |"
        low, high = min(self.samples), max(self.samples)
        spread = f"{low:.3f}–{high:.3f}"
        count = len(self.samples)
        return (
            f"| {self.what} | {self.median:.3f} {self.unit} | {spread} | {count} "
            f"| {self.target} | {self.note} |"
        )


HEADER = "| what | median | min–max | runs | target | note |\n| --- | --- | --- | --- | --- | --- |"


def show(title: str, rows: list[Row]) -> None:
    """Print a section as soon as it is measured."""
    print(f"\n## {title}\n\n{HEADER}")
    for row in rows:
        print(row, flush=True)

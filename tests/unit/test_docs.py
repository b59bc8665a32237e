"""The documentation tells the truth about the code, as far as a machine can check it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import phalanx
from phalanx.launcher.context import LauncherContext
from phalanx.lifecycle import table_as_markdown
from phalanx.values.tensors import SharedTensors
from phalanx.worker.context import WorkerContext

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- lifecycle table: checked against the code by tests/unit/test_docs.py -->\n"
END = "<!-- end of lifecycle table -->"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_the_lifecycles_table_is_the_codes():
    text = (ROOT / "docs" / "architecture.md").read_text()
    written = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert written == table_as_markdown(), "put the output of table_as_markdown() there"


def test_links_and_files_that_are_named_exist():
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} → {target}"
        for path in re.findall(r"`((?:tests|examples|benchmarks|docs)/[\w/.]+)`", text):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: {target}"


def test_a_newcomer_reads_the_readme_in_three_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_every_public_name_is_documented():
    for name in phalanx.__all__:
        assert inspect.getdoc(getattr(phalanx, name)), name


def test_the_reference_has_every_public_name():
    words = set(re.findall(r"\w+", (ROOT / "docs" / "api.md").read_text()))
    assert set(phalanx.__all__) - words == set()


def test_both_sides_fill_in_the_surface():
    """Whatever the surface leaves open, one side or the other implements."""
    surface = vars(SharedTensors) | vars(phalanx.SubprocessContext)
    for name, member in surface.items():
        if name.startswith("__") or name == "_tensors":
            continue
        source = inspect.getsource(member.fget if isinstance(member, property) else member)
        if "_only_in_" in source or "NotImplementedError" in source:
            assert name in vars(LauncherContext) | vars(WorkerContext), name
        assert name.startswith("_") or inspect.getdoc(member), name

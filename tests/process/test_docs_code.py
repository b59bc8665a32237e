"""The code of the documentation does what the documentation says.

Each Python block is executed by itself, in `__main__`; the blocks of a page share a process, so
that torch is imported once per page. ``print(…)  # text`` must print the text. A block that begins
with ``# train.py`` is that file: shell blocks of the page run it. What they name and the page does
not show is only parsed.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from phalanx.cli import options as run_options
from tests.conftest import Script, end_scripts

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
EXPECTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
NOT_RUN = {"text"}
"""Kinds of blocks that are no code."""

RUN_BLOCKS = """
import sys
for _number, _path in enumerate(sys.argv[1:]):
    _before = dict(globals())
    print(f"block {_number}", flush=True)
    exec(compile(open(_path).read(), _path, "exec"), globals())
    for _name in set(globals()) - set(_before) - {"_before"}:
        del globals()[_name]
print("block end", flush=True)
"""


def blocks(page: Path, kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == kind]


def programs(page: Path) -> list[str]:
    """The Python blocks of a page that are no files for its shell blocks."""
    return [text for text in blocks(page, "python") if not FILE.match(text)]


def commands(page: Path) -> list[list[str]]:
    """The arguments of each ``phalanx run`` that a page's shell blocks have."""
    lines = [line for text in blocks(page, "sh") for line in text.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[2:] for line in words if line[:2] == ["phalanx", "run"]]


def named(paths: list[Path]) -> list:
    return [pytest.param(path, id=path.name) for path in paths]


def test_every_block_says_what_it_is():
    for page in PAGES:
        kinds = {kind for kind, _ in BLOCK.findall(page.read_text())}
        assert kinds <= {"python", "sh"} | NOT_RUN, page.name


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", named([p for p in PAGES if programs(p)]))
def test_python_blocks_run_and_print_what_they_say(page, tmp_path):
    code = programs(page)
    paths = [tmp_path / f"block-{number}.py" for number in range(len(code))]
    for path, text in zip(paths, code, strict=True):
        path.write_text(text)
    script = Script([sys.executable, "-c", RUN_BLOCKS, *map(str, paths)], tmp_path)
    try:
        out = script.finish(150)
    finally:
        end_scripts([script])
    assert out.returncode == 0, f"{page.name}:\n{out.stdout}\n{out.stderr}"
    printed = re.split(r"^block \w+\n", out.stdout, flags=re.MULTILINE)[1:-1]
    for text, result in zip(code, printed, strict=True):
        for expected in EXPECTED.findall(text):
            assert expected in result.splitlines(), f"{page.name}:\n{text}\nprinted:\n{result}"


@pytest.mark.parametrize("page", named([p for p in PAGES if commands(p)]))
def test_commands_are_understood(page):
    for words in commands(page):
        assert run_options.parse(words, {}) is not None, words


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "page", named([p for p in PAGES if any(FILE.match(b) for b in blocks(p, "python"))])
)
def test_commands_run_the_files_that_the_page_shows(page, tmp_path):
    files = {found[1]: text for text in blocks(page, "python") if (found := FILE.match(text))}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ran = 0
    for words in commands(page):
        if not files.keys() & set(words):
            continue
        script = Script([sys.executable, "-m", "phalanx", "run", *words], tmp_path)
        try:
            out = script.finish(90)
        finally:
            end_scripts([script])
        assert out.returncode == 0, f"{words}:\n{out.stdout}\n{out.stderr}"
        ran += 1
    assert ran == len(files), f"a file of {page.name} that no command runs"


def test_first_lines_are_something_to_paste():
    """A page answers one question, and begins with an answer that can be pasted."""
    for name in ("guide", "command", "torchrun", "performance"):
        beginning = (ROOT / "docs" / f"{name}.md").read_text().partition("\n## ")[0]
        assert beginning.startswith("# "), name
        assert re.search(r"^```(python|sh)$", beginning, re.MULTILINE), name

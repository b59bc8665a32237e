"""Record the demo: run it, and draw what it prints as `docs/demo.svg`, line by line, in its time.

Silences of more than a second (imports, mostly) are shown as one of a second.

    .venv/bin/python docs/make_demo_svg.py

Where a viewer does not animate, all lines are there at once.
"""

from __future__ import annotations

import html
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO = ("examples/train_digits.py", "--kill-rank", "2", "--kill-step", "75")
LINE_HEIGHT = 19
LONGEST_SILENCE_S = 1.0
KEEP_EPOCHS = range(6)  # later ones look the same

FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 {height}" width="660" height="{height}">
<title>make demo; silences of more than a second are cut to one</title>
<style>
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d8dee9;
  white-space: pre; animation: show 1ms backwards; }}
.ours {{ fill: #88c0d0; }} .fall {{ fill: #ff7b72; }} .good {{ fill: #a3be8c; }}
@keyframes show {{ from {{ opacity: 0; }} to {{ opacity: 1; }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none; }} }}
</style>
<rect width="660" height="{height}" rx="8" fill="#1b1f27"/>
{lines}
</svg>
"""


def record() -> list[tuple[float, str]]:
    """Run the demo; return its lines with the seconds at which they came."""
    began = time.monotonic()
    command = [sys.executable, "-u", *DEMO]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as demo:
        assert demo.stdout is not None
        lines = [(time.monotonic() - began, line.rstrip("\n")) for line in demo.stdout]
    if demo.returncode:
        raise SystemExit(f"the demo failed with {demo.returncode}: run `make demo` to see why")
    return lines


def shorten(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Put an ellipsis in place of the later epochs."""
    short: list[tuple[float, str]] = [(0.0, "$ make demo")]
    for at, line in lines:
        words = line.split()
        if words[2:3] == ["epoch"] and int(words[3]) not in KEEP_EPOCHS:
            if short[-1][1] != "…":
                short.append((at, "…"))
            continue
        short.append((at, line))
    return short


def cut_silences(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Move lines forward, so that none comes long after the one before it."""
    moved: list[tuple[float, str]] = []
    before = at_now = 0.0
    for at, line in lines:
        at_now += min(at - before, LONGEST_SILENCE_S)
        before = at
        moved.append((at_now, line))
    return moved


def style(line: str) -> str:
    """Return the class of a line: what it is about."""
    if "SIGKILL" in line:
        return "fall"
    if line.startswith(("phalanx:", "$")):
        return "ours"
    return "good" if line.startswith(("test accuracy", "restarts", "recovery", "lost")) else ""


def draw(lines: list[tuple[float, str]]) -> str:
    """Return the picture."""
    texts = [
        f'<text x="16" y="{28 + number * LINE_HEIGHT}" class="{style(line)}" '
        f'style="animation-delay:{at:.2f}s">{html.escape(line)}</text>'
        for number, (at, line) in enumerate(lines)
    ]
    return FRAME.format(height=len(lines) * LINE_HEIGHT + 26, lines="\n".join(texts))


if __name__ == "__main__":
    (ROOT / "docs" / "demo.svg").write_text(draw(cut_silences(shorten(record()))), encoding="utf-8")

"""4 workers × 200,000 lines of 100 bytes, with prefixes, into a pipe that is read."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.programs import clean_environment
from benchmarks.stats import Row, show

_LINES = 200_000
_RANKS = 4

_FLOOD = f'''
def flood(rank):
    """Print the lines; the first carries the time at which it was printed."""
    import time
    print(f"T {{rank}} {{time.time()}}")
    filler = "x" * (100 - len(f"L {{rank}} {{0:06d}} ") - 1)
    for number in range({_LINES}):
        print(f"L {{rank}} {{number:06d}} {{filler}}")
'''

_PHALANX = (
    _FLOOD
    + """
import sys
from phalanx import start_processes
def work(rank, world_size):
    sys.stdout.reconfigure(line_buffering=sys.argv[1] == "line")
    flood(rank)
    sys.stdout.flush()
start_processes(work, 4, preload=())
"""
)

_TORCHRUN = (
    _FLOOD
    + """
import os, sys
if sys.argv[1] != "default":
    sys.stdout.reconfigure(line_buffering=sys.argv[1] == "line", write_through=False)
flood(int(os.environ["RANK"]))
"""
)

_PUMP = '''
"""A bare pump: 4 pipes, one selector, whole lines, a prefix, one writer."""
import os, selectors, subprocess, sys
selector = selectors.DefaultSelector()
for rank in range(4):
    process = subprocess.Popen(
        [sys.executable, sys.argv[2], sys.argv[1]], stdout=subprocess.PIPE,
        env=os.environ | {"RANK": str(rank)},
    )
    selector.register(process.stdout, selectors.EVENT_READ, [b"[rank %d] " % rank, b""])
while selector.get_map():
    for key, _ in selector.select():
        data = os.read(key.fd, 65536)
        if not data:
            selector.unregister(key.fileobj)
            continue
        prefix, rest = key.data
        whole, newline, key.data[1] = (rest + data).rpartition(b"\\n")
        if newline:
            out = memoryview(prefix + whole.replace(b"\\n", b"\\n" + prefix) + b"\\n")
            while out:
                out = out[os.write(1, out):]
'''


def flood(runs: int) -> None:
    """First print → end of the output; lost, torn and doubled lines are counted."""
    for buffering in ("line", "block"):
        pump = Row(f"bare pump over 4 pipes, {buffering}-buffered workers")
        ours = Row(f"Phalanx, {buffering}-buffered workers", target="≤ 1.3 × the pump")
        theirs = Row(f"torchrun --tee 3, {buffering}-buffered workers")
        for _ in range(runs):
            for kind, row in (("pump", pump), ("phalanx", ours), ("torchrun", theirs)):
                seconds, bad = _measure(kind, buffering)
                row.samples.append(seconds)
                row.note = f"{bad:,} of {_LINES * _RANKS:,} lines damaged in the last run"
        ours.note = f"{ours.median / pump.median:.2f} × the pump; {ours.note}"
        title = "Logs: 4 × 200,000 lines through a pipe"
        if buffering == "line":
            title += " (workers' standard output under Phalanx is line-buffered by default)"
        show(title, [pump, ours, theirs])
    _commands(runs)


def _commands(runs: int) -> None:
    """The same script by either command, buffered as the command has it."""
    ours = Row("phalanx run", target="≤ 0.33 × torchrun")
    theirs = Row("torchrun --tee 3")
    for _ in range(runs):
        for kind, row in (("phalanx run", ours), ("torchrun", theirs)):
            seconds, bad = _measure(kind, "default")
            row.samples.append(seconds)
            row.note = f"{bad:,} of {_LINES * _RANKS:,} lines damaged in the last run"
    ours.note = f"{ours.median / theirs.median:.2f} × torchrun; {ours.note}"
    show("Logs: the same script by either command (a line a write; torchrun: two)", [ours, theirs])


def _measure(kind: str, buffering: str) -> tuple[float, int]:
    with tempfile.TemporaryDirectory() as folder:
        script, pump = Path(folder, "script.py"), Path(folder, "pump.py")
        script.write_text(_PHALANX if kind == "phalanx" else _TORCHRUN)
        pump.write_text(_PUMP)
        commands = {
            "phalanx": [str(script), buffering],
            "pump": [str(pump), buffering, str(script)],
            "phalanx run": ["-m", "phalanx", "run", "--nproc-per-node=4", str(script), buffering],
            "torchrun": [
                "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4",
                "--tee=3", f"--log-dir={folder}/logs", str(script), buffering,
            ],
        }  # fmt: skip
        environment = clean_environment(XDG_STATE_HOME=folder)
        with subprocess.Popen(
            [sys.executable, *commands[kind]], stdout=subprocess.PIPE, env=environment, cwd=folder,
            stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            chunks = []
            last = 0.0
            while chunk := process.stdout.read1(1 << 20):  # type: ignore[attr-defined]
                chunks.append(chunk)
                last = time.time()
        return _judge(b"".join(chunks), last)


def _judge(out: bytes, end: float) -> tuple[float, int]:
    begins: list[float] = []
    seen: Counter[tuple[bytes, bytes]] = Counter()
    torn = 0
    for line in out.splitlines():
        words = line.partition(b"] ")[2].strip(b": ").split(b" ")
        words = words if words[0] in (b"T", b"L") else line.split(b":")[-1].split(b" ")
        if words[0] == b"T":
            begins.append(float(words[2]))
        elif words[0] == b"L" and len(words) == 4 and len(words[3]) == 88:
            seen[words[1], words[2]] += 1
        else:
            torn += 1
    doubled = sum(count - 1 for count in seen.values())
    lost = _LINES * _RANKS - len(seen)
    return end - min(begins), lost + doubled + torn

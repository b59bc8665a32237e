"""A call from a real `__main__` into the `__main__` of another process, and its value back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = '''
"""About this program."""
import io, pickle, subprocess, sys, threading
from phalanx.wire import payload

WORKER = """
import io, sys, types
main = sys.modules["__main__"] = types.ModuleType("__main__")
from phalanx.wire import payload
call = payload.load_call(sys.stdin.buffer.read(), context="own", main=main)
file = io.BytesIO()
payload.dump_value(call.function(0, 1, *call.args, **call.kwargs), file)
sys.stdout.buffer.write(file.getvalue())
"""

unused = threading.Lock()
count = 1

class Point:
    def __init__(self, x): self.x = x
    def moved(self): return type(self)(self.x + count)

def work(rank, size, point, fail=False):
    import traceback
    global count
    count += 1
    again = pickle.loads(pickle.dumps(point.moved()))
    assert type(again) is Point, type(again)
    try:
        raise ValueError("marker")
    except ValueError:
        text = traceback.format_exc()
    return again, context, __doc__, text, "torch" in sys.modules

file = io.BytesIO()
payload.dump_call(payload.Call(function=work, args=(Point(5),), kwargs={}), file)
done = subprocess.run([sys.executable, "-c", WORKER], input=file.getvalue(), stdout=subprocess.PIPE)
assert done.returncode == 0
point, context, about, text, torch = payload.load_value(done.stdout)
assert type(point) is Point and point.x == 7, point.x
assert count == 1 and context == "own" and about == "About this program." and not torch
print(text)
print("fine")
'''


@pytest.mark.parametrize("way", ["script", "stdin", "-c"])
def test_a_call_travels_from_any_main_and_its_value_back(way, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    arguments = {"script": [str(path)], "stdin": ["-"], "-c": ["-c", PROGRAM]}[way]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=PROGRAM if way == "stdin" else None,
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("fine")
    name = {"script": str(path), "stdin": "<stdin>", "-c": "<string>"}[way]
    assert f'File "{name}", line ' in done.stdout
    if way == "script":
        assert 'raise ValueError("marker")' in done.stdout, "the line itself"

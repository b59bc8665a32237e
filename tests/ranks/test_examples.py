"""The examples do what they say. (`make demo` runs the training.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_shared_tensor_is_right_with_add_tensor():
    script = EXAMPLES / "shared_tensor.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    careless, careful = done.stdout.splitlines()
    assert careless.startswith("get, add, put:")
    assert careful == f"add_tensor:     {[600.0] * 3} of {[600.0] * 3}"

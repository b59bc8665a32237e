"""``python -m phalanx.run``: the same as ``phalanx run``, for who comes from torchrun."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]  # the working directory, in which a user's ``random.py`` may lie

    from phalanx.cli.main import main

    sys.exit(main(["run", *sys.argv[1:]]))

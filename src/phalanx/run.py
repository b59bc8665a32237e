"""``python -m phalanx.run``: the same as ``phalanx run``, for who comes from torchrun."""

from __future__ import annotations

import sys

from phalanx.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))

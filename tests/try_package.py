"""Install the wheel in ``dist/`` into an environment of its own, and use it (`make package`).

torch and the other dependencies are found where the running interpreter has them; they are not
installed again. Phalanx itself comes from the wheel only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

EXAMPLE = """\
import phalanx
from phalanx import start_processes

def main_worker(rank, world_size):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return total.item()

print(phalanx.__file__)
print(start_processes(main_worker, world_size=2).wait().returns)
"""

PROGRAM = """\
import os
import phalanx
print(os.environ["RANK"], phalanx.get_context().get_world_size())
"""

DESCRIBE = """\
from importlib.metadata import distribution
found = distribution("phalanx-torch")
print(found.version)
print(found.metadata.get_payload() or found.metadata["Description"])
"""


class Environment:
    """A virtual environment that holds nothing but the wheel."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder / "venv", with_pip=True)
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        self.say(self.bin / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "venv" / "lib" / name / "site-packages"
        (self.site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def say(self, *command: object) -> str:
        """Run a command outside of the repository; return what it prints."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PHALANX"))}
        env["XDG_STATE_HOME"] = str(self.folder / "state")
        ran = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=180, check=False,
        )  # fmt: skip
        if ran.returncode:
            raise SystemExit(f"{command} failed:\n{ran.stdout}\n{ran.stderr}")
        return ran.stdout


def check(place: Environment) -> None:
    """Use what was installed as a user would."""
    (place.folder / "example.py").write_text(EXAMPLE)
    (place.folder / "program.py").write_text(PROGRAM)
    python, phalanx = place.bin / "python", place.bin / "phalanx"

    where, returns = place.say(python, "example.py").splitlines()
    expect(Path(where).is_relative_to(place.site), f"phalanx comes from {where}, not the wheel")
    expect(returns == "(3.0, 3.0)", f"the example printed {returns}")
    expect("usage: phalanx" in place.say(phalanx, "--help"), "`phalanx --help` shows no usage")
    ran = place.say(phalanx, "run", "--nproc-per-node", "2", "program.py").splitlines()
    expect(sorted(ran) == ["[rank 0] 0 2", "[rank 1] 1 2"], f"`phalanx run` printed {ran}")

    version, _, text = place.say(python, "-c", DESCRIBE).partition("\n")
    expect(version in place.say(phalanx, "--version"), "`phalanx --version` is another one")
    expect("# Phalanx" in text, "the package index would show no README")
    dead = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    expect(not dead, f"links of the README that lead nowhere on the package index: {dead}")


def expect(fine: bool, otherwise: str) -> None:
    """End with a message unless all is well."""
    if not fine:
        raise SystemExit(otherwise)


def main() -> None:
    """Find the one wheel, and try it."""
    wheels = list((ROOT / "dist").glob("phalanx_torch-*.whl"))
    expect(len(wheels) == 1, f"dist/ holds {len(wheels)} wheels: run `make package`")
    expect(len(list((ROOT / "dist").glob("*.tar.gz"))) == 1, "dist/ holds no sdist")
    with tempfile.TemporaryDirectory(prefix="package-") as folder:
        check(Environment(Path(folder), wheels[0]))
    print(f"{wheels[0].name} works in an environment of its own")


if __name__ == "__main__":
    main()

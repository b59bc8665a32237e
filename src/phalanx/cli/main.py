"""The entry point: which command is meant, and what a wrong one reads like."""

from __future__ import annotations

import difflib
import signal
import sys

from phalanx.cli.usage import UsageError

_HELP = """\
usage: phalanx <command> …

Starts, watches and heals the workers of distributed PyTorch programs.

commands:
  run         start a script, module or program in N workers, as torchrun does

options:
  -h, --help  show this help; `phalanx run --help`: that of a command
  --version   show the version

example:
  phalanx run --nproc-per-node 4 train.py --epochs 10
"""
_COMMANDS = ("run",)


def script_entry() -> None:
    """Run as the installed command `phalanx`."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]  # the folder of this command is no place for the script's modules
    sys.exit(main(sys.argv[1:]))


def main(argv: list[str]) -> int:
    """Do what the arguments ask for; return the exit code. Blocks until the run has ended.

    Args:
        argv: The arguments, without the program's name.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # An interrupt in the middle of an import would be lost: until there is a run, it ends us.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return _dispatch(argv)
    except UsageError as error:
        print(f"{error.command}: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except BrokenPipeError:  # nobody reads our help any more
        sys.stdout = None
        return 0


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_HELP, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        from phalanx import __version__  # noqa: PLC0415 - a name of this package

        print(f"phalanx {__version__}")  # noqa: T201
        return 0
    if argv[0] == "run":
        from phalanx.cli.options import parse  # noqa: PLC0415 - only what is needed

        options = parse(argv[1:])
        if options is None:
            return 0
        from phalanx.cli.run import run  # noqa: PLC0415 - as above

        return run(options)
    raise UsageError(_unknown_command(argv[0]), command="phalanx")


def _unknown_command(word: str) -> str:
    near = difflib.get_close_matches(word, _COMMANDS, n=1)
    if near:
        return f"there is no command {word!r}; did you mean {near[0]!r}?"
    if word.startswith("-") or word.endswith(".py"):
        return f"which command? Did you mean `phalanx run {word} …`?"
    return f"there is no command {word!r}; there are: {', '.join(_COMMANDS)}"

"""The entry point: which command is meant, and what a wrong one reads like."""

from __future__ import annotations

import difflib
import importlib
import signal
import sys

from phalanx.cli.usage import UsageError

_HELP = """\
usage: phalanx <command> …

Starts, watches and heals the workers of distributed PyTorch programs.

commands:
  run         start a script, module or program in N workers, as torchrun does
  ps          show the runs that live
  logs        show what the workers of a run printed to files
  events      show what happened in a run
  stop        stop a run, and wait until it has ended
  kill        end a run at once, or one rank of it
  stacks      show where the workers of a run are in their code
  completion  print a script that has bash, zsh or fish complete commands

options:
  -h, --help  show this help; `phalanx run --help`: that of a command
  --version   show the version

example:
  phalanx run --nproc-per-node 4 train.py --epochs 10
"""
COMMANDS = ("run", "ps", "logs", "events", "stop", "kill", "stacks", "completion")
_MODULES = {"stop": "control", "kill": "control", "stacks": "control"}
"""Where a command's function is, if not in the module of its name."""


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
    except BrokenPipeError:  # nobody reads us any more
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
    if argv[0] in COMMANDS:
        return _on_runs(argv[0], argv[1:])
    raise UsageError(_unknown_command(argv[0]), command="phalanx")


def _on_runs(command: str, argv: list[str]) -> int:
    """Do what is about runs that others have started."""
    from phalanx.cli import parsers  # noqa: PLC0415 - as above

    values = parsers.parse(getattr(parsers, f"{command}_parser"), argv)
    if values is None:
        return 0
    module = importlib.import_module(f"phalanx.cli.{_MODULES.get(command, command)}")
    code: int = getattr(module, command)(values)
    sys.stdout.flush()  # here, where a reader that went away is no error
    return code


def _unknown_command(word: str) -> str:
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    if near:
        return f"there is no command {word!r}; did you mean {near[0]!r}?"
    if word.startswith("-") or word.endswith(".py"):
        return f"which command? Did you mean `phalanx run {word} …`?"
    return f"there is no command {word!r}; there are: {', '.join(COMMANDS)}"

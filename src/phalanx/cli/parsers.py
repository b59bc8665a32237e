"""How arguments are read and help is shown, and the options of the commands on runs."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from phalanx.cli import formats
from phalanx.cli.usage import UsageError

_WIDTH = 80


class Parser(argparse.ArgumentParser):
    """Raises a `UsageError` that names the command."""

    about_options = ""
    """What else to say of an unknown option."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        # One spelling is enough.
        message = re.sub(r"^argument (?:-./)?([^:/]+)[^:]*: ", r"\1: ", message)
        self.refuse(f"{message} (`{self.prog} --help` shows all)")

    def refuse(self, message: str) -> NoReturn:
        """Raise: the message stands for itself."""
        raise UsageError(message, command=self.prog)

    def option(self, name: str) -> argparse.Action:
        """Return the option of that name, of whose value ``-r3`` is one; or say which is near."""
        known = self._option_string_actions
        if name in known:
            return known[name]
        if not name.startswith("--"):
            if name[:2] in known:
                return known[name[:2]]
            self.error(f"there is no option {name}")
        fitting = {id(a): a for option, a in known.items() if option.startswith(name)}
        if len(fitting) == 1:  # a beginning, as argparse allows it
            return next(iter(fitting.values()))
        spelled = name.replace("_", "-")
        options = [option for option in known if "_" not in option and option.startswith("--")]
        near = difflib.get_close_matches(spelled, options, n=1) or [
            option for option in options if option.startswith(spelled)
        ]
        hint = f"did you mean {near[0]}?" if near else f"`{self.prog} --help` shows all."
        return self.refuse(f"there is no option {name}; {hint}{self.about_options}")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each option, in 80 columns."""

    def __init__(self, prog: str) -> None:
        """Take the usual width, whatever the terminal's."""
        super().__init__(prog, width=_WIDTH, max_help_position=31)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "_" not in name]
        if not names:
            return str(action.metavar)
        metavar = "" if action.nargs == 0 else f" {action.metavar}"
        return f"{', '.join(names)}{metavar}"


def parse(make: Callable[[], Parser], argv: Sequence[str]) -> argparse.Namespace | None:
    """Return what was asked for; None when help was wanted, and given.

    Raises:
        UsageError: Says what is wrong.
    """
    parser = make()
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(parser.format_help())
        sys.stdout.flush()
        return None
    values, left = parser.parse_known_args(list(argv))
    for word in left:
        if word.startswith("-"):
            parser.option(word.partition("=")[0])
        parser.error(f"what is {word!r} for?")
    return values


# ── the commands on runs ─────────────────────────────────────────────────────────────────


def ps_parser() -> Parser:
    """Options of ``phalanx ps``."""
    parser = _make("ps", "[options]", "Shows the runs that live.")
    parser.add_argument(
        "-a", "--all", action="store_true", help="also runs that have ended, newest first"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="only the runs' ids")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def logs_parser() -> Parser:
    """Options of ``phalanx logs``."""
    parser = _make("logs", "[options] [RUN]", "Shows what the workers of a run printed to files.")
    _add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument(
        "--rank", metavar="R", type=formats.count, action="append",
        help="only this rank; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--generation", metavar="N", type=formats.count,
        help="of this generation, 0 the first; default: the latest",
    )  # fmt: skip
    return parser


def events_parser() -> Parser:
    """Options of ``phalanx events``."""
    parser = _make("events", "[options] [RUN]", "Shows what happened in a run, a line an event.")
    _add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--json", action="store_true", help="lines as in the run's events.jsonl")
    return parser


def stop_parser() -> Parser:
    """Options of ``phalanx stop``."""
    parser = _make("stop", "[options] [RUN]", "Stops a run, and waits until it has ended.")
    _add_run(parser)
    parser.add_argument(
        "--grace", metavar="S", type=formats.seconds,
        help="seconds that workers have to finish; default: as the run was started",
    )  # fmt: skip
    return parser


def kill_parser() -> Parser:
    """Options of ``phalanx kill``."""
    about = "Ends a run at once, or one rank of it, which the run treats as any failure."
    parser = _make("kill", "[options] [RUN]", about)
    _add_run(parser)
    parser.add_argument(
        "--rank", metavar="R", type=formats.count, help="SIGKILL to this rank alone"
    )
    return parser


def stacks_parser() -> Parser:
    """Options of ``phalanx stacks``."""
    about = """\
Shows where the workers of a run are in their code, ranks that are in the same
place together. Nothing is interrupted by that."""
    parser = _make("stacks", "[options] [RUN]", about)
    _add_run(parser)
    parser.add_argument("--rank", metavar="R", type=formats.count, help="only this rank")
    return parser


def completion_parser() -> Parser:
    """Options of ``phalanx completion``."""
    about = """\
Prints a script that has a shell complete commands, options and runs.

  bash: eval "$(phalanx completion bash)"    in ~/.bashrc
  zsh:  eval "$(phalanx completion zsh)"     in ~/.zshrc, after compinit
  fish: phalanx completion fish > ~/.config/fish/completions/phalanx.fish"""
    parser = _make("completion", "SHELL", about)
    parser.add_argument("shell", metavar="SHELL", choices=["bash", "zsh", "fish"],
                        help="bash, zsh or fish")  # fmt: skip
    return parser


def _make(name: str, usage: str, about: str) -> Parser:
    parser = Parser(
        prog=f"phalanx {name}",
        usage=f"phalanx {name} {usage}",
        description=about,
        formatter_class=Formatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this help")
    return parser


def _add_run(parser: Parser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?",
        help="its id or the beginning of it; may be left out where one run lives",
    )  # fmt: skip

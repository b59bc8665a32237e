"""From arguments and PET_* variables to options: torchrun's, in both spellings, and our own.

The arguments are cut at the script first: whatever follows it is the script's, whatever it
looks like. Only what stands before it is parsed.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.cli import formats
from phalanx.cli.parsers import Formatter, Parser
from phalanx.cli.usage import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_NO_VARIABLE = (
    "logs_specs",
    "no_fold",
    "on_closed_output",
    "stdin",
    "numa_binding",
    "preload",
    "restart",
    "grace",
    "hang_timeout",
    "json",
    "print_completion",
)
"""Options that no PET_* variable sets."""

_USAGE = """\
phalanx run [options] script.py [arguments …]
       phalanx run [options] -m module [arguments …]
       phalanx run [options] --no-python program [arguments …]"""

_ABOUT = """\
Starts N workers of a PyTorch script, watches them, and starts them again when
one falls. All options of torchrun are understood, in both spellings, and its
PET_* variables. Options after the script belong to the script."""

_CLOSING = """\
The exit code is 0; or that of the worker that failed first (128 + n if signal n
ended it, so 137 if it hung and was killed); 130 after Ctrl-C; 143 after a
SIGTERM that stopped the run.

examples:
  phalanx run --nproc-per-node 4 train.py --epochs 10
  phalanx run --nproc-per-node gpu --max-restarts 3 -m my.training --epochs 10
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for.

    Attributes:
        values: The options, by torchrun's names (``nproc_per_node``, …).
        target: The script, module or program.
        arguments: What it gets.
    """

    values: argparse.Namespace
    target: str
    arguments: tuple[str, ...]


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Options | None:
    """Return the options; None when help or a completion script was wanted, and given.

    Args:
        argv: The arguments after ``run``.
        environment: Where PET_* variables are looked for.

    Raises:
        UsageError: Says what is wrong, and what would be right.
    """
    parser = make_parser()
    num_options = _find_target(parser, argv)
    parser.set_defaults(**_from_variables(parser, environment))
    values = parser.parse_args(list(argv[:num_options]))
    if values.help:
        sys.stdout.write(parser.format_help())
        sys.stdout.flush()
        return None
    if values.print_completion:
        from phalanx.cli.completion import completion  # noqa: PLC0415 - it knows our options

        completion(argparse.Namespace(shell=values.print_completion))
        return None
    rest = list(argv[num_options:])
    if rest[:1] == ["--"]:
        del rest[0]
    if not rest:
        what = "which module" if values.module else "which program" if values.no_python else None
        raise UsageError(
            f"{what or 'which script'}? It comes after the options, as in "
            "`phalanx run --nproc-per-node 4 train.py`; `phalanx run --help` shows all"
        )
    return Options(values=values, target=rest[0], arguments=tuple(rest[1:]))


# ── where the script begins ──────────────────────────────────────────────────────────────


def _find_target(parser: Parser, argv: Sequence[str]) -> int:
    """Return how many arguments stand before the script."""
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--" or not word.startswith("-") or word == "-":
            return position
        name, equals, _ = word.partition("=")
        action = parser.option(name)
        attached = bool(equals) or (len(word) > 2 and not word.startswith("--"))
        position += 1 if attached or action.nargs == 0 else 2
    return min(position, len(argv))


# ── variables ────────────────────────────────────────────────────────────────────────────


def _from_variables(
    parser: argparse.ArgumentParser, environment: Mapping[str, str]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for action in parser._actions:  # noqa: SLF001 - as above
        name = f"PET_{action.dest.upper()}"
        text = environment.get(name)
        if text is None or action.dest in (*_NO_VARIABLE, "help"):
            continue
        try:
            values[action.dest] = _convert(action, text)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise UsageError(f"the variable {name}={text!r}: {error}") from None
    return values


def _convert(action: argparse.Action, text: str) -> Any:  # noqa: ANN401 - the option knows
    if action.nargs == 0:
        return formats.flag(text)
    convert: Any = action.type or str
    value = convert(text)
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"must be one of {', '.join(action.choices)}")
    return value


# ── the table of options ─────────────────────────────────────────────────────────────────


def make_parser() -> Parser:
    """Options of ``phalanx run``."""
    parser = Parser(
        prog="phalanx run",
        usage=_USAGE,
        description=_ABOUT,
        epilog=_CLOSING,
        formatter_class=Formatter,
        add_help=False,
    )
    parser.about_options = " (Options of the script come after the script.)"
    _add_program(parser)
    _add_number(parser)
    _add_failures(parser)
    _add_input(parser)
    _add_output(parser)
    _add_placement(parser)
    _add_meeting(parser)
    _add_accepted(parser)
    return parser


def _group(parser: Parser, title: str) -> Callable[..., None]:
    """Return what adds an option to a new group, under both spellings of its name."""
    group = parser.add_argument_group(title)

    def add(*names: str, **settings: Any) -> None:  # noqa: ANN401 - argparse's own
        long = [name for name in names if name.startswith("--")]
        spellings = [name.replace("_", "-") for name in long]
        old = [f"--{name[2:].replace('-', '_')}" for name in spellings if "-" in name[2:]]
        if settings.get("action") != "store_true":
            settings.setdefault("metavar", "X")
        group.add_argument(*names, *old, **settings)

    return add


def _add_program(parser: Parser) -> None:
    add = _group(parser, "what to run")
    flag = {"action": "store_true"}
    add("-m", "--module", **flag, help="a module, as by `python -m`")
    add("--no-python", **flag, help="any program, which need not be Python")
    add("--run-path", **flag, help="a script: the usual way here")
    add(
        "--start-method", choices=["forkserver", "fork", "spawn"], default="forkserver",
        metavar="HOW", help="forkserver: fork from a process that has imported torch; "
        "spawn: a `python script.py` per worker",
    )  # fmt: skip
    add(
        "--preload", metavar="NAMES", action="append", type=formats.names,
        help="modules to import once for all workers, as torch,numpy (default: torch; '' none)",
    )  # fmt: skip


def _add_number(parser: Parser) -> None:
    add = _group(parser, "how many workers")
    add(
        "--nproc-per-node", metavar="N", default="1",
        help="a number, gpu (one per GPU), cpu (one per CPU), or auto: gpu, else cpu; default: 1",
    )  # fmt: skip
    add("--nnodes", metavar="N", default="1:1", help="number of machines: 1 so far")
    add("--standalone", action="store_true", help="one machine, any free port: the usual way here")


def _add_failures(parser: Parser) -> None:
    add = _group(parser, "when something goes wrong")
    add(
        "--max-restarts", metavar="N", type=formats.count, default=0,
        help="how often a failure is answered by a restart; default: 0",
    )  # fmt: skip
    add(
        "--restart", metavar="WHAT", choices=["group", "worker"], default="group",
        help="group: start all workers again; worker: only the fallen one, for workers "
        "without a process group",
    )  # fmt: skip
    add(
        "--grace", "--shutdown-timeout", metavar="S", type=formats.seconds, dest="shutdown_timeout",
        help="seconds that workers have to finish when the run is stopped; default: 30",
    )  # fmt: skip
    add(
        "--hang-timeout", metavar="S", type=formats.some_seconds,
        help="kill a worker that shows no sign of life for S seconds: no optimizer step, no "
        "output, no heartbeat; it counts as a failure. Default: nobody watches",
    )  # fmt: skip
    add(
        "--signals-to-handle", metavar="NAMES", type=formats.signals,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help="signals that stop the run; a worker that catches SIGUSR1 or the like, if named "
        "here, gets it, and nothing ends",
    )  # fmt: skip
    add("--json", action="store_true", help="at the end, say how it went as a line of JSON")


def _add_input(parser: Parser) -> None:
    add = _group(parser, "what the workers read")
    add(
        "--stdin", metavar="WHO", type=formats.stdin, default="all",
        help="who gets the command's standard input: all (default; who reads first gets it), "
        "none, or one local rank, as 0",
    )  # fmt: skip


def _add_output(parser: Parser) -> None:
    add = _group(parser, "what the workers print")
    add(
        "--log-dir", metavar="DIR",
        help="keep output as DIR/<generation>/rank-<rank>.out and .err",
    )  # fmt: skip
    which = "0 none, 1 output, 2 errors, 3 both; or by local rank, as 0:1,1:3"
    add(
        "-r", "--redirects", metavar="WHAT", type=formats.streams, default="0",
        help=f"what goes to files only: {which}",
    )  # fmt: skip
    add(
        "-t", "--tee", metavar="WHAT", type=formats.streams, default="0",
        help="what goes to files and to the console",
    )  # fmt: skip
    add(
        "--local-ranks-filter", metavar="RANKS", type=formats.ranks, default="",
        help="local ranks that print to the console, as 0,1; default: all",
    )  # fmt: skip
    add(
        "--log-line-prefix-template", metavar="TEXT", default="",
        help="what stands before each line on the console, with ${role_name}, ${local_rank}, "
        "${rank} and ${hostname} in it, as '${hostname}:${rank}: '; nothing is folded then",
    )  # fmt: skip
    add(
        "--no-fold", action="store_true",
        help="show a line that several ranks print alike once for each of them",
    )  # fmt: skip
    add(
        "--on-closed-output", metavar="WHAT", choices=["continue", "stop"], default="continue",
        help="when nobody reads the output any more, as after `| head`: continue (default), or "
        "stop the run",
    )  # fmt: skip
    for stream, file in (("stdout", "out"), ("stderr", "err")):
        add(
            f"--duplicate-{stream}-filters", metavar="TEXTS", type=formats.texts, default="",
            help=f"copy lines with one of these texts, as loss,acc, to filtered.{file}",
        )  # fmt: skip


def _add_placement(parser: Parser) -> None:
    add = _group(parser, "where workers run")
    add(
        "--numa-binding", metavar="HOW", choices=["node", "socket", "exclusive", "core-complex"],
        help="bind workers to CPUs near their GPU, or spread them: node, socket, exclusive, "
        "core-complex",
    )  # fmt: skip
    add(
        "--virtual-local-rank", action="store_true",
        help="each worker sees its own GPU only, and LOCAL_RANK=0",
    )  # fmt: skip
    add("--role", metavar="NAME", default="default", help="value of ROLE_NAME")


def _add_meeting(parser: Parser) -> None:
    add = _group(parser, "where workers meet")
    add("--master-addr", metavar="ADDR", default="127.0.0.1", help="an address of this machine")
    add("--master-port", metavar="PORT", type=formats.port, help="default: any free port")
    add("--rdzv-endpoint", metavar="HOST:PORT", default="", help="another way to say both")
    add("--local-addr", metavar="ADDR", help="the same as --master-addr, on one machine")
    add("--rdzv-backend", metavar="NAME", default="static", help="static or c10d: the same here")
    add("--rdzv-id", metavar="ID", default="none", help="value of TORCHELASTIC_RUN_ID")


def _add_accepted(parser: Parser) -> None:
    add = _group(parser, "accepted, and without effect here")
    add("--node-rank", metavar="N", type=formats.count, default=0, help="0, on one machine")
    add("--rdzv-conf", metavar="CONF", type=formats.pairs, default="", help="of the rendezvous")
    add("--monitor-interval", metavar="S", type=formats.seconds, help="nothing is polled")
    add("--event-log-handler", metavar="NAME", default="null", help="see events.jsonl")
    add("--logs-specs", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--print-completion", "--print_completion", choices=["bash", "zsh", "fish"],
        help=argparse.SUPPRESS,
    )  # fmt: skip

"""``phalanx completion``: scripts that have a shell complete commands, options and runs.

The words come from the tables that the commands themselves parse with, so a script knows
what its version of Phalanx knows. Only the runs are asked for when they are needed.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from phalanx.cli import parsers
from phalanx.cli.options import make_parser

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "run": make_parser,
    "ps": parsers.ps_parser,
    "logs": parsers.logs_parser,
    "events": parsers.events_parser,
    "stop": parsers.stop_parser,
    "kill": parsers.kill_parser,
    "stacks": parsers.stacks_parser,
    "completion": parsers.completion_parser,
}
_LIVING = ("stop", "kill", "stacks")
_KEPT = ("logs", "events")


def completion(values: argparse.Namespace) -> int:
    """Print the script; return the exit code."""
    make = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[values.shell]
    sys.stdout.write(make())
    return 0


def bash_script() -> str:
    """Return the script for bash."""
    return f"""\
# Completion of `phalanx` for bash; made by `phalanx completion bash`.
_phalanx() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{_names()}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{_bash_values()}    esac
    case "${{COMP_WORDS[1]}}" in
{_bash_words()}    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _phalanx phalanx
"""


def zsh_script() -> str:
    """Return the script for zsh, which understands that for bash."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash_script()}"


def fish_script() -> str:
    """Return the script for fish."""
    lines = ["# Completion of `phalanx` for fish; made by `phalanx completion fish`."]
    lines.append(f"complete -c phalanx -f -n __fish_use_subcommand -a {_quoted(_names())}")
    for command, make in COMMANDS.items():
        start = f"complete -c phalanx -n '__fish_seen_subcommand_from {command}'"
        actions = [a for a in _actions(make()) if a.option_strings or a.choices]
        lines += [f"{start}{_fish_option(action)}" for action in actions]
        if command in _LIVING + _KEPT:
            lines.append(f"{start} -f -a '({_ask_for_runs(command)})'")
    return "\n".join(lines) + "\n"


# ── what the tables say ──────────────────────────────────────────────────────────────────


def _names() -> str:
    return " ".join(COMMANDS)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    known = parser._actions  # noqa: SLF001 - argparse has no other way to ask
    return [action for action in known if action.help != argparse.SUPPRESS]


def _options(action: argparse.Action) -> list[str]:
    """Return an option's spellings with hyphens; none for what is no option."""
    return [name for name in action.option_strings if "_" not in name]


def _ask_for_runs(command: str) -> str:
    return f"phalanx ps --quiet{' --all' if command in _KEPT else ''} 2>/dev/null"


def _bash_values() -> str:
    """Return arms for options that take a value: the choices, or else files."""
    arms: list[str] = []
    for command, make in COMMANDS.items():
        free: list[str] = []
        for action in _actions(make()):
            patterns = [f'"{command} {name}"' for name in _options(action)]
            if action.nargs == 0 or not patterns:
                continue
            if action.choices is None:
                free += patterns
            else:
                words = " ".join(map(str, action.choices))
                reply = f'COMPREPLY=($(compgen -W "{words}" -- "$word")); return'
                arms.append(f"        {'|'.join(patterns)}) {reply} ;;\n")
        if free:
            arms.append(f"        {'|'.join(free)}) return ;;\n")
    return "".join(arms)


def _bash_words() -> str:
    """Return an arm for each command: options after a hyphen, else runs or choices."""
    arms: list[str] = []
    for command, make in COMMANDS.items():
        actions = _actions(make())
        options = " ".join(name for action in actions for name in _options(action))
        choices = [str(c) for a in actions if not a.option_strings for c in a.choices or ()]
        takes_run = command in _LIVING + _KEPT
        others = f"$({_ask_for_runs(command)})" if takes_run else " ".join(choices)
        arms.append(
            f'        {command}) if [[ $word == -* ]]; then words="{options}"; '
            f'else words="{others}"; fi ;;\n'
        )
    return "".join(arms)


def _fish_option(action: argparse.Action) -> str:
    """Return the arguments of fish's `complete` for an option, or for a choice of words."""
    text = "" if action.help is None else f" -d {_quoted(action.help)}"
    parts = [
        f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}"
        for name in _options(action)
    ]
    if parts and action.nargs != 0:
        parts.append(" -r")
    if action.choices is not None:
        parts.append(f" -f -a {_quoted(' '.join(map(str, action.choices)))}")
    return "".join(parts) + text


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

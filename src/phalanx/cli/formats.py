"""How values of options are written. Each function reads one, or raises a ValueError."""

from __future__ import annotations

import argparse
import re
import signal
from typing import TypeAlias

StreamChoice: TypeAlias = "int | dict[int, int]"
"""Torchrun's ``Std``, 0 none, 1 output, 2 errors, 3 both: of all local ranks, or of each."""

OUT, ERR = 1, 2


def count(text: str) -> int:
    """Read a whole number, 0 or more."""
    if not re.fullmatch(r"[0-9]+", text.strip()):
        raise _wrong(text, "a whole number, 0 or more")
    return int(text)


def stdin(text: str) -> str | int:
    """Read who gets standard input: everybody, nobody, or a local rank."""
    word = text.strip().lower()
    if word in ("all", "none"):
        return word
    if not re.fullmatch(r"[0-9]+", word):
        raise _wrong(text, "all, none, or a local rank, as 0")
    return int(word)


def port(text: str) -> int:
    """Read a TCP port; 0 is any free one."""
    value = count(text)
    if value > 65535:
        raise _wrong(text, "a port: 1–65535, or 0 for any free one")
    return value


def seconds(text: str) -> float:
    """Read a duration."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise _wrong(text, "seconds, 0 or more")
    return value


def some_seconds(text: str) -> float:
    """Read a duration that is none of zero."""
    try:
        value = seconds(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if value == 0:
        raise _wrong(text, "seconds, more than 0")
    return value


def flag(text: str) -> bool:
    """Read a flag's variable: a number, as for torchrun, or a word."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    word = text.strip().lower()
    if word in words:
        return words[word]
    if not re.fullmatch(r"[0-9]*", word):
        raise _wrong(text, "1 or 0")
    return bool(int(word or "0"))


def names(text: str) -> tuple[str, ...]:
    """Read a list of modules."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def ranks(text: str) -> tuple[int, ...] | None:
    """Read a list of local ranks; None: all."""
    if not text.strip():
        return None
    try:
        return tuple(sorted({count(part.strip()) for part in text.split(",")}))
    except argparse.ArgumentTypeError:
        raise _wrong(text, "local ranks, as 0,1,2") from None


def texts(text: str) -> tuple[str, ...]:
    """Read a list of texts; two commas are one that is meant."""
    parts = [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]
    return tuple(part for part in parts if part)


def streams(text: str) -> StreamChoice:
    """Read which streams are meant: ``3``, or by local rank ``0:1,1:3``."""
    text = text.strip()
    if re.fullmatch(r"[0-3]", text):
        return int(text)
    if not re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        raise _wrong(text, "0 (none), 1 (output), 2 (errors) or 3 (both), or as 0:1,1:3 by rank")
    pairs_ = (part.split(":") for part in text.split(","))
    return {int(rank): int(choice) for rank, choice in pairs_}


def signals(text: str) -> tuple[int, ...]:
    """Read a list of signals by name."""
    numbers: list[int] = []
    for name in names(text):
        known = getattr(signal, name.upper() if name.upper().startswith("SIG") else "", None)
        if not isinstance(known, signal.Signals):
            raise _wrong(name, "the name of a signal, as SIGUSR1")
        if known in (signal.SIGKILL, signal.SIGSTOP):
            raise argparse.ArgumentTypeError(f"{name} can't be handled by any process")
        numbers.append(int(known))
    return tuple(numbers)


def pairs(text: str) -> dict[str, str]:
    """Read ``key=value,key=value``."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise _wrong(text, "as key=value,key=value")
        found[key] = value
    return found


def _wrong(text: str, right: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} is not {right}")

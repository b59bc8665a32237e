"""Folds lines that several ranks print alike within a moment into one that says who did.

Every rank of a distributed program runs the same script, so most of what they print is said N
times. A line waits here for a moment; whoever says the same meanwhile joins it. What one rank
prints stays in its order. A rank that prints without end is not held up: its output passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from phalanx.agent.lines import with_prefix

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from phalanx.agent.consoles import Sink

WINDOW_S: Final = 0.1
"""How long a line waits for others to say the same."""
_BURST: Final = 2000
_LINES_PER_S: Final = 1000
"""A rank that prints more, for longer than a burst, is not folded: nobody reads along."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Line:
    number: int
    """Its place in the order."""
    text: bytes
    due_s: float
    ranks: list[int] = field(default_factory=list)


_number = attrgetter("number")


class LineFolder:
    """The lines that wait. Pure: time comes in as an argument."""

    def __init__(self, num_ranks: int) -> None:
        """Lines that so many ranks have said wait for nobody."""
        self._num_ranks = num_ranks
        self._count = 0
        self._lines: OrderedDict[_Line, None] = OrderedDict()
        self._by_text: dict[bytes, list[_Line]] = {}
        self._last: dict[int, _Line] = {}
        """The last line that a rank said."""

    def add(self, rank: int, text: bytes, now: float) -> None:
        """Take a line, without its end; it joins an equal one, unless the rank's order forbids."""
        equal = self._by_text.setdefault(text, [])
        last = self._last.get(rank)
        later = bisect_right(equal, -1 if last is None else last.number, key=_number)
        if later < len(equal):
            line = equal[later]
        elif equal and rank not in equal[-1].ranks and self._is_last(equal[-1]):
            line = equal[-1]  # behind what this rank has said since
            self._lines.move_to_end(line)
            line.number = self._next()
        else:
            line = _Line(number=self._next(), text=text, due_s=now + WINDOW_S)
            self._lines[line] = None
            equal.append(line)
        line.ranks.append(rank)
        self._last[rank] = line

    def _is_last(self, line: _Line) -> bool:
        """Whether those who said it have said nothing since."""
        return all(self._last[rank] is line for rank in line.ranks)

    def _next(self) -> int:
        self._count += 1
        return self._count

    def take(self, now: float | None) -> list[tuple[list[int], bytes]]:
        """Return the lines whose time has come, and who said them; all of them, if None."""
        taken: list[tuple[list[int], bytes]] = []
        while self._lines:
            line = next(iter(self._lines))
            if now is not None and line.due_s > now and len(line.ranks) < self._num_ranks:
                break
            del self._lines[line]
            equal = self._by_text[line.text]
            del equal[0]
            if not equal:
                del self._by_text[line.text]
            taken.append((sorted(line.ranks), line.text))
        return taken

    @property
    def due_s(self) -> float | None:
        """When the next line's time comes."""
        return next(iter(self._lines)).due_s if self._lines else None


def in_ranges(ranks: list[int]) -> str:
    """Return sorted ranks as ``0-2,5``."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _with_prefix(units: bytes, prefix: bytes) -> bytes:
    """Return whole units, lines and states of bars, each with the prefix."""
    return with_prefix(units[:-1].replace(b"\r", b"\r" + prefix) + units[-1:], prefix)


class FoldingSink:
    """Stands before a console: the ranks' pumps feed it units without prefixes."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sink: Sink,
        prefixes: Mapping[int, bytes],
        prefix_of_several: Callable[[list[int]], bytes],
    ) -> None:
        """Fold what goes to `sink`.

        Args:
            loop: The agent's.
            sink: The console.
            prefixes: What stands before a line, by rank.
            prefix_of_several: The same for a line that several ranks have said.
        """
        self._loop = loop
        self._sink = sink
        self._prefixes = prefixes
        self._prefix_of_several = prefix_of_several
        self._folder = LineFolder(len(prefixes))
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = 0

    @property
    def pending(self) -> int:
        """Bytes that wait, here and at the console."""
        return self._waiting + self._sink.pending

    def write(self, rank: int, data: bytes) -> None:
        """Take whole units of a rank."""
        now = self._loop.time()
        lines = data.split(b"\n")
        rest = lines.pop()
        for line in lines:
            self._folder.add(rank, line, now)
        self._waiting += len(data)
        self._emit(now)
        if rest:  # bars: nothing ends them
            self.pass_by(rank, rest)

    def pass_by(self, rank: int, data: bytes) -> None:
        """Write units of a rank as they are, behind all that waits."""
        self.flush()
        self._sink.write(_with_prefix(data, self._prefixes[rank]))

    def flush(self) -> None:
        """Write what waits."""
        self._emit(None)

    def when_below(self, num_bytes: int, then: Callable[[], None]) -> None:
        """See `Sink`."""
        self.flush()
        self._sink.when_below(num_bytes, then)

    def give_up(self) -> None:
        """See `Sink`."""
        self.flush()
        self._sink.give_up()

    def _emit(self, now: float | None) -> None:
        taken = self._folder.take(now)
        if taken:
            out = b"".join(self._unit(ranks, text) for ranks, text in taken)
            self._sink.write(out)
        self._set_timer()

    def _unit(self, ranks: list[int], text: bytes) -> bytes:
        several = len(ranks) > 1
        prefix = self._prefix_of_several(ranks) if several else self._prefixes[ranks[0]]
        return _with_prefix(text + b"\n", prefix)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._folder.due_s
        if due_s is None:
            self._waiting = 0
        else:
            self._timer = self._loop.call_at(due_s, self._on_due)

    def _on_due(self) -> None:
        self._emit(self._loop.time())


class FoldedStream:
    """A rank's way to a folding console, as a `Sink`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folding: FoldingSink, rank: int) -> None:
        """Speak for one rank."""
        self._loop = loop
        self._folding = folding
        self._rank = rank
        self._budget = float(_BURST)
        self._counted_s = loop.time()

    @property
    def pending(self) -> int:
        """See `Sink`."""
        return self._folding.pending

    def write(self, data: bytes) -> None:
        """See `Sink`."""
        if not data:
            return
        num_lines = data.count(b"\n")
        now = self._loop.time()
        refilled = self._budget + (now - self._counted_s) * _LINES_PER_S
        self._budget = max(min(refilled, _BURST) - num_lines, -_BURST)
        self._counted_s = now
        if self._budget >= 0:
            self._folding.write(self._rank, data)
        else:
            self._folding.pass_by(self._rank, data)

    def when_below(self, num_bytes: int, then: Callable[[], None]) -> None:
        """See `Sink`."""
        self._folding.when_below(num_bytes, then)

    def give_up(self) -> None:
        """See `Sink`."""
        self._folding.give_up()

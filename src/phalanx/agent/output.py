"""Where the output of a run's ranks goes: which streams, which prefixes, which files."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.agent.consoles import Consoles, DescriptorSink, RelaySink
from phalanx.agent.folding import FoldedStream, FoldingSink, in_ranges
from phalanx.agent.logs import FileSink, MatchingLines, StreamPump
from phalanx.system import kernel
from phalanx.system.paths import RunPaths, filtered_file, log_file
from phalanx.values.outputs import STREAMS, Stream
from phalanx.wire.messages import ConsoleKind, ConsoleText

if TYPE_CHECKING:
    import asyncio

    from phalanx.agent.consoles import Sink
    from phalanx.values.spec import LaunchSpec
    from phalanx.wire.messages import AgentMessage, ConsoleSpec

_CLOSED = (errno.EPIPE, errno.EIO)
"""What writing to a pipe without a reader says, and to a terminal that is gone."""
_BOLD = 1
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class RunOutput:
    """Gives each worker pipes as standard output and error, and pumps them to where they go.

    Also those that go to a file only: a worker that writes to a full disk itself would fall.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: LaunchSpec,
        console: ConsoleSpec,
        console_fds: list[int],
        consoles: Consoles,
        tell: Callable[[AgentMessage], None],
        on_broken: Callable[[str], None],
        on_closed: Callable[[], None],
    ) -> None:
        """Take over the console's descriptors.

        Args:
            loop: The agent's.
            spec: Says what goes where.
            console: What the descriptors are.
            console_fds: Owned from here on.
            consoles: All of this agent.
            tell: Sends to the launcher.
            on_broken: Told, in a sentence, what can't be written any more.
            on_closed: Called when nobody reads the console, if that is to stop the run.
        """
        self._loop = loop
        self._spec = spec
        self._console = console
        self._consoles = consoles
        self._on_broken = on_broken
        self._on_closed = on_closed
        self._said_files_broken = False
        fds = iter(console_fds)
        self._sinks: dict[Stream, DescriptorSink | RelaySink] = {}
        kinds: dict[Stream, ConsoleKind] = {"out": console.out, "err": console.err}
        for stream, kind in kinds.items():
            if kind == "descriptor":
                self._sinks[stream] = consoles.borrow(next(fds), self._on_console_broken)
            else:
                self._sinks[stream] = RelaySink(_relay(spec.run_id, stream, tell))
        self._given_up = False
        self._on_console = {stream: spec.outputs.ranks_on_console(stream) for stream in STREAMS}
        self._folding = self._fold() if spec.fold else {}
        self._pumps: dict[int, dict[Stream, StreamPump]] = {}

    def begin(self, rank: int, generation: int) -> tuple[int, int]:
        """Return what a worker is to use as standard output and error; the caller owns them."""
        self.end(rank)
        self._pumps[rank] = {}
        return self._begin(rank, generation, "out"), self._begin(rank, generation, "err")

    def _begin(self, rank: int, generation: int, stream: Stream) -> int:
        where = self._spec.outputs.of(rank, stream)
        reader, writer = os.pipe()
        kernel.widen_pipe(reader)
        folding = self._folding.get(stream)
        console: Sink | None = None
        prefix = ""
        if where.console and folding is not None:
            console = FoldedStream(self._loop, folding, rank)
        elif where.console:
            console, prefix = self._sinks[stream], self._prefix(rank, stream)
        file: FileSink | None = None
        if where.goes_to_file:
            usual = log_file(self._log_dir, generation, rank, stream)
            file = self._file(where.file or str(usual))
        self._pumps[rank][stream] = StreamPump(
            self._loop,
            reader,
            prefix=prefix.encode(),
            terminal=self._is_terminal(stream),
            console=console,
            file=file,
            matching=self._matching(rank, generation, stream),
        )
        return writer

    @property
    def _log_dir(self) -> Path:
        if self._spec.log_dir is not None:
            return Path(self._spec.log_dir)
        return RunPaths(root=Path(self._spec.run_dir)).logs

    def _matching(self, rank: int, generation: int, stream: Stream) -> MatchingLines | None:
        """Return who collects lines of a stream in the file for all ranks."""
        wanted, where = self._spec.outputs.filter_of(stream), self._spec.outputs.of(rank, stream)
        if wanted is None:
            return None
        if wanted.file is None:
            usual = filtered_file(self._log_dir, generation, stream)
            prefix = where.prefix or f"[rank {rank}] "
            return MatchingLines(self._file(str(usual)), wanted.needles, prefix)
        if where.file is None or not where.console:
            return None  # as torchelastic: of streams that go to console and file
        return MatchingLines(self._file(wanted.file), wanted.needles, where.prefix or "")

    def drain(self, rank: int) -> None:
        """Read all that a worker had printed: it has ended."""
        for pump in self._pumps.get(rank, {}).values():
            pump.drain()

    def tail(self, rank: int) -> str:
        """Return the last lines of a rank, standard output first."""
        tails = [pump.tail() for pump in self._pumps.get(rank, {}).values()]
        text = b"".join(
            tail if tail.endswith(b"\n") or not tail else tail + b"\n" for tail in tails
        )
        return text.decode("utf-8", "backslashreplace")

    def heard_s(self, rank: int) -> float | None:
        """Return when a rank printed last (monotonic); None: never."""
        times = [pump.heard_s() for pump in self._pumps.get(rank, {}).values()]
        return max((at_s for at_s in times if at_s is not None), default=None)

    def end(self, rank: int) -> None:
        """A worker has ended and been drained."""
        for pump in self._pumps.pop(rank, {}).values():
            pump.close()

    def write_plain(self, text: str) -> None:
        """Write to the console without a prefix."""
        if "out" in self._folding:
            self._folding["out"].flush()
        self._sinks["out"].write(text.encode("utf-8", "replace"))

    def taken(self, stream: Stream, num_bytes: int) -> None:
        """The launcher has written that much of what was relayed."""
        sink = self._sinks[stream]
        if isinstance(sink, RelaySink):
            sink.taken(num_bytes)

    def show_begun(self, rank: int) -> None:
        """Show a line that a rank has begun: it is a prompt."""
        for pump in self._pumps.get(rank, {}).values():
            pump.drain()
            pump.show_begun()

    def hold(self) -> None:
        """Write nothing to a terminal until `go_on`: somebody types there."""
        for stream, sink in self._sinks.items():
            if self._is_terminal(stream):
                sink.hold()

    def go_on(self) -> None:
        """Write what came meanwhile."""
        for sink in self._sinks.values():
            sink.go_on()

    def when_flushed(self, then: Callable[[], None]) -> None:
        """Call back once everything has gone out."""
        if self._given_up:
            then()
            return
        for folding in self._folding.values():
            folding.flush()
        out, err = self._sinks["out"], self._sinks["err"]
        out.when_below(0, lambda: err.when_below(0, then))

    def give_up(self) -> None:
        """Don't wait for a console that does not read: the run is being killed."""
        self._given_up = True
        for sink in self._sinks.values():
            sink.give_up()

    def close(self) -> None:
        """Let go of everything."""
        for rank in list(self._pumps):
            self.end(rank)
        for folding in self._folding.values():
            folding.flush()
        for sink in self._sinks.values():
            if isinstance(sink, DescriptorSink):
                self._consoles.give_back(sink)

    # ── inside ───────────────────────────────────────────────────────────────────────────

    def _file(self, path: str) -> FileSink:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            fd = os.open(path, flags, 0o644)
        except OSError as error:
            self._on_file_broken(path, error)
            fd = os.open(os.devnull, flags)
        return FileSink(fd, path, self._on_file_broken)

    def _on_file_broken(self, path: str, error: OSError) -> None:
        if not self._said_files_broken:  # a full disk takes them all, and one word is enough
            self._said_files_broken = True
            self._on_broken(
                f"the log {path} can't be written ({error.strerror}); the run goes on without "
                "it, and without any other log that can't be written"
            )

    def _on_console_broken(self, error: OSError) -> None:
        closed = error.errno in _CLOSED
        if closed and self._spec.on_closed_output == "stop":
            self._on_closed()
            return
        reason = "nobody reads it any more" if closed else error.strerror
        self._on_broken(f"the console can't be written ({reason}); the run goes on without it")

    def _fold(self) -> dict[Stream, FoldingSink]:
        """Stand before each console that several ranks print to; two streams may share one."""
        folding: dict[Stream, FoldingSink] = {}
        for stream, sink in self._sinks.items():
            ranks = self._on_console[stream]
            prefixes = {rank: self._prefix(rank, stream).encode() for rank in ranks}
            other = next((o for o in folding if self._sinks[o] is sink), None)
            if other is not None and self._on_console[other] == ranks:
                folding[stream] = folding[other]
            elif len(ranks) > 1:
                several = functools.partial(self._several, stream)
                folding[stream] = FoldingSink(self._loop, sink, prefixes, several)
        return folding

    def _prefix(self, rank: int, stream: Stream) -> str:
        chosen = self._spec.outputs.of(rank, stream).prefix
        if chosen is not None:
            return chosen
        if len(self._on_console[stream]) == 1:
            return ""
        return self._coloured(f"[rank {rank}] ", _COLOURS[rank % len(_COLOURS)], stream)

    def _several(self, stream: Stream, ranks: list[int]) -> bytes:
        size = self._spec.world_size
        who = f"all {size} ranks"
        if len(ranks) < size:
            who = f"{len(ranks)} of {size} ranks: {in_ranges(ranks)}"
        return self._coloured(f"[{who}] ", _BOLD, stream).encode()

    def _coloured(self, text: str, colour: int, stream: Stream) -> str:
        if self._console.colour and self._is_terminal(stream):
            return f"\x1b[{colour}m{text}\x1b[0m"
        return text

    def _is_terminal(self, stream: Stream) -> bool:
        console = self._console
        return console.out_is_terminal if stream == "out" else console.err_is_terminal


def _relay(
    run_id: str, stream: Stream, tell: Callable[[AgentMessage], None]
) -> Callable[[bytes], None]:
    def send(data: bytes) -> None:
        tell(ConsoleText(run_id=run_id, stream=stream, data=data))

    return send

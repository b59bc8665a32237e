"""Where the output of a run's ranks goes: which streams, which prefixes, which files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from phalanx import kernel
from phalanx.agent.consoles import Consoles, DescriptorSink, RelaySink
from phalanx.agent.logs import FileSink, GrowingFile, MatchingLines, StreamPump
from phalanx.messages import ConsoleKind, ConsoleText
from phalanx.paths import RunPaths, filtered_file, log_file
from phalanx.spec import StreamOutput

if TYPE_CHECKING:
    import asyncio

    from phalanx.messages import AgentMessage, ConsoleSpec
    from phalanx.spec import LaunchSpec

Stream = Literal["out", "err"]
_TAIL_BYTES = 8 * 1024
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class RunOutput:
    """Gives each worker its standard output and error, and pumps what needs pumping.

    A rank that prints to the console gets pipes; one that prints to a file only gets the file
    itself, with nothing in between.
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
    ) -> None:
        """Take over the console's descriptors."""
        self._loop = loop
        self._spec = spec
        self._console = console
        self._consoles = consoles
        self._on_broken = on_broken
        fds = iter(console_fds)
        self._sinks: dict[Stream, DescriptorSink | RelaySink] = {}
        kinds: dict[Stream, ConsoleKind] = {"out": console.out, "err": console.err}
        for stream, kind in kinds.items():
            if kind == "descriptor":
                self._sinks[stream] = consoles.borrow(next(fds), on_broken)
            else:
                self._sinks[stream] = RelaySink(_relay(spec.run_id, stream, tell))
        self._given_up = False
        self._pumps: dict[int, dict[Stream, StreamPump]] = {}
        self._files: dict[int, dict[Stream, GrowingFile]] = {}

    def begin(self, rank: int, generation: int) -> tuple[int, int]:
        """Return what a worker is to use as standard output and error; the caller owns them."""
        self.end(rank)
        self._pumps[rank] = {}
        self._files[rank] = {}
        return self._begin(rank, generation, "out"), self._begin(rank, generation, "err")

    def _begin(self, rank: int, generation: int, stream: Stream) -> int:
        where, matching = self._where(rank, generation, stream)
        if where.prefix is None and matching is None:
            assert where.file is not None  # noqa: S101 - what goes nowhere else is kept
            fd = self._open(where.file)
            self._files[rank][stream] = GrowingFile(where.file)
            return fd
        reader, writer = os.pipe()
        kernel.widen_pipe(reader)
        path = where.file
        self._pumps[rank][stream] = StreamPump(
            self._loop,
            reader,
            prefix=(where.prefix or "").encode(),
            terminal=self._is_terminal(stream),
            console=None if where.prefix is None else self._sinks[stream],
            file=None if path is None else FileSink(self._open(path), path, self._on_broken),
            matching=matching,
        )
        return writer

    def _where(
        self, rank: int, generation: int, stream: Stream
    ) -> tuple[StreamOutput, MatchingLines | None]:
        """Return where a stream goes, and who collects lines of it."""
        spec = self._spec
        if spec.outputs is not None:
            where = (spec.outputs.out if stream == "out" else spec.outputs.err)[rank]
            wanted = spec.outputs.out_filter if stream == "out" else spec.outputs.err_filter
            if wanted is None or where.file is None or where.prefix is None:
                return where, None
            sink = FileSink(self._open(wanted.file), wanted.file, self._on_broken)
            return where, MatchingLines(sink, wanted.needles, where.prefix)
        file: str | None = None
        if spec.goes_to_file(rank, stream):
            file = str(log_file(self._log_dir, generation, rank, stream))
        prefix = self._prefix(rank, stream) if spec.goes_to_console(rank, stream) else None
        matching = self._matching(rank, generation, stream, self._filters(stream))
        return StreamOutput(file=file, prefix=prefix), matching

    @property
    def _log_dir(self) -> Path:
        if self._spec.log_dir is not None:
            return Path(self._spec.log_dir)
        return RunPaths(root=Path(self._spec.run_dir)).logs

    def _filters(self, stream: Stream) -> tuple[str, ...]:
        return () if self._spec.routes is None else self._spec.routes.filters.get(stream, ())

    def _matching(
        self, rank: int, generation: int, stream: Stream, filters: tuple[str, ...]
    ) -> MatchingLines | None:
        if not filters:
            return None
        path = str(filtered_file(self._log_dir, generation, stream))
        file = FileSink(self._open(path), path, self._on_broken)
        return MatchingLines(file, filters, f"[rank {rank}] ")

    def drain(self, rank: int) -> None:
        """Read all that a worker had printed: it has ended."""
        for pump in self._pumps.get(rank, {}).values():
            pump.drain()

    def tail(self, rank: int) -> str:
        """Return the last lines of a rank, standard output first."""
        pumps, files = self._pumps.get(rank, {}), self._files.get(rank, {})
        tails: list[bytes] = []
        for stream in _streams():
            if stream in pumps:
                tails.append(pumps[stream].tail())
            elif stream in files:
                tails.append(_end_of(files[stream].path))
        text = b"".join(
            tail if tail.endswith(b"\n") or not tail else tail + b"\n" for tail in tails
        )
        return text.decode("utf-8", "backslashreplace")

    def heard_s(self, rank: int) -> float | None:
        """Return when a rank printed last (monotonic); None: never."""
        pumps, files = self._pumps.get(rank, {}), self._files.get(rank, {})
        times = [pump.heard_s() for pump in pumps.values()]
        times += [file.heard_s() for file in files.values()]
        return max((at_s for at_s in times if at_s is not None), default=None)

    def end(self, rank: int) -> None:
        """A worker has ended and been drained."""
        self._files.pop(rank, None)
        for pump in self._pumps.pop(rank, {}).values():
            pump.close()

    def write_plain(self, text: str) -> None:
        """Write to the console without a prefix."""
        self._sinks["out"].write(text.encode("utf-8", "replace"))

    def taken(self, stream: Stream, num_bytes: int) -> None:
        """The launcher has written that much of what was relayed."""
        sink = self._sinks[stream]
        if isinstance(sink, RelaySink):
            sink.taken(num_bytes)

    def when_flushed(self, then: Callable[[], None]) -> None:
        """Call back once everything has gone out."""
        if self._given_up:
            then()
            return
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
        for sink in self._sinks.values():
            if isinstance(sink, DescriptorSink):
                self._consoles.give_back(sink)

    # ── inside ───────────────────────────────────────────────────────────────────────────

    def _open(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            return os.open(path, flags, 0o644)
        except OSError as error:
            self._on_broken(
                f"the log {path} can't be opened ({error.strerror}); the run goes on without it"
            )
            return os.open(os.devnull, flags)

    def _prefix(self, rank: int, stream: Stream) -> str:
        if self._spec.world_size == 1:
            return ""
        text = f"[rank {rank}] "
        if self._console.colour and self._is_terminal(stream):
            return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return text

    def _is_terminal(self, stream: Stream) -> bool:
        console = self._console
        return console.out_is_terminal if stream == "out" else console.err_is_terminal


def _streams() -> tuple[Stream, Stream]:
    return "out", "err"


def _relay(
    run_id: str, stream: Stream, tell: Callable[[AgentMessage], None]
) -> Callable[[bytes], None]:
    def send(data: bytes) -> None:
        tell(ConsoleText(run_id=run_id, stream=stream, data=data))

    return send


def _end_of(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a string is at hand
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES)
    except OSError:
        return b""

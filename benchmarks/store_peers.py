"""The tensor store's peers: each hands tensors from one process to another, its own way.

Every one of them, Phalanx too, is driven by the same loop (`hand_over`) in two processes with
one thread each: rank 0 puts a tensor, then rank 1 gets it, reads all of it, and drops it, as a
training loop would. The next round begins when both are done. Times are of the machine's one
monotonic clock.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phalanx import get_context

WARM_UP = 5
"""Rounds that don't count: the pages and segments that are used again come to be in them."""
_BUDGET_S = 10.0
"""Time for one size; a peer that needs more gets fewer rounds."""
_FEWEST = 2
PATIENCE_S = 300.0

Samples = list[tuple[int, ...]]
"""By round: when a put began and ended; of rank 1: when a get began and ended, all was read
and dropped. In nanoseconds; the rounds of the warm-up come first."""


class Peer:
    """One way to hand a tensor over.

    Attributes:
        name: As it is printed.
        separate: Whether put and get can be told apart. If not, rank 1 waits in `get` already
            when rank 0 calls `put`.
        snapshot: Whether what was put stays what it was when its writer changes the tensor. If
            not, rank 0 makes a new tensor for each round, which is not timed: so there is one
            copy, as with the others.
        compared: Whether it does the same as the others, so that it can be behind or ahead.
        limit: Most bytes that it takes.
    """

    name = ""
    separate = True
    snapshot = True
    compared = True
    limit: float = float("inf")

    @classmethod
    @contextlib.contextmanager
    def shared(cls, start: Any) -> Iterator[object]:
        """Make, in the parent, what both processes get."""
        yield None

    def open(self, rank: int, folder: str, shared: Any, line: Line) -> None:
        """Connect; in both processes."""

    def put(self, tensor: Any) -> None:
        raise NotImplementedError

    def after_put(self) -> None:
        """Do what the reader needs, which isn't timed."""

    def get(self, like: Any) -> Any:
        """Return the tensor; `like` may be written into."""
        raise NotImplementedError

    def close(self) -> None:
        """Hang up; in both processes."""


class Line:
    """Between the two processes, beside what is measured: who may go on."""

    def __init__(self, rank: int, folder: str) -> None:
        path = str(Path(folder, "line"))
        if rank == 0:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen()
                listener.settimeout(PATIENCE_S)
                self._sock, _ = listener.accept()
        else:
            self._sock = _connected(path)
        self._sock.settimeout(PATIENCE_S)

    def tell(self, word: bytes = b".") -> None:
        self._sock.sendall(word)

    def hear(self) -> bytes:
        word = self._sock.recv(1)
        if not word:
            raise RuntimeError("the other process is gone")
        return word


def _connected(path: str) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return sock


# ── the loop ─────────────────────────────────────────────────────────────────────────────


def hand_over(peer: Peer, rank: int, line: Line, num_bytes: int, runs: int) -> Samples:
    """Hand tensors of one size over, again and again; return this rank's times."""
    return _write(peer, line, num_bytes, runs) if rank == 0 else _read(peer, line, num_bytes)


def _write(peer: Peer, line: Line, num_bytes: int, runs: int) -> Samples:
    import torch

    source = torch.rand(num_bytes // 4)
    samples: Samples = []
    deadline = 0.0
    for number in range(WARM_UP + runs):
        if number == WARM_UP:
            deadline = time.monotonic() + _BUDGET_S
        elif number >= WARM_UP + _FEWEST and time.monotonic() > deadline:
            break
        source[0] = source[-1] = number
        tensor = source if peer.snapshot else source.clone()
        line.tell()
        line.hear()  # rank 1 is at its get
        began = time.monotonic_ns()
        peer.put(tensor)
        samples.append((began, time.monotonic_ns()))
        peer.after_put()
        line.tell()
        line.hear()  # rank 1 has read, and dropped what it got
    line.tell(b"!")
    return samples


def _read(peer: Peer, line: Line, num_bytes: int) -> Samples:
    import torch

    like = torch.zeros(num_bytes // 4)
    samples: Samples = []
    while line.hear() == b".":
        line.tell()
        if peer.separate:
            line.hear()  # rank 0 has put
        began = time.monotonic_ns()
        tensor = peer.get(like)
        got = time.monotonic_ns()
        tensor.sum()
        whole = float(tensor[0]) == float(tensor[-1]) == len(samples)
        whole = whole and tensor.nbytes == num_bytes
        del tensor
        samples.append((began, got, time.monotonic_ns()))
        if not peer.separate:
            line.hear()
        line.tell()
        if not whole:
            raise RuntimeError(f"{peer.name}: something else arrived than was put")
    return samples


def work(
    peer: Peer, rank: int, folder: str, shared: object, sizes: dict[int, int]
) -> dict[int, Samples]:
    """Be one of the two processes."""
    import torch

    torch.set_num_threads(1)
    line = Line(rank, folder)
    peer.open(rank, folder, shared, line)
    times = {
        size: hand_over(peer, rank, line, size, runs)
        for size, runs in sizes.items()
        if size <= peer.limit
    }
    peer.close()
    line.tell()
    line.hear()
    return times


def by_size(answers: list[Any]) -> dict[int, list[Samples]] | str:
    """Return both ranks' times by size, or what failed."""
    failed = [answer for answer in answers if isinstance(answer, str)]
    if failed:
        return min(
            failed, key=lambda text: any(word in text for word in ("is gone", "Connection", "Pipe"))
        )  # which knows less
    return {size: [answer[size] for answer in answers] for size in answers[0]}


# ── the peers ────────────────────────────────────────────────────────────────────────────


class Phalanx(Peer):
    name = "Phalanx"

    def open(self, rank: int, folder: str, shared: Any, line: Line) -> None:
        self._context = get_context()

    def put(self, tensor: Any) -> None:
        self._context.put_tensor("key", tensor)

    def get(self, like: Any) -> Any:
        return self._context.get_tensor("key")


class Manager(Peer):
    """A dict in a process of its own; tensors in it are in shared memory."""

    name = "multiprocessing.Manager, dict"
    snapshot = False

    @classmethod
    @contextlib.contextmanager
    def shared(cls, start: Any) -> Iterator[object]:
        with start.Manager() as manager:
            yield manager.dict()

    def open(self, rank: int, folder: str, shared: Any, line: Line) -> None:
        import torch.multiprocessing  # noqa: F401 - it knows how to share tensors

        self._dict = shared

    def put(self, tensor: Any) -> None:
        self._dict["key"] = tensor

    def get(self, like: Any) -> Any:
        return self._dict["key"]


class Queue(Peer):
    name = "torch.multiprocessing.Queue"
    separate = False
    snapshot = False

    @classmethod
    @contextlib.contextmanager
    def shared(cls, start: Any) -> Iterator[object]:
        yield start.Queue()  # what torch.multiprocessing has is the same class

    def open(self, rank: int, folder: str, shared: Any, line: Line) -> None:
        import torch.multiprocessing  # noqa: F401 - it knows how to share tensors

        self._queue = shared

    def put(self, tensor: Any) -> None:
        self._queue.put(tensor)

    def get(self, like: Any) -> Any:
        return self._queue.get(timeout=PATIENCE_S)


class SharedQueue(Queue):
    """The same tensor again and again: both processes see one memory, nothing is copied."""

    name = "torch.multiprocessing.Queue, one tensor shared for good (no copy, no snapshot)"
    snapshot = True  # so that the loop hands the same one over
    compared = False


class TcpStore(Peer):
    name = "TCPStore, bytes (set returns before the store has them)"
    limit = 8 * 1024 * 1024

    def open(self, rank: int, folder: str, shared: Any, line: Line) -> None:
        import torch.distributed as dist

        warnings.filterwarnings("ignore", "The given buffer is not writable")
        path = Path(folder, "port")
        if rank == 0:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            path.write_text(str(self._store.port))
            line.tell()
        else:
            line.hear()
            self._store = dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False)

    def put(self, tensor: Any) -> None:
        self._store.set("key", tensor.numpy().tobytes())

    def after_put(self) -> None:
        self._store.check(["key"])  # `set` returns before the store has it: readers see the old

    def get(self, like: Any) -> Any:
        import torch

        return torch.frombuffer(self._store.get("key"), dtype=torch.float32)


class Gloo(Peer):
    """Into a tensor that the receiver has already."""

    name = "Gloo send/recv"
    separate = False

    def open(self, rank: int, folder: str, shared: Any, line: Line) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2
        )
        self._dist = dist

    def put(self, tensor: Any) -> None:
        self._dist.send(tensor, 1)

    def get(self, like: Any) -> Any:
        self._dist.recv(like, 0)
        return like

    def close(self) -> None:
        self._dist.destroy_process_group()


_arrived: queue.SimpleQueue[object] = queue.SimpleQueue()


def _arrive(value: object) -> None:
    _arrived.put(value)


class Rpc(Peer):
    name = "torch.distributed.rpc, rpc_sync"
    separate = False

    def open(self, rank: int, folder: str, shared: Any, line: Line) -> None:
        warnings.filterwarnings("ignore")
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{folder}/rpc", num_worker_threads=2, rpc_timeout=PATIENCE_S
        )
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        self._rpc = rpc

    def put(self, tensor: Any) -> None:
        self._rpc.rpc_sync("rank1", _arrive, args=(tensor,))

    def get(self, like: Any) -> Any:
        return _arrived.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self._rpc.shutdown()


class Ray(Peer):
    """Two actors; the reference travels by a call, which is not timed."""

    name = "Ray's object store"
    environment: Mapping[str, str] = {}

    def open(self, rank: int, folder: str, shared: Any, line: Line) -> None:
        import ray

        warnings.filterwarnings("ignore")
        self._ray, self._reader = ray, shared

    def put(self, tensor: Any) -> None:
        self._reference = self._ray.put(tensor)

    def after_put(self) -> None:
        # In a list, so that it arrives as a reference.
        self._ray.get(self._reader.accept.remote([self._reference]))

    def get(self, like: Any) -> Any:
        return self._ray.get(_arrived.get(timeout=PATIENCE_S))


class RayZeroCopy(Ray):
    name = "Ray's object store, RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1"
    environment: Mapping[str, str] = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}


class RayActor:
    """A process of Ray's."""

    def work(self, kind: type[Peer], rank: int, folder: str, reader: Any, sizes: Any) -> Any:
        return work(kind(), rank, folder, reader, sizes)

    def accept(self, references: list[object]) -> None:
        _arrived.put(references[0])


PEERS: tuple[type[Peer], ...] = (Manager, Queue, SharedQueue, TcpStore, Rpc, Gloo, Ray, RayZeroCopy)

"""What only multiprocessing can pass on: queues, locks, pipes, shared memory and tensors.

multiprocessing and torch know how to pickle these for a child that is being spawned: they ask
for the thread's "spawning popen" and leave their descriptors with it. `Inheritance` stands in
for one. It is not used up by one child: each worker of each generation gets duplicates.

What has a name in the system (semaphores, a manager's referents) lives as long as an object in
the launcher does, so those are kept for as long as the run may start workers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import types
from collections.abc import Iterator
from contextvars import ContextVar
from multiprocessing import process
from typing import Any

FORK_CONTEXT = (
    "it was made for forked children; "
    'make it from multiprocessing.get_context("spawn"), as in get_context("spawn").Queue()'
)
"""Why a semaphore without a name can't travel."""

_BY_CLOUDPICKLE = (
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    functools.partial,
)
"""multiprocessing registers these too; here they are no different from other functions."""

inherited: ContextVar[list[int]] = ContextVar("phalanx-inherited")
"""While a call is being loaded: the descriptors that came with it."""


class Inheritance:
    """Collects what travels beside a pickle. Owns the descriptors: `close` it."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self.fds: list[int] = []
        self.keeps: list[object] = []
        self._plain: set[type] = set()

    def duplicate_for_child(self, fd: int) -> int:
        """Take along a duplicate; return its place among the descriptors."""
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1

    @staticmethod
    def DupFd(place: int) -> InheritedFd:  # noqa: N802 - multiprocessing's name
        """Return what stands in the pickle for a descriptor."""
        return InheritedFd(place)

    def close(self) -> None:
        """Let go of the descriptors."""
        while self.fds:
            os.close(self.fds.pop())

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Have multiprocessing take this thread for one that spawns a child."""
        context = sys.modules.get("multiprocessing.context")
        if context is None:  # then there is nothing of multiprocessing to be pickled, either
            yield
            return
        before = context.get_spawning_popen()
        context.set_spawning_popen(self)
        try:
            yield
        finally:
            context.set_spawning_popen(before)

    def reduce(self, value: Any, kind: type) -> Any:  # noqa: ANN401 - as pickle has it
        """Return multiprocessing's reduction of a value, or None if it has none of its own.

        Raises:
            pickle.PicklingError: It was made for forked children.
        """
        if kind in self._plain:
            return None
        if _is_a(kind, "multiprocessing.synchronize", "SemLock"):
            if value._semlock.name is None:  # noqa: SLF001 - newer Pythons say so themselves
                raise pickle.PicklingError(FORK_CONTEXT)
            self.keeps.append(value)
        elif _is_a(kind, "multiprocessing.managers", "BaseProxy"):
            self.keeps.append(value)
        elif _reducer_of(kind) is None:
            self._plain.add(kind)
        return _reduction_of(value, kind)

    def family(self) -> tuple[Any, ...]:
        """Return the call by which a worker joins this process' multiprocessing."""
        tracker = sys.modules.get("multiprocessing.resource_tracker")
        fd = None if tracker is None else tracker._resource_tracker._fd  # noqa: SLF001
        place = None if fd is None else self.duplicate_for_child(fd)
        return _join_family, (bytes(process.current_process().authkey), place)


class InheritedFd:
    """In a pickle: a descriptor that travels beside it."""

    def __init__(self, place: int) -> None:
        """Know its place among them."""
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        """See `pickle`."""
        return InheritedFd, (self._place,)

    def detach(self) -> int:
        """Return the descriptor, which is the caller's from then on."""
        return os.dup(inherited.get()[self._place])


def refuse_homeward(kind: type) -> None:
    """Refuse what pickle would take for plain, although it holds a descriptor's number.

    Raises:
        pickle.PicklingError: It does.
    """
    if _is_a(kind, "multiprocessing.connection", "_ConnectionBase"):
        raise pickle.PicklingError("a connection can't leave its process")


def _is_a(kind: type, module: str, name: str) -> bool:
    known = sys.modules.get(module)
    wanted = getattr(known, name, None)
    return wanted is not None and issubclass(kind, wanted)


def _reducer_of(kind: type) -> Any:  # noqa: ANN401 - as pickle has it
    reduction = sys.modules.get("multiprocessing.reduction")
    if reduction is None or kind in _BY_CLOUDPICKLE:
        return None
    return reduction.ForkingPickler._extra_reducers.get(kind)  # noqa: SLF001


def _reduction_of(value: Any, kind: type) -> Any:  # noqa: ANN401 - as pickle has it
    reduce = _reducer_of(kind)
    if reduce is None or (kind.__module__.startswith("torch") and not _is_shared(value)):
        return None
    return reduce(value)


def _is_shared(value: Any) -> bool:  # noqa: ANN401 - a tensor or a storage
    """Whether a tensor or storage is in shared memory: others go by value, to each rank its own.

    CUDA's always say that they are.
    """
    value = getattr(value, "_untyped_storage", value)  # a typed storage warns of itself
    try:
        return value.device.type == "cpu" and bool(value.is_shared())
    except (AttributeError, NotImplementedError, RuntimeError):  # sparse, meta, …
        return False


def _join_family(authkey: bytes, tracker: int | None) -> None:
    """Make a worker's multiprocessing one with the launcher's, before anything else is loaded.

    With a tracker of its own, a worker's end would unlink segments that others still use.
    """
    process.current_process().authkey = authkey
    if tracker is not None:
        from multiprocessing import resource_tracker  # noqa: PLC0415 - if it is in use

        resource_tracker._resource_tracker._fd = os.dup(  # type: ignore[attr-defined]  # noqa: SLF001
            inherited.get()[tracker]
        )

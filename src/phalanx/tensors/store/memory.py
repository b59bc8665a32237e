"""A client's side of shared memory: writing into segments, mapping what others wrote.

Writing into pages that exist and are mapped goes at the speed of memcpy; mapping them anew
takes half of that, and pages that don't exist yet a multiple. So a process keeps the segments
that it wrote mapped for its next turn, and the first write into a new one goes through the
file, which spares mapping it at all.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from phalanx.tensors.store.layout import Plan, bytes_of, has_plain_bytes, write
from phalanx.values.errors import StoreFullError

if TYPE_CHECKING:
    from phalanx.tensors.store.messages import Reserved

_MAX_KEPT: Final = 64
_POPULATE: Final = getattr(mmap, "MAP_POPULATE", 0)
_FILE_OF: Final = "/proc/self/fd/{}" if Path("/proc/self/fd").exists() else "/dev/fd/{}"

_of_the_parent: list[object] = []
"""Mappings of a process that this one was forked from. They are not there (MADV_DONTFORK), so
they must be neither used nor unmapped: something else may be in their place."""


class WrittenSegments:
    """The segments that this process has written and keeps mapped. Usable from any thread."""

    def __init__(self) -> None:
        """Begin with none."""
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Which segments are mapped."""
        with self._lock:
            return tuple(self._kept)

    def write(self, plan: Plan, fd: int, reserved: Reserved) -> None:
        """Copy a value into a segment; blocks for as long as the copy takes.

        Raises:
            StoreFullError: The system has no memory for it.
        """
        self._forget(reserved.gone)
        if reserved.fresh:
            _make_pages(fd, plan.num_bytes)
            if all(has_plain_bytes(tensor) for tensor, _ in plan.tensors):
                _write_through_file(plan, fd)
                return
        write(plan, self._mapped(fd, reserved))

    def leave_to_parent(self) -> None:
        """In a child just forked: these mappings are the parent's."""
        _of_the_parent.append(self._kept)
        self._kept = OrderedDict()
        self._lock = threading.Lock()

    def _mapped(self, fd: int, reserved: Reserved) -> torch.Tensor:
        with self._lock:
            memory = self._kept.get(reserved.segment)
            if memory is not None:
                self._kept.move_to_end(reserved.segment)
                return memory
        mapping = mmap.mmap(fd, reserved.num_bytes, flags=mmap.MAP_SHARED | _POPULATE)
        if hasattr(mmap, "MADV_DONTFORK"):
            mapping.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping
        if reserved.keep:
            with self._lock:
                self._kept[reserved.segment] = memory
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        return memory

    def _forget(self, numbers: tuple[int, ...]) -> None:
        with self._lock:
            for number in numbers:
                self._kept.pop(number, None)


def map_privately(fd: int, num_bytes: int) -> torch.UntypedStorage:
    """Map a segment copy-on-write: what is written into it nobody else sees. 8 µs.

    The descriptor stays the caller's, and the mapping does not need it.
    """
    storage: torch.UntypedStorage = torch.UntypedStorage.from_file(
        _FILE_OF.format(fd), shared=False, nbytes=num_bytes
    )
    return storage


def copied(data: bytes) -> torch.UntypedStorage:
    """Return memory of this process with these bytes."""
    if not data:
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()


def as_bytes(plan: Plan) -> bytes:
    """Return a small value as the bytes that travel in a message."""
    if len(plan.tensors) == 1 and has_plain_bytes(plan.tensors[0][0]):
        tensor = plan.tensors[0][0]
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
    memory = bytearray(plan.num_bytes)
    if memory:
        write(plan, torch.frombuffer(memory, dtype=torch.uint8))
    return bytes(memory)


def _make_pages(fd: int, num_bytes: int) -> None:
    """Get memory for a new segment, and hear here if there is none: a mapping would be killed."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        raise StoreFullError(
            f"the system has no {num_bytes:,} bytes of shared memory left ({error.strerror}); "
            "delete keys (delete_tensor), or run fewer workers"
        ) from error


def _write_through_file(plan: Plan, fd: int) -> None:
    for tensor, offset in plan.tensors:
        data = bytes_of(tensor)
        if not len(data):
            continue
        view = memoryview((ctypes.c_char * len(data)).from_address(data.data_ptr()))
        done = 0
        while done < len(view):  # the kernel takes at most 2 GiB at once
            done += os.pwrite(fd, view[done:], offset + done)

"""Many descriptors travel as one: queued in a socket that is only ever peeked into.

The kernel hands out new descriptors at each peek and keeps its own, so all ranks of all
generations can unpack the same parcel, and whoever only passes it on holds one descriptor.
"""

from __future__ import annotations

import array
import os
import socket
import stat
from collections.abc import Sequence

_MAX_ITEMS = 250
"""The kernel takes at most 253 descriptors in one message."""
_ITEMS, _PARCELS = b"i", b"p"


def pack(fds: Sequence[int]) -> int:
    """Return a parcel with duplicates of these descriptors, which stay the caller's.

    Raises:
        OSError: There are more than this user may have on the way.
    """
    if len(fds) <= _MAX_ITEMS:
        return _post(_ITEMS, fds)
    parcels: list[int] = []
    try:
        for start in range(0, len(fds), _MAX_ITEMS):
            parcels.append(pack(fds[start : start + _MAX_ITEMS]))  # noqa: PERF401 - see finally
        return _post(_PARCELS, parcels)
    finally:
        for parcel in parcels:
            os.close(parcel)


def unpack(fd: int) -> list[int]:
    """Return new descriptors for what is in a parcel; one that is no parcel is its own content.

    Args:
        fd: Owned from here on.
    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return [fd]
    with socket.socket(fileno=fd) as sock:
        items = array.array("i")
        space = socket.CMSG_SPACE(_MAX_ITEMS * items.itemsize)
        flags = socket.MSG_PEEK | getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        kind, ancillary, _, _ = sock.recvmsg(1, space, flags)
    for _, _, data in ancillary:
        items.frombytes(data)
    if kind == _ITEMS:
        return list(items)
    return [fd for parcel in items for fd in unpack(parcel)]


def _post(kind: bytes, fds: Sequence[int]) -> int:
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with writer:
        try:
            rights = array.array("i", fds)
            writer.sendmsg([kind], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except BaseException:
            reader.close()
            raise
    return reader.detach()

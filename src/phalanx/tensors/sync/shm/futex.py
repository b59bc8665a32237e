"""Words in shared memory that processes wait for: plain stores, futex(2), and why none sleeps on.

**One writer each.** A counter is written by one rank only, and only grows. A plain aligned
8-byte store is one instruction, so a reader sees the old value or the new one. x86-64 keeps
the stores of a processor in order, and its loads: who sees a counter sees what was written
before it. Other processors promise neither, and Python has no fences, so there is no `shm`
backend on them.

**Why no wake-up is lost.** A publisher stores its counter, then always calls
``futex(FUTEX_WAKE)``. A waiter reads the counter, finds it too small and calls
``futex(FUTEX_WAIT)`` with what it read. The kernel compares the word again under the lock of
the futex's queue. If the store is visible by then, the wait returns at once. If not, the
waiter is in the queue before the publisher's wake takes that lock (a locked instruction, so
the store before it is visible to whoever gets the lock later): the wake finds it. Nobody asks
"does anyone sleep?" before waking, which is the load that could overtake the store.

**Why waiters watch the publisher's word.** One call wakes all that wait for a rank, however
many there are, and a waiter wakes once for the word that it lacks. A doorbell per waiter would
cost a call per peer, and wake it for each. Where a rank waits for whoever comes first
(`Mailboxes`), it has a doorbell; peers add to it inside the kernel (``FUTEX_WAKE_OP``), since
two plain stores could meet.

Only the low 4 bytes of a counter are compared by the kernel. Every sleep is bounded all the
same: sleepers look up to see whether their peers live.

Source:
    U. Drepper, "Futexes are tricky", 2011; futex(2).
"""

from __future__ import annotations

import ctypes
from typing import Final

_SYS_FUTEX: Final = 202  # x86-64
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_FUTEX_WAKE_OP: Final = 5
_EVERYBODY: Final = 2**31 - 1
_ADD_ONE: Final = 1 << 28 | 1 << 12


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _syscall(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = library.syscall
    function.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    function.restype = ctypes.c_long
    return function


_wait = _syscall(ctypes.CDLL(None))
"""Lets other threads run meanwhile."""
_wake = _syscall(ctypes.PyDLL(None))
"""Keeps the interpreter lock: giving it back and asking for it again would cost more."""


def wake_all(address: int) -> None:
    """Wake all processes that wait for the word at an address of shared memory."""
    _wake(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)


def ring(address: int) -> None:
    """Add 1 to a word that others may be adding to, and wake who waits for it."""
    _wake(_SYS_FUTEX, address, _FUTEX_WAKE_OP, _EVERYBODY, None, address, _ADD_ONE)


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleep until the word may have changed; also returns early, or after `timeout_s`.

    Args:
        address: Of the word, 4-byte aligned.
        seen: The value that the caller read there and can't go on with.
        timeout_s: Upper bound in seconds.
    """
    seconds = int(timeout_s)
    limit = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _wait(_SYS_FUTEX, address, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)

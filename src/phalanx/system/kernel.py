"""Kernel facts: what Linux offers for owning processes, and what stands in for it elsewhere.

**Who may be signalled.** A pid is a number that the kernel gives to somebody else as soon as
its zombie is reaped. Signals therefore go through a pidfd, which means one process for ever,
or come from the parent before it reaps. Where there are no pidfds (other systems, old
kernels, or ``PHALANX_WITHOUT_PIDFD`` in a test) only the second way is left.

**Who inherits orphans.** A process whose parent dies goes to the nearest living ancestor that
declared itself a *subreaper*, else to pid 1. `setsid` does not change that. Agent and fork
server are subreapers, so a worker's grandchildren come to the fork server, and if that is
gone, to the agent: nobody escapes.

**PR_SET_PDEATHSIG** sends a signal when the *thread* that forked ends, not the process: fork
from the main thread. It is cleared by fork and kept by exec, and there is a race between
fork and prctl: look at the parent's pid afterwards.

**memfd** files have no name: whoever is killed, nothing is left in ``/dev/shm``.

**Who still maps a file** the kernel tells through leases: a write lease on a reopening of a
memfd is granted only if no other reopening is left, neither as a descriptor (on its way in a
message included) nor as a mapping, in whatever process. The descriptor that `memfd_create`
returned does not count, nor do mappings made from it: whoever reads must get a reopening.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

from phalanx.values.failures import Exit, Exited, Signaled

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_F_SETPIPE_SZ: Final = 1031
_MADV_COLLAPSE: Final = 25
_HUGE_PAGE: Final = 1 << 21

HAS_PIDFD: Final = (
    sys.platform == "linux"
    and hasattr(os, "pidfd_open")
    and not os.environ.get("PHALANX_WITHOUT_PIDFD")
)
"""Whether processes can be held by descriptor."""

HAS_ABSTRACT_SOCKETS: Final = sys.platform == "linux"

HAS_LEASES: Final = (
    hasattr(fcntl, "F_SETLEASE")
    and hasattr(os, "memfd_create")
    and not os.environ.get("PHALANX_WITHOUT_LEASES")
)
"""Whether the kernel may tell who still maps a file (`nobody_reads`)."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


def become_subreaper() -> None:
    """Have orphaned descendants of this process come to it (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent's forking thread ends; end now if that has happened already.

    Args:
        parent_pid: The parent as it was before the fork.
    """
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def outlive_parent() -> None:
    """Take `die_with_parent` back."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, 0)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor for a process, or None where there are none.

    The caller must know that `pid` still means the process it thinks of (its own child that
    it has not reaped, or its parent).
    """
    if not HAS_PIDFD:
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def signal_pidfd(pidfd: int, signum: int) -> bool:
    """Send a signal through a pidfd; False when the process is gone."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    return True


def to_exit(code: int, status: int) -> Exit:
    """Turn what waitid says (si_code, si_status) into an exit."""
    if code == os.CLD_EXITED:
        return Exited(status)
    return Signaled(status, signal_name(status))


def signal_name(signum: int) -> str:
    """Return ``SIGKILL`` for 9, and so on."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def peek_exit(pid: int) -> Exit | None:
    """Return how a child ended without reaping it, or None while it runs.

    Raises:
        ChildProcessError: It is no child of this process (any more).
    """
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    found = os.waitid(os.P_PID, pid, options)
    return None if found is None else to_exit(found.si_code, found.si_status)


def reap(pid: int) -> None:
    """Collect a child that has ended; from here on its pid means nothing."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def open_anonymous_file(name: str) -> int:
    """Return a read-write descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        return os.dup(file.fileno())


def reopen(fd: int, flags: int) -> int:
    """Return a new description of an anonymous file, with a mode of its own."""
    if not hasattr(os, "memfd_create"):
        return os.dup(fd)  # elsewhere an unnamed file can't be opened again
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def nobody_reads(fd: int) -> bool:
    """Whether no reopening of a memfd is left anywhere, as a descriptor or as a mapping.

    Args:
        fd: What `open_anonymous_file` returned, not a reopening.
    """
    if not HAS_LEASES:
        return False
    writer = reopen(fd, os.O_RDWR)
    try:
        fcntl.fcntl(writer, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    finally:
        os.close(writer)  # the lease, too, ends with it
    return True


def fill_standard_fds() -> None:
    """Open what is closed of descriptors 0 to 2, so that no socket of ours gets these numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(fd, True)
    os.close(fd)


def is_terminal_in_background(fd: int) -> bool:
    """Whether this is a terminal that another job than ours has at the moment."""
    if not os.isatty(fd):
        return False
    try:
        return os.tcgetpgrp(fd) != os.getpgrp()
    except OSError:  # the terminal of another session: nobody's job control
        return False


def max_descriptors() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if 0 < soft < 1 << 30 else 1 << 30


def widen_pipe(fd: int, num_bytes: int = 1 << 20) -> None:
    """Give a pipe a larger buffer, as far as the kernel's limit for this user allows."""
    size = num_bytes
    while sys.platform == "linux" and size > 65_536:
        try:
            fcntl.fcntl(fd, _F_SETPIPE_SZ, size)
        except OSError:
            size //= 2
        else:
            return


def close_all_fds(keep: set[int]) -> None:
    """Close every descriptor of this process except those in `keep`."""
    low = 0
    for fd in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        if low < fd:  # an empty range would reach close_range(2) as one that never ends
            os.closerange(low, fd)
        low = fd + 1


def collapse_memory() -> None:
    """Move this process' private memory into huge pages, as far as the kernel will.

    A fork copies the page tables of private memory, and an exit takes them apart: with huge
    pages both take a quarter of the time (of a process that imported torch: 5 ms → 1.3 ms).
    A child that writes still gets a copy of 4 KiB only. Blocks for about 3 ms per 2 MiB.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions.startswith("rw") and name in ([], ["[heap]"]):
            low, high = (int(number, 16) for number in span.split("-"))
            start = -(-low // _HUGE_PAGE) * _HUGE_PAGE
            for address in range(start, high - _HUGE_PAGE + 1, _HUGE_PAGE):
                libc.madvise(address, _HUGE_PAGE, _MADV_COLLAPSE)  # an old kernel refuses: fine


# ── what /proc says ──────────────────────────────────────────────────────────────────────


def child_pids() -> list[int]:
    """Return the pids of this process' children, zombies included (Linux; elsewhere none)."""
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return [int(word) for word in text.split()]
    except FileNotFoundError:
        return _child_pids_by_scan()


def _child_pids_by_scan() -> list[int]:
    """For kernels without CONFIG_PROC_CHILDREN."""
    if sys.platform != "linux":
        return []
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    return [pid for pid in pids if parent_and_session(pid)[0] == os.getpid()]


def parent_and_session(pid: int) -> tuple[int, int]:
    """Return a process' parent and session, or (0, 0) when it is gone."""
    fields = _stat_fields(pid)
    return (int(fields[1]), int(fields[3])) if fields else (0, 0)


def process_state(pid: int) -> str:
    """Return a process' state as a letter, as ``S``, ``T`` or ``D``; empty when it is gone."""
    fields = _stat_fields(pid)
    return fields[0].decode() if fields else ""


def _stat_fields(pid: int) -> list[bytes]:
    """Return what the kernel says of a process behind its name, which may hold anything."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return stat[stat.rindex(b")") + 2 :].split()


def environment_value(pid: int, name: str) -> str | None:
    """Return a variable of the environment that a process was started with."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    start = f"{name}=".encode()
    for entry in environ.split(b"\0"):
        if entry.startswith(start):
            return entry[len(start) :].decode(errors="replace")
    return None


def catches_signal(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def memory_limit() -> int:
    """Return how many bytes of memory this process may have: the machine's, or its container's."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, v1
        with contextlib.suppress(OSError, ValueError):
            limit = min(limit, int(Path("/sys/fs/cgroup", name).read_text()))
    return limit


def visible_gpus(environment: dict[str, str]) -> tuple[str, ...]:
    """Return the names of the GPUs that an environment lets a process see, without CUDA."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    devices = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return tuple(sorted((name for name in devices if name.isdigit()), key=int))

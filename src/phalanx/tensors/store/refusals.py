"""What the store answers when it can't: why, and what to do."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from phalanx.tensors.store.messages import Refused

if TYPE_CHECKING:
    from phalanx.tensors.store.segments import PoolFullError

_NUM_NEAR_KEYS: Final = 3


def full(error: PoolFullError) -> Refused:
    """The limit is reached."""
    num_bytes, balance = error.args
    return Refused(
        why="full",
        message=f"{num_bytes:,} bytes more don't fit into the tensor store: {balance}. Delete "
        "keys (delete_tensor), or give start_processes a larger store_limit",
    )


def no_memory_file(num_bytes: int, error: OSError) -> Refused:
    """The system refused a file or a descriptor."""
    return Refused(
        why="full",
        message=f"the system gave no memory file of {num_bytes:,} bytes: {error.strerror} "
        "(`ulimit -f` and `ulimit -n` limit files' sizes and numbers)",
    )


def still_held(key: str, timeout_s: float | None, holder: str) -> Refused:
    """Somebody else is changing the key."""
    return Refused(
        why="timeout",
        message=f"{key!r} was not let go within {timeout_s:g} s: {holder} is in update_tensor "
        "with it. Nested updates of several keys must take them in the same order on all ranks",
    )


def nobody_put(key: str, timeout_s: float | None, there: list[str], who_is_alive: str) -> Refused:
    """The key has not come."""
    near = difflib.get_close_matches(key, there, n=_NUM_NEAR_KEYS)
    if near:
        others = f"keys like it: {', '.join(map(repr, near))}"
    else:
        others = f"{len(there)} other keys are there" if there else "no key is there"
    late = f" within {timeout_s:g} s" if timeout_s else ""
    return Refused(why="timeout", message=f"nobody has put {key!r}{late}; {others}; {who_is_alive}")

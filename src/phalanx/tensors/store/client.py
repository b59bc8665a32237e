"""The tensor store as workers and launcher use it.

Each operation is a question to the agent and its answer, over one of a few sockets that a
process keeps: as many as its threads ask at once. A forked child (a DataLoader worker) opens
its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from msgspec.structs import replace

from phalanx.tensors.store.conversation import Conversation
from phalanx.tensors.store.layout import Plan, Tree, plan_tensor, plan_tree, read
from phalanx.tensors.store.memory import WrittenSegments, as_bytes, copied, map_privately
from phalanx.tensors.store.messages import (
    Commit,
    Delete,
    Done,
    Found,
    Get,
    GetCommitted,
    GiveBack,
    Has,
    Hold,
    Keys,
    LetGo,
    ListKeys,
    Put,
    StoreRequest,
)
from phalanx.values.errors import (
    StoreClosedError,
    StoreError,
    TensorError,
)
from phalanx.values.spec import Duration, to_seconds
from phalanx.wire import frames

if TYPE_CHECKING:
    import socket

_MAX_KEY = 1024
"""Longest key, in bytes of UTF-8."""

D = TypeVar("D")


class TensorClient:
    """What a context does with tensors. Usable from any thread, and after a fork."""

    def __init__(
        self, connect: Callable[[], socket.socket], on_done: Callable[[], None] | None = None
    ) -> None:
        """Keep the way to open a socket to the store; nothing is opened before it is needed.

        Args:
            connect: Opens one.
            on_done: Called when an operation has come to its end.
        """
        self._connect = connect
        self._on_done = on_done
        self._idle: list[Conversation] = []
        weakref.finalize(self, _hang_up, self._idle).atexit = False
        self._written = WrittenSegments()
        self._holding = threading.local()
        self._pid = os.getpid()
        self._closed = False

    # ── one tensor ───────────────────────────────────────────────────────────────────────

    def put(self, key: str, tensor: torch.Tensor, timeout: Duration | None) -> None:
        """See `SubprocessContext.put_tensor`."""
        self._put_plan(key, plan_tensor(tensor), timeout)

    def get(
        self, key: str, timeout: Duration | None, device: torch.device | str | None
    ) -> torch.Tensor:
        """See `SubprocessContext.get_tensor`."""
        value, is_tree = self._get(key, timeout)
        if is_tree:
            raise TensorError(f"{key!r} holds a tree of tensors: use get_tensors({key!r})")
        tensor: torch.Tensor = value if device is None else value.to(device)
        return tensor

    def update(
        self,
        key: str,
        function: Callable[[torch.Tensor], torch.Tensor],
        timeout: Duration | None,
    ) -> torch.Tensor:
        """See `SubprocessContext.update_tensor`."""
        with self._hold(key, timeout, may_be_missing=False) as (conversation, old):
            new = function(_one_tensor(key, old))
            if not isinstance(new, torch.Tensor):
                raise TensorError(
                    f"update_tensor({key!r}): the function returned a {type(new).__name__}; it "
                    "must return the new tensor, also if it changed the one that it got"
                )
            self._put_held(conversation, key, plan_tensor(new))
        return new.detach()

    def add(self, key: str, tensor: torch.Tensor, timeout: Duration | None) -> torch.Tensor:
        """See `SubprocessContext.add_tensor`."""
        summand = plan_tensor(tensor).tensors[0][0]
        with self._hold(key, timeout, may_be_missing=True) as (conversation, old):
            # What the caller gave stays its own.
            total = summand.clone() if old is None else _sum(key, _one_tensor(key, old), summand)
            self._put_held(conversation, key, plan_tensor(total))
        return total

    # ── trees ────────────────────────────────────────────────────────────────────────────

    def put_tree(self, key: str, tree: Tree, timeout: Duration | None) -> None:
        """See `SubprocessContext.put_tensors`."""
        self._put_plan(key, plan_tree(tree), timeout)

    def get_tree(self, key: str, timeout: Duration | None) -> Tree:
        """See `SubprocessContext.get_tensors`."""
        return self._get(key, timeout)[0]

    def commit(self, key: str, tree: Tree, version: int, rank: int) -> None:
        """See `SubprocessContext.commit_tensors`."""
        _check_key(key)
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**63:
            raise TensorError(f"version must be a whole number from 0, not {version!r}")
        plan = plan_tree(tree)
        request = Commit(
            key=key, version=version, rank=rank, layout=plan.layout, num_bytes=plan.num_bytes
        )
        with self._conversation() as conversation:
            self._send_value(conversation, plan, request)

    def get_committed(self, key: str, rank: int) -> tuple[int, Tree] | None:
        """See `SubprocessContext.get_committed_tensors`."""
        _check_key(key)
        with self._conversation() as conversation:
            reply, fds = conversation.ask(GetCommitted(key=key, rank=rank))
            if not isinstance(reply, Found):
                return None
            return reply.version, _value_of(reply, fds)[0]

    # ── keys ─────────────────────────────────────────────────────────────────────────────

    def delete(self, key: str, timeout: Duration | None) -> bool:
        """See `SubprocessContext.delete_tensor`."""
        self._check_not_held(key)
        done = self._ask(Delete(key=key, timeout_s=_seconds(timeout)), Done)
        return done.existed

    def has(self, key: str) -> bool:
        """See `SubprocessContext.has_tensor`."""
        _check_key(key)
        return self._ask(Has(key=key), Done).existed

    def keys(self) -> list[str]:
        """See `SubprocessContext.keys`."""
        return list(self._ask(ListKeys(), Keys).names)

    def close(self) -> None:
        """Hang up. Tensors that were got stay as they are."""
        self._closed = True
        _hang_up(self._idle)
        self._written = WrittenSegments()

    # ── values on their way ──────────────────────────────────────────────────────────────

    def _put_plan(self, key: str, plan: Plan, timeout: Duration | None) -> None:
        self._check_not_held(key)
        request = Put(
            key=key,
            layout=plan.layout,
            num_bytes=plan.num_bytes,
            timeout_s=_seconds(timeout),
            another=True,
        )
        with self._conversation() as conversation:
            self._send_value(conversation, plan, request)

    def _put_held(self, conversation: Conversation, key: str, plan: Plan) -> None:
        request = Put(key=key, layout=plan.layout, num_bytes=plan.num_bytes, holding=True)
        self._send_value(conversation, plan, request)

    def _send_value(self, conversation: Conversation, plan: Plan, request: Put | Commit) -> None:
        """Send a request with its value: a small one in the message, a large one in a segment."""
        if plan.num_bytes <= frames.INLINE_LIMIT:
            conversation.put(replace(request, data=as_bytes(plan)))
            return
        reserved, fd = conversation.reserve(plan.num_bytes, self._written.numbers)
        try:
            self._written.write(plan, fd, reserved)
            conversation.put(replace(request, segment=reserved.segment))
        except StoreClosedError:
            raise
        except Exception:
            conversation.ask(GiveBack(segment=reserved.segment))
            raise
        finally:
            os.close(fd)

    def _get(self, key: str, timeout: Duration | None) -> tuple[Tree, bool]:
        _check_key(key)
        request = Get(key=key, timeout_s=_seconds(timeout))
        with self._conversation() as conversation:
            reply, fds = conversation.ask(request)
            assert isinstance(reply, Found)  # noqa: S101 - what the server answers
            return _value_of(reply, fds)

    @contextlib.contextmanager
    def _hold(
        self, key: str, timeout: Duration | None, *, may_be_missing: bool
    ) -> Iterator[tuple[Conversation, tuple[Tree, bool] | None]]:
        """Hold a key for a block that ends by `_put_held`, or by an exception."""
        self._check_not_held(key)
        request = Hold(key=key, timeout_s=_seconds(timeout), may_be_missing=may_be_missing)
        with self._conversation() as conversation:
            reply, fds = conversation.ask(request)
            held = self._held_keys()
            held.add(key)
            try:
                old = _value_of(reply, fds) if isinstance(reply, Found) else None
                yield conversation, old
            except StoreClosedError:
                raise
            except Exception:
                conversation.ask(LetGo(key=key))
                raise
            finally:
                held.discard(key)

    # ── conversations ────────────────────────────────────────────────────────────────────

    def _ask(self, request: StoreRequest, expected: type[D]) -> D:
        with self._conversation() as conversation:
            reply, _ = conversation.ask(request)
            assert isinstance(reply, expected)  # noqa: S101 - what the server answers
            return reply

    @contextlib.contextmanager
    def _conversation(self) -> Iterator[Conversation]:
        """Take a socket for a block.

        If a question is broken off, its answer would come to the next: it is hung up then.
        """
        if self._pid != os.getpid():
            self._begin_anew()
        if self._closed:
            raise StoreClosedError("the tensor store was closed with its context")
        try:
            conversation = self._idle.pop()
        except IndexError:
            conversation = Conversation(self._connect())
        try:
            yield conversation
        except StoreClosedError:
            conversation.close()
            raise
        except Exception:  # the answer has come: StoreError, or from user code in between
            self._idle.append(conversation)
            raise
        except BaseException:
            conversation.close()
            raise
        self._idle.append(conversation)
        if self._on_done is not None:
            self._on_done()

    def _begin_anew(self) -> None:
        """In a forked child: the parent's sockets are not ours to speak on."""
        self._pid = os.getpid()
        _hang_up(self._idle)
        self._written.leave_to_parent()
        self._holding = threading.local()

    def _held_keys(self) -> set[str]:
        held: set[str] | None = getattr(self._holding, "keys", None)
        if held is None:
            held = self._holding.keys = set()
        return held

    def _check_not_held(self, key: str) -> None:
        _check_key(key)
        if key in self._held_keys():
            raise StoreError(
                f"{key!r} is being updated by this very thread: inside the function of "
                "update_tensor return the new value instead of putting it"
            )


def _hang_up(conversations: list[Conversation]) -> None:
    while conversations:
        conversations.pop().close()


def _value_of(found: Found, fds: list[int]) -> tuple[Tree, bool]:
    if found.data is not None:
        return read(found.layout, copied(found.data))
    try:
        return read(found.layout, map_privately(fds[0], found.num_bytes))
    finally:
        os.close(fds[0])


def _one_tensor(key: str, value: tuple[Any, bool] | None) -> torch.Tensor:
    assert value is not None  # noqa: S101 - the server waits for the key
    if value[1]:
        raise TensorError(
            f"{key!r} holds a tree of tensors: get_tensors and put_tensors are for it"
        )
    tensor: torch.Tensor = value[0]
    return tensor


def _sum(key: str, old: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
    """Return the sum, in shape and dtype of what is there."""
    if old.shape != summand.shape:
        raise TensorError(
            f"add_tensor({key!r}): shape {tuple(summand.shape)} can't be added to the "
            f"{tuple(old.shape)} that is there"
        )
    kind = torch.result_type(old, summand)
    if not torch.can_cast(kind, old.dtype):
        raise TensorError(
            f"add_tensor({key!r}): a sum of {old.dtype} and {summand.dtype} does not fit into "
            f"the {old.dtype} that is there"
        )
    return torch.add(old, summand.to(old.device)).to(old.dtype)


def _check_key(key: str) -> None:
    if not isinstance(key, str):
        raise TensorError(f"a key must be a string, not {key!r:.80}")
    try:
        length = len(key.encode())
    except UnicodeEncodeError as error:
        raise TensorError(f"the key {key!r:.80} is no valid text") from error
    if not 0 < length <= _MAX_KEY:
        raise TensorError(
            f"a key must have 1 to {_MAX_KEY:,} bytes, not {length:,}"
            + (f" ({key[:40]!r}…)" if key else "")
        )


def _seconds(timeout: Duration | None) -> float | None:
    return None if timeout is None else to_seconds("timeout", timeout)

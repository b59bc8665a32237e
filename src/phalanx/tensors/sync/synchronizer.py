"""`synchronize()`: averages gradients over all ranks, between backward() and step().

Each call begins with a header that all ranks combine (`header`): are they in the same call,
about the same parameters; who has which gradients. Then the gradients follow, in buckets
(`plan`, `buckets`), or have been on their way since backward() already.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from phalanx.system.whereabouts import stack_of
from phalanx.tensors.sync.groups import GradientGroup
from phalanx.tensors.sync.guard import Guard
from phalanx.tensors.sync.header import MAX_BUCKETS, MAX_PARAMETERS, Agreement, Header
from phalanx.tensors.sync.optimizers import known_optimizers
from phalanx.tensors.sync.parameters import (
    Named,
    Target,
    describe,
    modules_around,
    parameters_of,
    signature,
    value_digest,
    with_names,
)
from phalanx.tensors.sync.plan import Plan
from phalanx.values.errors import SynchronizeError, SynchronizeTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.system.page import ControlPage
    from phalanx.values.spec import WorkerSpec

_MAX_PLANS: Final = 16
"""Sets of parameters that are remembered; a training has one to three."""
_MAX_NAMED: Final = 5


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `synchronize` was asked for besides its target; see `SubprocessContext`."""

    average: bool = True
    align: bool = True
    overlap: bool | None = None
    check_finite: bool = False
    guard: bool = True
    bucket_mb: float = 25.0
    timeout_s: float = 300.0


class Synchronizer:
    """One worker's side of all its `synchronize()` calls."""

    def __init__(self, worker: WorkerSpec, page: ControlPage, backend: str) -> None:
        """Join no group yet."""
        self._worker = worker
        self._page = page
        self._backend = backend
        self._group: GradientGroup | None = None
        self._guard = Guard()
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._num_calls = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def synchronize(self, target: Target | None, options: Options) -> None:
        """See `SubprocessContext.synchronize`."""
        parameters = parameters_of(known_optimizers() if target is None else target)
        if target is None and not parameters:
            raise SynchronizeError(
                "synchronize() without a target means the parameters of all optimizers made in "
                "this worker, and there are none: make an optimizer first, or pass the model"
            )
        self._exclusively(lambda: self._synchronize(parameters, target, options))

    def broadcast(self, target: Target) -> None:
        """See `SubprocessContext.broadcast_parameters`."""
        tensors = _state_of(target)
        if self._worker.world_size > 1:
            self._exclusively(lambda: self._broadcast(tensors))

    def _exclusively(self, action: Callable[[], None]) -> None:
        if os.getpid() != self._pid:
            raise SynchronizeError(
                "this is a process that a worker has forked: gradients are the worker's own affair"
            )
        if not self._lock.acquire(blocking=False):
            raise SynchronizeError(
                "another thread of this worker is in synchronize() or broadcast_parameters(): "
                "call them from one thread, in the same order on all ranks"
            )
        try:
            with torch.no_grad():
                action()
        finally:
            self._lock.release()

    # ── one call ─────────────────────────────────────────────────────────────────────────

    def _synchronize(
        self, parameters: list[Named], target: Target | None, options: Options
    ) -> None:
        self._num_calls += 1
        self._page.note_synchronize(self._worker.rank, self._num_calls)
        plan = self._plan_of(parameters, options)
        plan.num_calls += 1
        if self._worker.world_size > 1:
            self._reduce(plan, target, options)
        elif options.check_finite:
            _raise_if_not_finite({self._worker.rank: _not_finite(plan)})
        plan.mark_averaged()
        if options.guard:
            self._guard.begin()
        else:
            self._guard.stop()

    def _reduce(self, plan: Plan, target: Target | None, options: Options) -> None:
        for other in self._plans.values():
            if other is not plan:
                other.flush()
        if plan.armed:
            plan.launch_all()
        first = plan.num_calls == 1
        present = plan.present()
        not_finite = _not_finite(plan) if options.check_finite else []
        header = Header(
            call=self._num_calls,
            signature=plan.signature,
            values=value_digest(plan.parameters) if first and options.align else 0,
            stale=plan.stale() if plan.armed else frozenset(),
            not_finite=bool(not_finite),
            present=present if len(plan.parameters) <= MAX_PARAMETERS else frozenset(),
        )
        agreed = self._agree(header, plan, options.timeout_s)
        if agreed.not_finite:
            plan.stop()
            self._name_what_is_not_finite(not_finite)
        union = agreed.present
        if len(plan.parameters) > MAX_PARAMETERS:
            union = self._joined_group().union(present, len(plan.parameters))
        plan.fill_gaps(union)
        whole = len(union) == len(plan.parameters)
        plan.restless = plan.restless or bool(agreed.stale)
        if not agreed.same_values:
            self._align(plan, target, union, average=options.average)
        elif plan.armed and whole:
            plan.finish(agreed.stale)
        else:
            plan.stop()
            plan.reduce(union)
        overlap = options.overlap
        if overlap is None:
            overlap = not self._joined_group().shares_memory
        if overlap and whole and len(plan.buckets) <= MAX_BUCKETS and not plan.restless:
            plan.arm()
        else:
            plan.disarm()

    def _agree(self, header: Header, plan: Plan, timeout_s: float) -> Agreement:
        """Combine all ranks' headers.

        Raises:
            SynchronizeError: Not all are about the same; names the first rank that differs.
            SynchronizeTimeoutError: Not all have come; names them.
        """
        group = self._joined_group()
        began = time.monotonic()
        try:
            combined = group.combine(header.to_tensor(), timeout_s)
        except RuntimeError as error:
            if time.monotonic() - began < timeout_s:
                raise
            raise SynchronizeTimeoutError(self._who_is_missing(timeout_s)) from error
        agreed = Agreement.of(combined, header)
        if not (agreed.same_call and agreed.same_signature):
            plan.stop()
            descriptions = [describe(named) for named in with_names(plan.parameters)]
            views = group.gather(msgspec.msgpack.encode((self._num_calls, descriptions)))
            raise SynchronizeError(_first_difference([msgspec.msgpack.decode(v) for v in views]))
        return agreed

    def _align(
        self, plan: Plan, target: Target | None, present: frozenset[int], *, average: bool
    ) -> None:
        """Give all ranks the parameters, buffers and gradients of rank 0."""
        group = self._joined_group()
        if self._worker.rank == 0:
            warnings.warn(
                "synchronize(): the ranks started with different parameters; all have those of "
                "rank 0 now, and for this step its gradients, too. Seed all ranks alike "
                "(torch.manual_seed), or call broadcast_parameters(model) before the first "
                "forward pass; align=False leaves them as they are",
                stacklevel=8,  # where the user called it
            )
        group.broadcast([named.parameter for named in plan.parameters])
        modules = modules_around(plan.parameters)
        modules += [target] if isinstance(target, torch.nn.Module) else []
        buffers = {
            f"{name} {buffer.dtype} {tuple(buffer.shape)}": buffer
            for module in modules
            for name, buffer in module.named_buffers()
        }
        names = sorted(buffers)
        if len(set(group.gather(msgspec.msgpack.encode(names)))) == 1:
            group.broadcast([buffers[name] for name in names])
        plan.take_from_first(present)
        if not average:
            plan.multiply(present, self._worker.world_size)

    def _name_what_is_not_finite(self, own: list[str]) -> None:
        views = self._joined_group().gather(msgspec.msgpack.encode(own))
        _raise_if_not_finite(
            {rank: msgspec.msgpack.decode(view) for rank, view in enumerate(views)}
        )

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        for plan in self._plans.values():
            plan.flush()
        group = self._joined_group()
        looks = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors]
        views = group.gather(msgspec.msgpack.encode((0, looks)))
        if len(set(views)) > 1:
            text = _first_difference([msgspec.msgpack.decode(view) for view in views])
            raise SynchronizeError(text.replace("synchronize()", "broadcast_parameters()", 1))
        group.broadcast(tensors)

    # ── what is kept from call to call ───────────────────────────────────────────────────

    def _joined_group(self) -> GradientGroup:
        if self._group is None:
            self._group = GradientGroup(self._worker, self._backend)
        return self._group

    def _plan_of(self, parameters: list[Named], options: Options) -> Plan:
        shape = (options.average, options.overlap, options.align, options.bucket_mb)
        key = (shape, options.check_finite, *(id(named.parameter) for named in parameters))
        plan = self._plans.get(key)
        if plan is None:
            group = self._joined_group() if self._worker.world_size > 1 else None
            plan = self._plans[key] = Plan(
                parameters,
                signature(parameters, shape, options.check_finite),
                group,
                self._guard,
                average=options.average,
                bucket_bytes=int(options.bucket_mb * (1 << 20)),
            )
            self._forget_old_plans()
        self._plans.move_to_end(key)
        return plan

    def _forget_old_plans(self) -> None:
        """Parameters were added, removed or replaced: the old set is not needed any more."""
        while len(self._plans) > _MAX_PLANS:
            _, oldest = self._plans.popitem(last=False)
            oldest.flush()

    def _who_is_missing(self, timeout_s: float) -> str:
        late = [
            rank
            for rank in range(self._worker.world_size)
            if self._page.synchronize_calls(rank) < self._num_calls
        ]
        who = "\n".join(map(self._where_is, late)) or "  nobody: a rank came, but was not reached"
        return (
            f"synchronize(), call {self._num_calls}: not all ranks came within {timeout_s:g} s. "
            f"Every rank must call it, equally often. Missing:\n{who}"
        )

    def _where_is(self, rank: int) -> str:
        calls = self._page.synchronize_calls(rank)
        step, at_ns = self._page.progress(rank)
        ago_s = (time.monotonic_ns() - at_ns) / 1e9
        seen = f"last heartbeat at step {step}, {ago_s:.0f} s ago" if at_ns else "no heartbeat"
        stack = "".join(f"\n      {frame}" for frame in stack_of(self._page, rank))
        where = f"; it is in{stack}" if stack else ""
        return f"  rank {rank}, which came {calls} times ({seen}){where}"


def _state_of(target: Target) -> list[torch.Tensor]:
    """Return parameters and buffers, each once."""
    if isinstance(target, torch.nn.Module):
        state = [*target.parameters(), *target.buffers()]
    else:
        state = [named.parameter for named in parameters_of(target)]
    return list({id(tensor): tensor for tensor in state}.values())


def _not_finite(plan: Plan) -> list[str]:
    """Describe the parameters whose gradients are not finite."""
    found = []
    for named in plan.parameters:
        gradient = named.parameter.grad
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            found.append(named)
    return [describe(named) for named in with_names(found)] if found else []


def _raise_if_not_finite(found: dict[int, list[str]]) -> None:
    texts = []
    for rank, names in found.items():
        if names:
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            texts.append(f"rank {rank}: {', '.join(names[:_MAX_NAMED])}{more}")
    if texts:
        raise SynchronizeError(
            "synchronize(check_finite=True): there are gradients that are infinite or no number. "
            + "; ".join(texts)
        )


def _first_difference(views: list[tuple[int, list[str]]]) -> str:
    """Say which rank differs from rank 0 first, and in what."""
    (call, first), others = views[0], list(enumerate(views))[1:]
    for rank, (other_call, other) in others:
        if other_call != call:
            return (
                f"synchronize(): rank {rank} is in its call {other_call}, rank 0 in its call "
                f"{call}: every rank must call it equally often"
            )
        for number, (here, there) in enumerate(zip(first, other, strict=False)):
            if here != there:
                return (
                    f"synchronize(): rank {rank} differs from rank 0 at parameter {number}: "
                    f"{there} there, {here} on rank 0. All ranks must pass the same parameters "
                    "in the same order"
                )
        if len(first) != len(other):
            longer, extra = (rank, other) if len(other) > len(first) else (0, first)
            return (
                f"synchronize(): rank {rank} has {len(other)} parameters, rank 0 {len(first)}; "
                f"only rank {longer} has {extra[min(len(first), len(other))]}"
            )
    return (
        "synchronize(): the ranks differ in the options (average, overlap, align, check_finite, "
        "bucket_mb), or in which parameter is which: make and pass them in the same order"
    )

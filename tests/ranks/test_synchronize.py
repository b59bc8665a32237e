"""`synchronize()` with real ranks: the same as DistributedDataParallel, and what that lacks."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import signal
import threading
import time
import warnings

import pytest

from phalanx import (
    NotAWorkerError,
    SynchronizeError,
    SynchronizeTimeoutError,
    WorkerFailedError,
    get_context,
    start_processes,
)

torch = pytest.importorskip("torch")

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "shm"])


def linear(*sizes):
    layers = []
    for inner, outer in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(inner, outer), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def ranks(function, world_size=2, *args, **options):
    return start_processes(function, world_size, args=args, **options).wait().returns


def all_gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


# ── the same as DistributedDataParallel ──────────────────────────────────────────────────


def mlp():
    return linear(16, 300, 200, 4), torch.randn(8, 16), torch.randint(0, 4, (8,))


def cnn():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, bias=False), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(16, 4),
    )  # fmt: skip
    return model, torch.randn(4, 3, 12, 12), torch.randint(0, 4, (4,))


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 50)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))[:, -1]


def transformer():
    return Transformer(), torch.randint(0, 50, (4, 10)), torch.randint(0, 50, (4,))


def train(rank, world_size, make, how, options):
    import torch.distributed as dist

    context = get_context()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs, labels = make()
    inputs, labels = inputs.roll(rank, 0), labels.roll(2 * rank, 0)
    inner = model
    if how == "ddp":
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(50):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        if how != "ddp":
            context.synchronize(**options)
        optimizer.step()
    # The group is left to the process' end: destroying one that DDP has used may wait for
    # a thread of Gloo's that itself waits for the interpreter's lock.
    return torch.cat([p.detach().flatten() for p in inner.parameters()])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("make", [mlp, cnn, transformer])
@BACKENDS
def test_it_trains_as_ddp_does(make, world_size, backend):
    expected = ranks(train, world_size, make, "ddp", {})[0]
    for options in ({"overlap": True}, {"overlap": False}, {"overlap": True, "bucket_mb": 0.01}):
        found = ranks(train, world_size, make, backend, options, backend=backend)
        assert all(each.equal(found[0]) for each in found), "all ranks have the same bits"
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


# ── which parameters ─────────────────────────────────────────────────────────────────────


def average_of(rank, world_size, dtype_name, target_kind):
    context = get_context()
    dtype = getattr(torch, dtype_name)
    model = torch.nn.Linear(5, 3).to(dtype)
    context.broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):  # from the second on gradients are sent while backward() runs
        optimizer.zero_grad()
        (sum(p.sum() for p in model.parameters()) * (rank + 1 + step)).abs().backward()
        factor = model.weight.grad[0, 0] / (rank + 1 + step)
        target = {
            "none": None,
            "module": model,
            "optimizer": optimizer,
            "parameters": model.parameters(),
            "named": model.named_parameters(),
            "list": [model],
        }[target_kind]
        context.synchronize(target, overlap=True)
        mean = sum(range(1, world_size + 1)) / world_size + step
        for parameter in model.parameters():
            expected = torch.full_like(parameter, 1) * factor * mean
            torch.testing.assert_close(parameter.grad, expected, rtol=2e-2, atol=1e-2)
        optimizer.step()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "complex64"])
@BACKENDS
def test_dtypes(dtype, backend):
    ranks(average_of, 2, dtype, "none", backend=backend)


@pytest.mark.parametrize("kind", ["none", "module", "optimizer", "parameters", "named", "list"])
def test_targets(kind):
    ranks(average_of, 2, "float32", kind)


def some_have_no_gradient(rank, world_size):
    context = get_context()
    torch.manual_seed(0)
    both, first_only, nobody, frozen = (torch.nn.Parameter(torch.ones(3)) for _ in range(4))
    frozen.requires_grad = False
    optimizer = torch.optim.SGD([both, first_only, nobody, frozen], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = both.sum() * (rank + 1)
        if rank == 0:
            loss = loss + 4 * first_only.sum()
        loss.backward()
        context.synchronize()
        assert both.grad.tolist() == [1.5] * 3
        assert first_only.grad.tolist() == [2.0] * 3
        assert nobody.grad is None
        assert frozen.grad is None
        optimizer.step()


def test_parameters_without_gradients():
    ranks(some_have_no_gradient)


def two_models(rank, world_size):
    """As in a GAN: two optimizers, each with a backward() that reaches both models."""
    context = get_context()
    torch.manual_seed(0)
    generator, critic = linear(4, 8, 4), linear(4, 8, 1)
    make = torch.optim.Adam(generator.parameters(), lr=0.01)
    judge = torch.optim.Adam(critic.parameters(), lr=0.01)
    noise = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(6):
        judge.zero_grad()
        critic(generator(noise).detach()).mean().backward()
        context.synchronize(critic)
        judge.step()
        make.zero_grad()
        critic(generator(noise)).mean().neg().backward()
        context.synchronize(make)
        make.step()
    return [p.detach().clone() for p in [*generator.parameters(), *critic.parameters()]]


def test_two_models_and_optimizers():
    first, second = ranks(two_models)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def parameters_come_and_go(rank, world_size):
    context = get_context()
    torch.manual_seed(0)
    model = linear(4, 6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(2, 4) * (rank + 1)
    for step in range(9):
        if step == 3:
            extra = torch.nn.Linear(2, 2)
            optimizer.add_param_group({"params": extra.parameters()})
            model.append(extra)
        if step == 6:
            del model[-1]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            del extra
        optimizer.zero_grad()
        model(inputs).sum().backward()
        context.synchronize()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_parameters_added_and_removed():
    first, second = ranks(parameters_come_and_go)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def accumulate(rank, world_size, clip):
    context = get_context()
    torch.manual_seed(0)
    model = linear(4, 50, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(6, 3, 8, 4, generator=torch.Generator().manual_seed(5))
    for step in range(6):
        optimizer.zero_grad()
        reference = copy.deepcopy(model)
        for micro in range(3):
            model(batches[step, micro] * (rank + 1)).square().mean().backward()
        total = [torch.zeros_like(p) for p in model.parameters()]
        for other in range(world_size):
            reference.zero_grad()
            for micro in range(3):
                reference(batches[step, micro] * (other + 1)).square().mean().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            total = [
                t + p.grad / world_size for t, p in zip(total, reference.parameters(), strict=True)
            ]
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        context.synchronize(model, overlap=True)
        for parameter, expected in zip(model.parameters(), total, strict=True):
            torch.testing.assert_close(parameter.grad, expected)
        optimizer.step()


@pytest.mark.parametrize("clip", [False, True])
@BACKENDS
def test_accumulation_and_clipping_before_the_call(clip, backend):
    ranks(accumulate, 2, clip, backend=backend)


def gradients_change_on_one_rank(rank, world_size):
    """What was sent while backward() ran is not what one rank has when it calls."""
    context = get_context()
    torch.manual_seed(0)
    model = linear(4, 50, 2)
    model_inputs = torch.ones(2, 4)
    for step in range(8):
        model.zero_grad()
        model(model_inputs).sum().backward()
        before = all_gradients(model)
        factor = [1.0, 1.0]
        if rank == 1 and step == 3:
            model[0].weight.grad.mul_(3)
            factor[1] = 3.0
        if rank == 0 and step == 4:
            model[2].bias.grad = torch.zeros(2)
        context.synchronize(model, overlap=True)
        after = all_gradients(model)
        if step == 3:
            assert after[0].allclose(before[0] * 2)
            assert all(a.equal(b) for a, b in zip(after[1:], before[1:], strict=True))
        elif step == 4:
            assert after[3].allclose(before[3] / 2)
        else:
            assert all(a.allclose(b) for a, b in zip(after, before, strict=True))


@BACKENDS
def test_a_gradient_that_changed_after_it_was_sent_is_sent_again(backend):
    ranks(gradients_change_on_one_rank, backend=backend)


def with_lbfgs(rank, world_size):
    context = get_context()
    torch.manual_seed(0)
    model = linear(3, 5, 1)
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    first = last = None
    for _ in range(3):

        def closure():
            nonlocal first, last
            optimizer.zero_grad()
            loss = (model(inputs) - 1).square().mean()
            loss.backward()
            context.synchronize()
            last = loss.item()
            first = first or last
            return loss.detach() * 0 + sum(p.grad.norm() for p in model.parameters())

        optimizer.step(closure)
    return [p.detach().clone() for p in model.parameters()]


def test_closures():
    first, second = ranks(with_lbfgs)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def compiled(rank, world_size):
    context = get_context()
    torch.manual_seed(0)
    model = linear(4, 8, 2)
    fast = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        fast(torch.ones(2, 4) * (rank + 1)).sum().backward()
        context.synchronize(fast)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")
def test_compiled_modules():
    first, second = ranks(compiled, preload=("torch", "torch._dynamo"))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def sums(rank, world_size):
    context = get_context()
    parameter = torch.nn.Parameter(torch.ones(2))
    for _ in range(3):
        parameter.grad = None
        (parameter.sum() * (rank + 1)).backward()
        context.synchronize(parameter, average=False)
        assert parameter.grad.tolist() == [6, 6]


def test_sums():
    ranks(sums, 3)


def carried_by_value(rank, world_size, model, optimizer):
    context = get_context()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3) * (rank + 1)).sum().backward()
        context.synchronize()
        optimizer.step()
    return model


def test_a_model_and_optimizer_made_before_the_start():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = ranks(carried_by_value, 2, model, optimizer)
    assert first.weight.equal(second.weight)
    assert not first.weight.equal(model.weight)


# ── agreement ────────────────────────────────────────────────────────────────────────────


def start_apart(rank, world_size, align):
    context = get_context()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            context.synchronize(align=align)
        found += [str(each.message) for each in caught]
        optimizer.step()
    return model, found, all_gradients(model)


def test_ranks_that_start_apart_are_aligned_with_one_warning():
    results = ranks(start_apart, 3, True)
    models = [model for model, _, _ in results]
    for model in models[1:]:
        for mine, first in zip(model.parameters(), models[0].parameters(), strict=True):
            assert mine.equal(first)
    texts = [text for _, found, _ in results for text in found]
    assert len(texts) == 1
    assert "started with different parameters" in texts[0]


def test_ranks_that_start_apart_stay_so_without_align():
    (first, warned, mine), (second, _, others) = ranks(start_apart, 2, False)
    assert not first[0].weight.equal(second[0].weight)
    assert all(a.equal(b) for a, b in zip(mine, others, strict=True))
    assert not warned


def broadcast(rank, world_size):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3))
    model[1].running_mean.fill_(rank)
    model[0].weight.data = model[0].weight.data.contiguous(memory_format=torch.channels_last)
    get_context().broadcast_parameters(model)
    return model


def test_broadcast_parameters_and_buffers():
    models = ranks(broadcast, 3)
    assert models[1][1].running_mean.tolist() == [0, 0, 0]
    for model in models[1:]:
        state, first = model.state_dict(), models[0].state_dict()
        assert all(state[name].equal(first[name]) for name in first)


def differ(rank, world_size, how):
    context = get_context()
    model = torch.nn.Sequential()
    model.add_module("first", torch.nn.Linear(3, 4))
    sizes = (4, 3) if how == "shape" and rank == 1 else (4, 2)
    model.add_module("second", torch.nn.Linear(*sizes))
    if how == "dtype" and rank == 1:
        model.second.double()
    if how == "number" and rank == 1:
        del model.second
    if how == "order" and rank == 1:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    if how == "options":
        context.synchronize(model, average=rank == 0)
    elif how == "nameless":
        optimizer = torch.optim.SGD(model.parameters() if rank == 0 else [model.first.bias], lr=1)
        context.synchronize(optimizer)
    else:
        context.synchronize(model)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", r"rank 1 differs from rank 0 at parameter 2: second.weight: float32 \(3, 4\)"),
        ("dtype", r"rank 1 differs from rank 0 at parameter 2: second.weight: float64"),
        ("number", r"rank 1 has 2 parameters, rank 0 4; only rank 0 has second.weight"),
        ("order", r"parameter 0: 0.weight: float32 \(4, 3\) on cpu there, first.weight"),
        ("options", r"differ in the options \(average"),
        ("nameless", r"parameter 0: first.bias: float32 \(4,\) on cpu there, first.weight"),
    ],
)
def test_different_parameters_are_named(how, message):
    with pytest.raises(WorkerFailedError, match=message) as caught:
        ranks(differ, 3, how)
    assert isinstance(caught.value.exceptions[caught.value.root_cause.rank], SynchronizeError)


def never_comes(rank, world_size):
    context = get_context()
    parameter = torch.nn.Parameter(torch.ones(1))
    for step in range(3):
        parameter.grad = torch.ones(1)
        if rank == 1 and step == 2:
            context.heartbeat(step=41)
            time.sleep(60)
        context.synchronize(parameter, timeout=1)


@BACKENDS
def test_a_rank_that_does_not_come_is_named(backend):
    context = start_processes(never_comes, 3, backend=backend)
    with pytest.raises(WorkerFailedError, match="rank 1, which came 2 times") as caught:
        context.wait()
    error = caught.value.exceptions[caught.value.root_cause.rank]
    assert isinstance(error, SynchronizeTimeoutError)
    assert isinstance(error, TimeoutError)
    assert "last heartbeat at step 41" in str(error)
    assert "line" in str(error)
    assert "in never_comes" in str(error)


def fall_between(rank, world_size, by):
    context = get_context()
    model = linear(4, 8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        if (rank, step) == (1, 4):
            if by == "signal":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("between backward and synchronize")
        context.synchronize()
        optimizer.step()


@pytest.mark.parametrize("by", ["exception", "signal"])
@BACKENDS
def test_who_falls_before_the_call_is_the_root_cause(by, backend):
    with pytest.raises(WorkerFailedError) as caught:
        ranks(fall_between, 3, by, backend=backend)
    assert caught.value.root_cause.rank == 1
    assert caught.value.root_cause.cause == by
    assert {failure.kind for failure in caught.value.failures[1:]} <= {"effect", "stopped"}


# ── the guard ────────────────────────────────────────────────────────────────────────────


def forget_to_average(rank, world_size):
    context = get_context()
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apart = torch.optim.SGD(other.parameters(), lr=0.1)
    inputs = torch.ones(1, 2)
    model(inputs).sum().backward()
    optimizer.step()  # nobody synchronises yet
    optimizer.zero_grad()
    model(inputs).sum().backward()
    context.synchronize(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # changing what was averaged is fine
    optimizer.step()
    optimizer.step()
    model(inputs).sum().backward()
    with pytest.raises(SynchronizeError, match=r"SGD.step\(\) would apply .*weight: float32"):
        optimizer.step()
    context.synchronize(model)
    optimizer.step()
    other(inputs).sum().backward()
    with pytest.raises(SynchronizeError, match="not averaged over the ranks"):
        apart.step()  # never synchronised at all
    context.synchronize(model, guard=False)
    apart.step()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_with_a_gradient_that_nobody_averaged_raises(world_size):
    ranks(forget_to_average, world_size)


def forget_in_a_closure(rank, world_size):
    model = torch.nn.Linear(2, 2)
    get_context().synchronize(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    with pytest.raises(SynchronizeError, match="has applied"):
        optimizer.step(closure)


def test_a_closure_that_does_not_average_is_told():
    ranks(forget_in_a_closure)


# ── bad input ────────────────────────────────────────────────────────────────────────────


def misuse(rank, world_size):
    from torch.nn.parallel import DistributedDataParallel

    context = get_context()
    with pytest.raises(SynchronizeError, match="there are none: make an optimizer first"):
        context.synchronize()
    model = torch.nn.Linear(2, 2)
    context.synchronize(model)  # before any backward: nothing to average
    assert model.weight.grad is None
    for wrong in ("model", 7, [model, "x"], {"a": 1}):
        with pytest.raises(SynchronizeError, match="takes modules, optimizers and parameters"):
            context.synchronize(wrong)
    with pytest.raises(SynchronizeError, match="no leaf"):
        context.synchronize(model.weight * 2)
    for bad in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="bucket_mb"):
            context.synchronize(model, bucket_mb=bad)
    with pytest.raises(ValueError, match="timeout"):
        context.synchronize(model, timeout=-1)
    torch.distributed.init_process_group("gloo")
    with pytest.raises(SynchronizeError, match="DistributedDataParallel averages"):
        context.synchronize(DistributedDataParallel(model))
    torch.distributed.destroy_process_group()
    sparse = torch.nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(SynchronizeError, match="weight is sparse.*sparse=False"):
        context.synchronize(sparse)


def test_misuse_is_told():
    ranks(misuse)


def not_finite(rank, world_size, check):
    context = get_context()
    model = torch.nn.Linear(2, 2)
    context.broadcast_parameters(model)
    model(torch.ones(1, 2) * (float("nan") if rank == 1 else 1)).sum().backward()
    if not check:
        context.synchronize(model)
        return model.weight.grad.isnan().all().item()
    with pytest.raises(SynchronizeError) as caught:
        context.synchronize(model, check_finite=True)
    return str(caught.value)


def test_what_is_not_finite():
    assert ranks(not_finite, 2, False) == (True, True)
    first, second = ranks(not_finite, 2, True)
    assert first == second
    assert "rank 1: weight: float32 (2, 2) on cpu" in first
    assert "rank 0:" not in first


def alone(rank, world_size):
    context = get_context()
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad
    address = before.data_ptr()
    context.synchronize(model)
    assert model.weight.grad is before
    assert before.data_ptr() == address
    assert not torch.distributed.is_initialized()
    return threading.active_count()


def test_a_world_of_one_copies_nothing():
    assert ranks(alone, 1) == (1,)


def from_threads(rank, world_size):
    context = get_context()
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1) * rank
    if rank == 0:
        thread = threading.Thread(target=context.synchronize, args=(parameter,))
        thread.start()  # waits for rank 1, which waits for the file
        while thread.is_alive() and not context.has_tensor("seen"):
            with pytest.raises(SynchronizeError, match="another thread of this worker"):
                context.synchronize(parameter)
            context.put_tensor("seen", torch.ones(1))
        thread.join(60)
    else:
        context.get_tensor("seen")
        context.synchronize(parameter)
    return parameter.grad.item()


def test_any_one_thread_may_call():
    assert ranks(from_threads) == (0.5, 0.5)


def test_the_launcher_has_none():
    context = start_processes(functools.partial(lambda *_: None), 1, preload=())
    for use in (context.synchronize, lambda: context.broadcast_parameters(None)):
        with pytest.raises(NotAWorkerError):
            use()
    context.wait()


def test_restart_worker_says_what_to_do():
    with pytest.raises(WorkerFailedError, match='restart="worker" is for workers that share no'):
        ranks(sums, 2, restart="worker")

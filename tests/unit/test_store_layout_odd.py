"""Tensors and trees that only look like plain ones: stored right, or refused with a reason."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from phalanx.tensors.store.layout import plan_tensor, plan_tree, read
from phalanx.tensors.store.memory import as_bytes, copied
from phalanx.values.errors import TensorError


def trip_tree(tree):
    plan = plan_tree(tree)
    return read(plan.layout, copied(as_bytes(plan)))[0]


@pytest.mark.parametrize("conjugated_first", [True, False])
def test_a_tensor_and_its_conjugate_in_one_tree(conjugated_first):
    tensor = torch.tensor([1 + 2j])
    tree = [tensor.conj(), tensor] if conjugated_first else [tensor, tensor.conj()]
    assert [each.tolist() for each in trip_tree(tree)] == [each.tolist() for each in tree]


def test_a_tensor_and_its_negative_in_one_tree():
    tensor = torch.tensor([1 + 2j])
    arrived = trip_tree([tensor.imag, tensor.conj().imag])
    assert [each.tolist() for each in arrived] == [[2.0], [-2.0]]


class Opaque(torch.Tensor):
    """A wrapper without __tensor_flatten__, as MaskedTensor and torch's FakeTensor are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        return cls(function(args[0].inner))  # detach


def test_a_wrapper_without_memory_of_its_own_is_refused():
    with pytest.raises(TensorError, match="Opaque"):
        plan_tensor(Opaque(torch.ones(3)))


def test_a_masked_tensor_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masked = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
        with pytest.raises(TensorError, match="MaskedTensor"):
            plan_tensor(masked)


def test_a_fake_tensor_is_refused():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(TensorError, match="FakeTensor"):
        plan_tensor(fake)


def test_a_tensor_whose_storage_was_freed_is_refused():
    """As FSDP frees parameters between their uses."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(TensorError):
        plan_tensor(tensor)


def test_a_parameter_of_a_lazy_module_is_refused():
    with pytest.raises(TensorError, match=r"\['weight'\]"):
        plan_tree({"weight": torch.nn.parameter.UninitializedParameter()})


@pytest.mark.parametrize("name", ["uint4", "int4", "uint1", "int7"])
def test_a_dtype_without_copy_that_is_not_dense(name):
    raw = torch.arange(16, dtype=torch.uint8)
    (arrived,) = trip_tree([raw.view(getattr(torch, name))[::2]])
    assert arrived.view(torch.uint8).tolist() == raw[::2].tolist()


@pytest.mark.parametrize(
    ("tree", "plain"),
    [(np.str_("x"), "x"), (np.bytes_(b"x"), b"x"), ({np.str_("x"): 1}, {"x": 1})],
)
def test_subclasses_of_strings_arrive_as_strings(tree, plain):
    assert trip_tree([tree]) == [plain]


@pytest.mark.parametrize("tree", ["\ud800", {"\udcff": 1}], ids=ascii)
def test_a_string_that_is_no_unicode_is_refused(tree):
    with pytest.raises(TensorError, match=r"\['a'\]"):
        plan_tree({"a": tree})


@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_of_many_digits(sign):
    assert trip_tree([sign * 10**5000]) == [sign * 10**5000]


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}], ids=["list", "tuple", "dict"]
)
def test_a_tree_nested_too_deep_is_refused(wrap):
    tree = 1
    for _ in range(10_000):
        tree = wrap(tree)
    with pytest.raises(TensorError, match="deep"):
        plan_tree(tree)


@pytest.mark.filterwarnings("error")
def test_reading_warns_of_nothing():
    """Passes when the process was warned before (torch warns once), so mind the order."""
    torch.set_warn_always(True)
    try:
        raw = torch.arange(8, dtype=torch.uint8).view(torch.complex32)
        plan = plan_tensor(raw)
        read(plan.layout, copied(as_bytes(plan)))
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize(
    ("number", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3),
        (np.bool_(True), True),
        (np.uint8(7), 7),
        (np.array(4), 4),
    ],
)
def test_numbers_of_numpy_arrive_as_plain_ones(number, plain):
    (arrived,) = trip_tree([number])
    assert arrived == plain
    assert type(arrived) is type(plain)


@pytest.mark.parametrize(
    "number", [np.longdouble(1.5), np.complex64(1), np.datetime64("2026-01-01")]
)
def test_numbers_of_numpy_that_have_no_plain_one_are_refused(number):
    with pytest.raises(TensorError, match=type(number).__name__):
        plan_tree({"a": number})

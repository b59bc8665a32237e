"""Values of the tensor store as bytes: every kind of tensor, and trees of them."""

from __future__ import annotations

import enum
import math
import mmap
import os
import re
import struct
import types
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from phalanx.system import kernel
from phalanx.tensors.store import memory
from phalanx.tensors.store.layout import (
    Plan,
    ValueLayout,
    _decoder,
    plan_tensor,
    plan_tree,
    read,
    write,
)
from phalanx.tensors.store.memory import WrittenSegments, as_bytes, copied, map_privately
from phalanx.tensors.store.messages import Reserved
from phalanx.values.errors import StoreFullError, TensorError

# What torch says once per process of complex32, and 2.14 of bcomplex32.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore:BComplex32 support:UserWarning"),
]

DTYPES = sorted(
    {
        value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and not name.startswith(("q", "bits"))
    },
    key=str,
)
SUB_BYTE = [dtype for dtype in DTYPES if re.fullmatch(r"torch\.u?int[1-7]", str(dtype))]
WHOLE = [dtype for dtype in DTYPES if dtype not in SUB_BYTE]


def stored(plan: Plan) -> torch.UntypedStorage:
    """Return what a reader gets, written in both ways: into memory, and as a message."""
    target = torch.full((plan.num_bytes + 64,), 0xAB, dtype=torch.uint8)
    write(plan, target)
    assert target[plan.num_bytes :].eq(0xAB).all(), "written beyond the end"
    for (first, _), (second, _) in zip(
        _leaves(read(plan.layout, target.untyped_storage())[0]),
        _leaves(read(plan.layout, copied(as_bytes(plan)))[0]),
        strict=True,
    ):
        assert same_bits(first, second)
    return target.untyped_storage()


def _leaves(tree, path=""):
    if isinstance(tree, torch.Tensor):
        yield tree, path
    elif isinstance(tree, list | tuple):
        for i, each in enumerate(tree):
            yield from _leaves(each, f"{path}[{i}]")
    elif isinstance(tree, dict):
        for key, each in tree.items():
            yield from _leaves(each, f"{path}[{key!r}]")


def around(tensor: torch.Tensor) -> torch.Tensor:
    """Put one tensor and read it."""
    plan = plan_tensor(tensor)
    value, is_tree = read(plan.layout, stored(plan))
    assert not is_tree
    return value


def around_tree(tree):
    """Put a tree and read it."""
    plan = plan_tree(tree)
    value, is_tree = read(plan.layout, stored(plan))
    assert is_tree
    return value


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements as bytes, without looking at what they mean."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of a shape with any bits: NaN of all kinds among them."""
    num_bytes = math.prod(shape) * dtype.itemsize
    seed = torch.Generator().manual_seed(num_bytes)
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=seed)
    return raw.view(dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)


def refused(value, *parts: str) -> str:
    """Check that neither a tensor's place nor a tree's takes a value, and says why."""
    with pytest.raises(TensorError) as alone:
        plan_tensor(value)
    with pytest.raises(TensorError) as inside:
        plan_tree({"a": [value]})
    for part in parts:
        assert part in str(alone.value)
        assert part in str(inside.value)
    assert str(alone.value).startswith("the value is ")
    assert str(inside.value).startswith("['a'][0] is ")
    return str(alone.value)


# ── one tensor ───────────────────────────────────────────────────────────────────────────


def test_the_dtypes_are_all_there():
    names = {str(dtype).removeprefix("torch.") for dtype in WHOLE}
    assert names >= {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
        *("complex32", "complex64", "complex128"),
    }
    assert {str(dtype).removeprefix("torch.") for dtype in SUB_BYTE} >= {"uint4", "uint1"}


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_every_dtype_comes_back_bit_by_bit(dtype):
    for tensor in (some(dtype, 5), some(dtype, 3, 4, 2), some(dtype, 1), some(dtype)):
        found = around(tensor)
        assert same_bits(found, tensor)
        assert found.is_contiguous()
        assert not found.requires_grad


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_every_dtype_comes_back_that_does_not_lie_densely(dtype):
    tensor = some(dtype, 4, 6)
    for view in (tensor.t(), tensor[::2, 1::3], tensor[1:, 2:], tensor[:1].expand(3, 6)):
        assert same_bits(around(view), view)


@pytest.mark.parametrize("dtype", SUB_BYTE, ids=str)
def test_dtypes_of_less_than_a_byte_come_back_as_they_lie(dtype):
    tensor = some(torch.uint8, 3, 4).view(dtype)
    found = around(tensor)
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0)], ids=str)
def test_empty_tensors_keep_their_shape(shape):
    for dtype in (torch.float32, torch.bool, torch.complex64):
        found = around(torch.empty(shape, dtype=dtype))
        assert found.shape == shape
        assert found.dtype == dtype
        assert found.stride() == torch.empty(shape).stride()
    plan = plan_tensor(torch.empty(shape))
    assert plan.num_bytes == 0
    assert as_bytes(plan) == b""
    assert around(torch.empty(shape).permute(*reversed(range(len(shape))))).shape == shape[::-1]


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_lazy_conjugates_and_negatives_arrive_computed(dtype):
    tensor = torch.arange(12.0).view(2, 3, 2).double()
    tensor = torch.view_as_complex(tensor).to(dtype)
    conjugate, negative = tensor.conj(), tensor.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    for lazy, real in (
        (conjugate, torch.view_as_real(tensor) * torch.tensor([1, -1])),
        (conjugate.t(), torch.view_as_real(tensor.t()) * torch.tensor([1, -1])),
    ):
        found = around(lazy)
        assert not found.is_conj()
        assert found.dtype == dtype
        assert torch.equal(torch.view_as_real(found), real.to(found.real.dtype))
    found = around(negative)
    assert not found.is_neg()
    assert torch.equal(found, -tensor.imag)
    dense = torch._neg_view(torch.arange(1.0, 5.0))
    assert dense.is_neg()
    assert dense.is_contiguous()
    assert around(dense).tolist() == [-1, -2, -3, -4]


@pytest.mark.parametrize(
    "pattern", [0x7F800001, 0x7FC00001, 0xFFC12345, 0xFF800000, 0x80000000, 0x00000001], ids=hex
)
def test_nan_payloads_infinities_and_zeros_keep_their_bits(pattern):
    number = torch.frombuffer(bytearray(struct.pack("<I", pattern)), dtype=torch.float32)
    spread = torch.stack([number, torch.ones(1)], 1).expand(3, 2).t()
    for tensor in (number, spread):
        assert torch.equal(around(tensor).view(torch.int32), tensor.contiguous().view(torch.int32))


def test_gradients_stay_behind():
    leaf = torch.ones(3, requires_grad=True)
    for tensor in (leaf, leaf * 2, torch.nn.Parameter(torch.full((2, 2), 7.0))):
        found = around(tensor)
        assert type(found) is torch.Tensor
        assert not found.requires_grad
        assert found.grad_fn is None
        assert torch.equal(found, tensor.detach())
        (found,) = around_tree([tensor])
        assert type(found) is torch.Tensor
        assert not found.requires_grad
    assert leaf.requires_grad, "what was put is not changed"


def test_channels_last_arrives_in_row_major_order():
    tensor = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert not tensor.is_contiguous()
    found = around(tensor)
    assert torch.equal(found, tensor)
    assert found.is_contiguous()


def test_a_view_takes_only_its_own_bytes():
    large = torch.arange(10_000.0)
    plan = plan_tensor(large[5:8])
    assert plan.num_bytes == 12
    assert len(as_bytes(plan)) == 12
    assert around(large[5:8]).tolist() == [5, 6, 7]
    assert around(large[::5_000]).tolist() == [0, 5_000]


def test_overlapping_and_expanded_views_arrive_dense():
    windows = torch.arange(10).as_strided((4, 3), (2, 1))
    assert torch.equal(around(windows), windows)
    found = around(torch.tensor([1.5]).expand(2, 4))
    assert found.is_contiguous()
    assert found.tolist() == [[1.5] * 4] * 2


def test_a_plain_subclass_arrives_as_a_tensor():
    class Named(torch.Tensor):
        pass

    found = around(torch.arange(3.0).as_subclass(Named))
    assert type(found) is torch.Tensor
    assert found.tolist() == [0, 1, 2]


def test_tensors_of_inference_mode():
    with torch.inference_mode():
        tensor = torch.arange(6.0).view(2, 3)
        turned = tensor.t()
    assert torch.equal(around(tensor), tensor)
    assert torch.equal(around(turned), turned)


def test_planning_changes_nothing_and_sees_later_changes():
    """The plan refers to the caller's memory: bytes are copied when they are written."""
    tensor = torch.zeros(2, 2)
    plan = plan_tensor(tensor)
    tensor.fill_(3)
    assert read(plan.layout, stored(plan))[0].tolist() == [[3, 3], [3, 3]]


# ── tensors that have no plain bytes ─────────────────────────────────────────────────────


def test_quantised_tensors_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
        many = torch.quantize_per_channel(
            torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8
        )
        for tensor in (one, many):
            refused(tensor, "quantised", "dequantize()", "int_repr()")


def test_sparse_tensors_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = torch.eye(4)
        for tensor in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
            refused(tensor, "sparse", "to_dense()")


def test_tensors_without_values_are_refused():
    refused(torch.empty(3, device="meta"), "meta", "to_empty()")
    refused(torch.nn.Linear(2, 2, device="meta").weight, "meta", "to_empty()")


def test_nested_tensors_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.ones(2), torch.ones(3)]
        refused(torch.nested.nested_tensor(parts), "nested", "unbind()")
        refused(torch.nested.nested_tensor(parts, layout=torch.jagged), "nested", "unbind()")


def test_wrappers_around_tensors_are_refused():
    class Twice(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(inner, meta, size, stride):
            return Twice(inner["inner"])

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError(function)

    refused(Twice(torch.ones(3)), "Twice", "a wrapper around tensors", "to_local()")


@pytest.mark.parametrize(
    "value",
    [[1.0, 2.0], np.zeros(2), None, 3, 1.5, "text", {"a": 1}],
    ids=lambda v: type(v).__name__,
)
def test_what_is_no_tensor_is_refused_where_one_is_wanted(value):
    with pytest.raises(TensorError) as caught:
        plan_tensor(value)
    for part in (f"is a {type(value).__name__},", "torch.as_tensor", "put_tensors"):
        assert part in str(caught.value)


# ── trees ────────────────────────────────────────────────────────────────────────────────


def equal(a, b) -> bool:
    """Whether two trees are the same in types, order and bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return equal(list(a.items()), list(b.items()))
    return a == b


@pytest.mark.parametrize(
    "tree",
    [
        *(None, True, False, 0, 1, -1, 1.0, "", "text", "π\0\n🙂", b"", b"\xff\0bytes"),
        *(2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**1000, -(10**1000)),
        *(0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 0.1, 1e308),
        *([], (), {}, [[]], [()], ({},), {"a": {}}, [[], (), {}, [[[]]]], (((),),)),
        *(["T", 0], ["l"], ("t",), ["d", 1, 2], ["i", "5"], [["T", 0], ["i", "7"]]),
        *({"a": 1, 1: "a", "1": 2}, {-1: 0, 2**70: 1, -(2**70): 2}, {"": None}, {"T": ["T"]}),
        *([True, 1, 1.0], (0, False, 0.0, -0.0, None, "")),
    ],
    ids=lambda tree: repr(tree)[:30],
)
def test_plain_data_round_trips_with_its_types(tree):
    assert equal(around_tree(tree), tree)
    assert equal(around_tree([tree, (tree,), {"x": tree}]), [tree, (tree,), {"x": tree}])


def test_other_dicts_arrive_as_dicts_in_order():
    pairs = [("z", 1), ("a", [2]), (5, torch.ones(2)), ("m", 4)]
    fallback = defaultdict(list, pairs)
    fallback["new"].append(0)
    for tree in (OrderedDict(pairs), UserDict(pairs), types.MappingProxyType(dict(pairs))):
        assert equal(around_tree(tree), dict(pairs))
    assert equal(around_tree(fallback), {**dict(pairs), "new": [0]})


def test_relatives_of_plain_types_arrive_plain():
    Point = namedtuple("Point", "x y")  # noqa: PYI024

    class Level(enum.IntEnum):
        LOW = 1

    class Count(int):
        pass

    tree = [Point(1, torch.ones(1)), torch.Size([2, 3]), Level.LOW, Count(5), np.float64(0.1)]
    assert equal(around_tree(tree), [(1, torch.ones(1)), (2, 3), 1, 5, 0.1])


def test_tensors_are_where_they_were():
    tree = {
        "a": [torch.arange(3), (torch.tensor(2.5), None)],
        7: {"b": torch.empty(0, 2), "c": torch.tensor([True])},
        "d": b"x",
    }
    found = around_tree(tree)
    assert equal(found, tree)
    assert [path for _, path in _leaves(found)] == [
        "['a'][0]", "['a'][1][0]", "[7]['b']", "[7]['c']"
    ]  # fmt: skip


def test_a_tensor_alone_is_a_tree_too():
    assert equal(around_tree(torch.arange(4)), torch.arange(4))


def test_tied_tensors_lie_there_once_and_stay_tied():
    weight = torch.arange(6.0).view(2, 3)
    plan = plan_tree({"in": weight, "out": [weight], "view": weight.view(2, 3)})
    assert plan.num_bytes == weight.nbytes
    found, _ = read(plan.layout, stored(plan))
    assert torch.equal(found["in"], weight)
    found["in"][0, 0] = 99
    assert found["out"][0][0, 0] == 99
    assert found["view"][0, 0] == 99
    assert weight[0, 0] == 0


def test_parameters_tied_by_a_model_stay_tied():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    found = around_tree(model.state_dict())
    assert equal(found, dict(model.state_dict()))
    assert found["0.weight"].data_ptr() == found["1.weight"].data_ptr()
    assert found["0.bias"].data_ptr() != found["1.bias"].data_ptr()


def test_different_views_of_one_memory_are_all_right():
    base = torch.arange(12.0)
    tree = [
        base, base.view(3, 4), base.view(3, 4).t(), base[:6], base[1:7], base[::2],
        base.view(torch.int32), base.view(4, 3), base[:1].expand(12), base[:0], base[:0].view(0, 5),
    ]  # fmt: skip
    assert equal(around_tree(tree), tree)


def test_equal_tensors_that_are_not_the_same_stay_apart():
    found = around_tree([torch.zeros(3), torch.zeros(3)])
    found[0].fill_(1)
    assert found[1].tolist() == [0, 0, 0]


def test_a_list_that_occurs_twice_is_no_cycle():
    shared = [1, {"a": torch.ones(1)}]
    assert equal(around_tree([shared, shared, (shared,)]), [shared, shared, (shared,)])


def test_every_tensor_starts_at_a_multiple_of_64():
    sizes = [1, 63, 64, 65, 0, 1, 0]
    tree = [some(torch.uint8, size) for size in sizes]
    plan = plan_tree(tree)
    described: ValueLayout = _decoder.decode(plan.layout)
    offsets = [each.offset for each in described.tensors]
    assert offsets == [0, 64, 128, 192, 320, 320, 384]
    assert [offset for _, offset in plan.tensors] == offsets
    assert plan.num_bytes == 384
    assert equal(around_tree(tree), tree)


def test_state_of_models_and_optimizers_resumes():
    def make(seed: int, kind: str):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        if kind == "adam":
            return model, torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
        return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        optimizer.step()

    for kind in ("adam", "sgd"):
        model, optimizer = make(1, kind)
        step(model, optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
        plan = plan_tree(state)
        storage = stored(plan)
        found, _ = read(plan.layout, storage)
        assert equal(found, {**state, "model": dict(state["model"])})
        again, other = make(2, kind)
        again.load_state_dict(found["model"])
        other.load_state_dict(found["optimizer"])
        for each in ((model, optimizer), (again, other)):
            step(*each)
        assert equal(dict(again.state_dict()), dict(model.state_dict()))
        assert equal(other.state_dict(), optimizer.state_dict())


# ── trees that are refused ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "key", [True, 1.5, (1, 2), None, b"bytes", np.int64(3)], ids=lambda key: type(key).__name__
)
def test_keys_of_other_types_are_refused_with_their_place(key):
    with pytest.raises(TensorError) as caught:
        plan_tree({"a": [0, {key: 1}]})
    assert f"['a'][1] has the key {key!r}" in str(caught.value)
    assert "strings or integers" in str(caught.value)
    with pytest.raises(TensorError, match="^the value has the key"):
        plan_tree({key: 1})


@pytest.mark.parametrize(
    "thing",
    [
        {1, 2},
        object(),
        1j,
        range(3),
        bytearray(b"x"),
        torch.float32,
        len,
        np.zeros(2),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_unknown_objects_are_refused_with_their_place(thing):
    name = type(thing).__name__
    for tree, place in (
        ({"a": [thing]}, "['a'][0]"),
        ([1, {7: (0, thing)}], "[1][7][1]"),
        (thing, "the value"),
    ):
        with pytest.raises(TensorError) as caught:
            plan_tree(tree)
        assert str(caught.value).startswith(f"{place} is a {name}: ")
        assert "a tree holds tensors, numbers" in str(caught.value)


def test_trees_that_contain_themselves_are_refused():
    a: list = [1]
    a.append(a)
    with pytest.raises(TensorError, match=r"^\[1\] contains itself"):
        plan_tree(a)
    b: dict = {}
    b["x"] = [0, ({"y": b},)]
    with pytest.raises(TensorError, match=r"^\[0\]\['x'\]\[1\]\[0\]\['y'\] contains itself"):
        plan_tree([b])


def test_a_structure_that_is_too_large_is_refused():
    plan_tree(bytes(15 << 20))
    with pytest.raises(TensorError, match=r"(?s)bytes \(at most 16,777,216\).*tensor"):
        plan_tree([bytes(9 << 20), bytes(9 << 20)])


# ── any tree ─────────────────────────────────────────────────────────────────────────────

tensors = st.builds(
    lambda dtype, shape, turned: (
        some(dtype, *shape).movedim(0, -1) if turned else some(dtype, *shape)
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.booleans(),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.binary(max_size=8)
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.integers(-(2**70), 2**70)
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(trees)
@example([torch.ones(3), {"a": torch.empty(0)}, torch.ones(5, dtype=torch.bool)])
def test_any_tree_round_trips(tree):
    assert equal(around_tree(tree), tree)


# ── memory ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def segment():
    """A memory file, and what the server says of it."""
    fd = kernel.open_anonymous_file("test")
    os.ftruncate(fd, 65_536)
    yield fd
    os.close(fd)


def reserved(*, fresh: bool, keep: bool = True, segment: int = 1, gone: tuple[int, ...] = ()):
    return Reserved(segment=segment, num_bytes=65_536, fresh=fresh, keep=keep, gone=gone)


VALUES = {
    "dense": lambda: {"a": torch.arange(1_000), "b": [torch.ones(3, 3), torch.empty(0)]},
    "lazy": lambda: {
        "a": torch.arange(1_000).view(10, 100).t(),
        "b": some(torch.complex64, 5).conj(),
    },
    "empty": lambda: [torch.empty(0), torch.arange(5)[1:4]],
}


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("value", VALUES)
def test_what_is_written_into_a_segment_is_read_from_a_mapping(segment, fresh, value):
    tree, written = VALUES[value](), WrittenSegments()
    plan = plan_tree(tree)
    written.write(plan, segment, reserved(fresh=fresh))
    reader = os.open(f"/proc/self/fd/{segment}", os.O_RDONLY)
    storage = map_privately(reader, plan.num_bytes)
    os.close(reader)
    assert equal(read(plan.layout, storage)[0], tree)


def test_what_a_reader_writes_nobody_else_sees(segment):
    plan = plan_tensor(torch.arange(1_000))
    written = WrittenSegments()
    written.write(plan, segment, reserved(fresh=False))
    mine = read(plan.layout, map_privately(segment, plan.num_bytes))[0]
    other = read(plan.layout, map_privately(segment, plan.num_bytes))[0]
    mine.fill_(-1)
    assert mine.eq(-1).all()
    assert torch.equal(other, torch.arange(1_000))
    assert struct.unpack("<3q", os.pread(segment, 24, 0)) == (0, 1, 2)
    fresh = read(plan.layout, map_privately(segment, plan.num_bytes))[0]
    assert torch.equal(fresh, torch.arange(1_000))


@pytest.mark.skipif(not kernel.HAS_LEASES, reason="needs leases and memfd")
def test_a_reader_counts_until_its_last_tensor_goes(segment):
    plan = plan_tree([torch.arange(10), torch.arange(20)])
    WrittenSegments().write(plan, segment, reserved(fresh=True))
    assert kernel.nobody_reads(segment), "a writer is no reader"
    first, second = read(plan.layout, map_privately(segment, plan.num_bytes))[0]
    view = first[3:]
    del first, second
    assert not kernel.nobody_reads(segment)
    assert view.tolist() == list(range(3, 10))
    del view
    assert kernel.nobody_reads(segment)


def test_a_segment_is_kept_mapped_for_the_next_turn(segment, monkeypatch):
    written, mapped = WrittenSegments(), []
    real = mmap.mmap

    def counted(fd, *arguments, **options):
        mapped.append(fd)
        return real(fd, *arguments, **options)

    monkeypatch.setattr(memory.mmap, "mmap", counted)
    for number in range(3):
        plan = plan_tensor(torch.full((1_000,), number))
        written.write(plan, segment, reserved(fresh=False))
        assert struct.unpack("<q", os.pread(segment, 8, 7_992)) == (number,)
    assert len(mapped) == 1
    assert written.numbers == (1,)
    written.write(plan_tensor(torch.ones(10)), segment, reserved(fresh=False, segment=2))
    assert written.numbers == (1, 2)
    written.write(plan_tensor(torch.ones(10)), segment, reserved(fresh=False, segment=2, gone=(1,)))
    assert written.numbers == (2,)
    assert len(mapped) == 2


def test_a_segment_is_not_kept_if_the_store_does_not_want_it(segment):
    written = WrittenSegments()
    written.write(plan_tensor(torch.ones(10)), segment, reserved(fresh=False, keep=False))
    assert written.numbers == ()
    assert os.pread(segment, 4, 36) == struct.pack("<f", 1)


def test_only_so_many_segments_are_kept_mapped(segment):
    written, plan = WrittenSegments(), plan_tensor(torch.ones(10))
    for number in range(memory._MAX_KEPT):
        written.write(plan, segment, reserved(fresh=False, segment=number))
    written.write(plan, segment, reserved(fresh=False, segment=0))  # used again
    written.write(plan, segment, reserved(fresh=False, segment=1_000))
    assert written.numbers == (*range(2, memory._MAX_KEPT), 0, 1_000)


def test_a_kept_mapping_has_no_descriptor_that_the_next_value_would_go_to(segment):
    """The value goes where the segment's number says, whatever descriptor comes with it."""
    written = WrittenSegments()
    written.write(plan_tensor(torch.zeros(10)), segment, reserved(fresh=False))
    again = os.dup(segment)
    written.write(plan_tensor(torch.ones(10)), again, reserved(fresh=False))
    os.close(again)
    assert os.pread(segment, 4, 0) == struct.pack("<f", 1)


def test_a_fresh_segment_is_written_through_the_file_piece_by_piece(segment, monkeypatch):
    """The kernel may take less than it was given."""
    real, calls = os.pwrite, []

    def some_of_it(fd, data, offset):
        calls.append(len(data))
        return real(fd, data[:1_000], offset)

    monkeypatch.setattr(memory.os, "pwrite", some_of_it)
    tree = [torch.arange(500), torch.arange(3)]
    plan, written = plan_tree(tree), WrittenSegments()
    written.write(plan, segment, reserved(fresh=True))
    assert calls == [4_000, 3_000, 2_000, 1_000, 24]
    assert written.numbers == (), "a fresh segment is not mapped"
    assert equal(read(plan.layout, map_privately(segment, plan.num_bytes))[0], tree)


def test_a_system_without_memory_says_so(segment, monkeypatch):
    def none_left(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory.os, "posix_fallocate", none_left)
    with pytest.raises(StoreFullError, match=r"no 80 bytes of shared memory left \(No space"):
        WrittenSegments().write(plan_tensor(torch.ones(20)), segment, reserved(fresh=True))


def test_a_forked_child_begins_with_no_mappings(segment, monkeypatch):
    monkeypatch.setattr(memory, "_of_the_parent", kept := [])
    written = WrittenSegments()
    written.write(plan_tensor(torch.zeros(10)), segment, reserved(fresh=False))
    written.leave_to_parent()
    assert written.numbers == ()
    assert len(kept) == 1, "the parent's mapping must not be unmapped"
    written.write(plan_tensor(torch.ones(10)), segment, reserved(fresh=False))
    assert os.pread(segment, 4, 0) == struct.pack("<f", 1)


def test_small_values_as_bytes():
    assert as_bytes(plan_tensor(torch.tensor([1, 2], dtype=torch.int16))) == b"\1\0\2\0"
    assert (
        as_bytes(plan_tensor(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).t())) == b"\1\3\2\4"
    )
    two = as_bytes(plan_tree([torch.tensor([1], dtype=torch.uint8), torch.tensor([2.0])]))
    assert two == b"\1" + bytes(63) + struct.pack("<f", 2)
    assert as_bytes(plan_tree({"a": 1})) == b""


def test_copied_memory_is_ones_own():
    data = bytes(range(8))
    first, second = copied(data), copied(data)
    assert bytes(first.tolist()) == data
    first[0] = 77
    assert second[0] == 0
    assert data[0] == 0
    assert copied(b"").nbytes() == 0

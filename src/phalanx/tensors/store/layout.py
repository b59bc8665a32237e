"""How tensors, and trees of them, lie in one piece of memory. No pickle: only plain data.

A value's layout says where in its bytes each tensor is, and, for a tree, how lists, tuples,
dicts and scalars around the tensors look. Tensors start at multiples of 64 bytes, dense and in
row-major order. A tensor that occurs twice (tied weights) lies there once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch.nn.parameter import is_lazy

from phalanx.values.errors import TensorError

_ALIGNMENT: Final = 64
_MAX_LAYOUT: Final = 16 * 1024 * 1024
_MAX_DEPTH: Final = 64
"""Deepest nesting of a tree: reading must not depend on how deep the reader's own stack is."""

Tree: TypeAlias = Any
"""A tensor, bool, int, float, str, bytes or None, or a list, tuple or dict of trees."""

Container: TypeAlias = list[Tree] | tuple[Tree, ...] | Mapping[Any, Tree]

_SPARSE: Final = (
    torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc,
)  # fmt: skip
_WITH_KERNELS: Final = (torch.uint8, torch.int8, torch.bool)
"""Of the dtypes of one byte those that torch can copy as what they are, in any layout."""

# Tags of the nodes of an encoded tree: a node is a plain scalar, or a list that begins with one.
_TENSOR, _LIST, _TUPLE, _DICT, _BIG_INT = "T", "l", "t", "d", "i"


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor is.

    Attributes:
        dtype: Its name in torch, ``float32``.
        shape: Its shape.
        offset: Its first byte, a multiple of 64.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int


class ValueLayout(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of a value mean.

    Attributes:
        tensors: All tensors.
        is_tree: Whether it is more than one tensor.
        tree: The tree, with numbers in place of tensors.
    """

    tensors: tuple[TensorLayout, ...]
    is_tree: bool = False
    tree: Any = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ValueLayout)


@dataclass(slots=True, eq=False)
class Plan:
    """A value that is about to be put.

    Attributes:
        tensors: Its tensors, without gradients, each with its first byte.
        layout: The encoded `ValueLayout`.
        num_bytes: Length of the value.
    """

    tensors: list[tuple[torch.Tensor, int]]
    layout: bytes
    num_bytes: int


def plan_tensor(tensor: torch.Tensor) -> Plan:
    """Lay out one tensor.

    Raises:
        TensorError: It is no tensor, or of a kind that has no plain bytes.
    """
    tensor = _plain(tensor, "the value")
    layout = ValueLayout((TensorLayout(_name_of(tensor.dtype), tuple(tensor.shape), 0),))
    return Plan([(tensor, 0)], _encoder.encode(layout), tensor.nbytes)


def plan_tree(tree: Tree) -> Plan:
    """Lay out a tree.

    Raises:
        TensorError: Names the first place in it that can't be stored.
    """
    packer = _Packer()
    root = packer.pack(tree, "")
    layout = _encoder.encode(ValueLayout(tuple(packer.layouts), is_tree=True, tree=root))
    if len(layout) > _MAX_LAYOUT:
        raise TensorError(
            f"the tree's structure alone has {len(layout):,} bytes (at most {_MAX_LAYOUT:,}): put "
            "long lists of numbers into a tensor"
        )
    return Plan(packer.tensors, layout, packer.num_bytes)


def read(layout: bytes, storage: torch.UntypedStorage) -> tuple[Tree, bool]:
    """Return the value whose bytes are in `storage`, and whether it is a tree. Copies nothing."""
    described = _decoder.decode(layout)
    tensors = [_view(storage, each) for each in described.tensors]
    if described.is_tree:
        return _unpack(described.tree, tensors), True
    return tensors[0], False


def write(plan: Plan, memory: torch.Tensor) -> None:
    """Copy a value's tensors into `memory` (uint8, at least `plan.num_bytes` long)."""
    storage = memory.untyped_storage()
    for tensor, offset in plan.tensors:
        if has_plain_bytes(tensor):
            memory[offset : offset + tensor.nbytes].copy_(bytes_of(tensor))
        else:
            layout = TensorLayout(_name_of(tensor.dtype), tuple(tensor.shape), offset)
            _copy(tensor, _view(storage, layout))


def _copy(tensor: torch.Tensor, view: torch.Tensor) -> None:
    if tensor.itemsize == 1 and tensor.dtype not in _WITH_KERNELS:
        tensor, view = tensor.view(torch.uint8), view.view(torch.uint8)
    view.copy_(tensor)


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is the bytes that are wanted, as they are."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor that `has_plain_bytes`, as a view of type uint8."""
    flat = torch.empty(0, dtype=torch.uint8)
    offset = tensor.storage_offset() * tensor.itemsize
    return flat.set_(tensor.untyped_storage(), offset, (tensor.nbytes,), (1,))


@dataclass(slots=True, eq=False)
class _Packer:
    """Takes a tree apart, and remembers the tensors."""

    tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    layouts: list[TensorLayout] = field(default_factory=list)
    num_bytes: int = 0
    _known: dict[object, int] = field(default_factory=dict)
    _around: set[int] = field(default_factory=set)

    def pack(self, node: Tree, path: str) -> object:  # noqa: PLR0911 - one return per type
        """Return a node as it is encoded."""
        if node is None or isinstance(node, bool):
            return node
        if isinstance(node, torch.Tensor):
            return [_TENSOR, self._pack_tensor(node, path)]
        if isinstance(node, int):
            number = int(node)
            return number if -(2**63) <= number < 2**64 else [_BIG_INT, hex(number)]
        if isinstance(node, float):
            return float(node)
        if isinstance(node, bytes):
            return bytes(node)
        if isinstance(node, str):
            return _plain_text(node, path)
        if isinstance(node, list | tuple | Mapping):
            return self._pack_container(node, path)
        plain = _number_of_numpy(node)
        if plain is not None:
            return plain
        raise TensorError(
            f"{path or 'the value'} is a {type(node).__name__}: a tree holds tensors, numbers, "
            "strings, bytes, None, and lists, tuples and dicts of these"
        )

    def _pack_container(self, node: Container, path: str) -> list[object]:
        if id(node) in self._around:
            raise TensorError(f"{path} contains itself")
        if len(self._around) == _MAX_DEPTH:
            raise TensorError(f"{path[:80]}… is nested deeper than {_MAX_DEPTH} levels")
        self._around.add(id(node))
        if isinstance(node, Mapping):
            packed: list[object] = [_DICT]
            for key, value in node.items():
                if isinstance(key, bool) or not isinstance(key, str | int):
                    raise TensorError(
                        f"{path or 'the value'} has the key {key!r}: keys must be strings or "
                        "integers"
                    )
                packed += [self.pack(key, path), self.pack(value, f"{path}[{key!r}]")]
        else:
            packed = [_LIST if isinstance(node, list) else _TUPLE]
            packed += [self.pack(value, f"{path}[{i}]") for i, value in enumerate(node)]
        self._around.discard(id(node))
        return packed

    def _pack_tensor(self, tensor: torch.Tensor, path: str) -> int:
        tensor = _plain(tensor, path or "the value")
        place = (
            tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device,
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
        known = self._known.get(place) if tensor.nbytes else None
        if known is not None:
            return known
        number = self._known[place] = len(self.tensors)
        offset = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.tensors.append((tensor, offset))
        self.layouts.append(TensorLayout(_name_of(tensor.dtype), tuple(tensor.shape), offset))
        self.num_bytes = offset + tensor.nbytes
        return number


def _unpack(node: Any, tensors: list[torch.Tensor]) -> Tree:  # noqa: ANN401
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag == _TENSOR:
        return tensors[rest[0]]
    if tag == _BIG_INT:
        return int(rest[0], 16)
    values = [_unpack(each, tensors) for each in rest]
    if tag == _DICT:
        return dict(zip(values[::2], values[1::2], strict=True))
    return tuple(values) if tag == _TUPLE else values


def _view(storage: torch.UntypedStorage, layout: TensorLayout) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8).view(getattr(torch, layout.dtype))
    strides, step = [], 1
    for length in reversed(layout.shape):
        strides.append(step)
        step *= max(length, 1)
    return empty.set_(storage, layout.offset // empty.itemsize, layout.shape, strides[::-1])


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return a tensor without its gradient, if it is one that has bytes.

    Raises:
        TensorError: It has not; says what to put instead.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(
            f"{what} is a {type(tensor).__name__}, no torch.Tensor (torch.as_tensor makes one; "
            "put_tensors takes dicts, lists and numbers)"
        )
    if is_lazy(tensor):
        raise TensorError(f"{what} is a lazy parameter without a shape: run the module once first")
    for is_one, kind, instead in (
        (tensor.is_quantized, "quantised", "put dequantize(), or int_repr() with its scales"),
        (tensor.is_nested, "nested", "put the list of unbind() with put_tensors"),
        (tensor.layout in _SPARSE, "sparse", "put to_dense(), or its parts in put_tensors"),
        (tensor.layout != torch.strided, f"of layout {tensor.layout}", "put to_dense()"),
        (tensor.is_meta, "on the meta device", "it has no values yet: make it with to_empty()"),
    ):
        if is_one:
            raise TensorError(f"{what} is a tensor that is {kind}: {instead}")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TensorError(
            f"{what} is a {type(tensor).__name__}, a wrapper around tensors: put what is in it "
            "(of a DTensor: to_local(), or full_tensor())"
        )
    if tensor.numel() and not _has_memory(tensor):
        raise TensorError(
            f"{what} has no memory of its own: it is a tensor that torch.func or a tracer made, "
            "or one whose storage was freed"
        )
    return tensor.detach()


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((length - 1) * stride for length, stride in pairs)
    return bool(address) and (last + 1) * tensor.itemsize <= int(storage.nbytes())


def _number_of_numpy(node: Tree) -> float | None:
    """Return a plain bool, int or float for one of NumPy's; None for anything else."""
    if type(node).__module__ != "numpy" or getattr(node, "shape", None) != ():
        return None
    value = node.item()
    return value if isinstance(value, bool | int | float) else None


def _plain_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TensorError(
            f"{path or 'the value'} has the string {text!r:.80}: it is no valid text"
        ) from error
    return str.__str__(text)

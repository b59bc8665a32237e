from __future__ import annotations

import pytest
import torch

from phalanx.tensors.sync.shm import backend
from phalanx.tensors.sync.shm.exchange import DTYPES, NAMES, REDUCTIONS, Call
from phalanx.tensors.sync.shm.reduction import Reduction
from phalanx.tensors.sync.shm.segment import LINE_BYTES, NUM_SLOTS, Layout
from phalanx.values.errors import GroupTimeoutError, GroupUnsupportedError, PeerLostError
from phalanx.values.failures import kind_of
from phalanx.values.spec import check_backend


@pytest.mark.parametrize("name", NAMES)
def test_a_call_survives_being_packed(name):
    for reduction, dtype in zip(REDUCTIONS, DTYPES, strict=False):
        call = Call(name=name, reduction=reduction, dtype=dtype, root=70_000, count=2**40)
        assert Call.unpack(*call.pack()) == call
        assert all(0 <= word < 2**64 for word in call.pack())


def test_a_call_reads_like_one():
    call = Call(name="reduce", reduction="SUM", dtype="float32", root=2, count=1234)
    assert str(call) == "reduce(SUM, 1,234 elements, float32, root 2)"
    assert str(Call(name="barrier")) == "barrier()"


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64, 500])
def test_nothing_in_a_segment_overlaps(size):
    layout = Layout(size=size)
    places = [(0, 16)]
    places += [(layout.line(rank), LINE_BYTES) for rank in range(size)]
    places += [(layout.slots(rank), layout.rank_bytes) for rank in range(size)]
    pairs = [(i, j) for i in range(size) for j in range(size)]
    places += [(layout.mailbox(i, j), layout.mailbox_bytes) for i, j in pairs]
    end = 0
    for offset, length in places:
        assert offset >= end
        assert offset % 64 == 0
        end = offset + length
    assert end == layout.num_bytes
    assert layout.input_bytes >= size * layout.piece_bytes
    assert NUM_SLOTS * layout.input_bytes <= 4 * max(1 << 20, size * 4096)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_once(dtype):
    one, small = (
        torch.ones(1, dtype=dtype),
        torch.full((1,), torch.finfo(dtype).eps / 2, dtype=dtype),
    )
    out = torch.empty(1, dtype=dtype)
    Reduction("SUM", dtype, 3).reduce([one, small, small], out)
    assert out.item() == 1 + torch.finfo(dtype).eps, "rounded twice, it would be 1"


def test_averages_of_whole_numbers_go_towards_zero():
    inputs = [torch.tensor([-5, 5, 6]), torch.tensor([-2, 2, 0])]
    out = torch.empty(3, dtype=torch.int64)
    Reduction("AVG", torch.int64, 2).reduce(inputs, out)
    assert out.tolist() == [-3, 3, 3]


def test_unsigned_numbers_wrap_as_they_should():
    reduction = Reduction("SUM", torch.uint16, 2)
    inputs = [torch.tensor([65_000, 1], dtype=torch.uint16).view(reduction.dtype)] * 2
    out = torch.empty(2, dtype=reduction.dtype)
    reduction.reduce(inputs, out)
    assert out.view(torch.uint16).tolist() == [64_464, 2]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("PREMUL_SUM", torch.float32), ("BAND", torch.float32), ("MAX", torch.complex64),
     ("SUM", torch.float8_e5m2), ("MIN", torch.uint32), ("AVG", torch.bool)],
)  # fmt: skip
def test_what_there_is_not_is_said(name, dtype):
    with pytest.raises(NotImplementedError, match="gloo"):
        Reduction(name, dtype, 2)


def kind(error: Exception) -> str:
    return kind_of((base.__name__ for base in type(error).__mro__), str(error))


def test_a_lost_peer_is_an_effect_a_timeout_is_not():
    lost = "rank 2 (pid 7) died while rank 0 waited for it in barrier(); see its own error"
    assert kind(PeerLostError(lost)) == "effect"
    assert kind(RuntimeError(f"phalanx.PeerLostError: {lost}")) == "effect"
    assert kind(GroupTimeoutError("barrier() timed out")) == "primary"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(backend.sys, "platform", "darwin"), "needs Linux"),
        (lambda patch: patch.setattr(backend.platform, "machine", lambda: "aarch64"), "aarch64"),
        (lambda patch: patch.setattr(backend.kernel, "HAS_PIDFD", False), "pidfds"),
    ],
)
def test_elsewhere_it_declines_and_says_why(monkeypatch, change, reason):
    change(monkeypatch)
    with pytest.raises(GroupUnsupportedError, match=rf'{reason}.*init_process_group\("gloo"\)'):
        backend.make_group(None, 0, 1, None)


def test_the_name_is_known():
    check_backend("shm")

"""Sealing in C++ and in torch operations: the same bytes."""

from collections.abc import Callable

import pytest
import torch
from helpers import assert_equal, compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from revrnn import _sealing
from revrnn._sealing import LANE_BYTES, LANES
from revrnn.exact import LANE_LOW

FORMS = [
    "torch",
    pytest.param("compiled", marks=pytest.mark.skipif(not compiled, reason="no C++ kernels")),
]
lanes_of_rows = st.lists(
    st.lists(st.integers(LANE_LOW, 256 * LANE_LOW - 1), min_size=LANES, max_size=LANES),
    min_size=1,
    max_size=4,
)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(_sealing, "cpu", None)


def both(call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """What a call returns with the C++ kernels, where they are installed, and without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sealing, "cpu", None)
        plain = call()
    return call(), plain


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("block", [9, 20, 64, 1 << 18])
@pytest.mark.parametrize("long_row", [9, 10], ids=["rows", "selection"])
def test_compaction_keeps_the_bytes_of_each_row(
    block: int, long_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sealing, "_COMPACT_BLOCK", block)
    monkeypatch.setattr(_sealing, "_LONG_ROW", long_row)
    fill = torch.tensor([3, 0, 9, 1, 9])
    region = torch.arange(50, dtype=torch.uint8).view(5, 10)[:, :9]
    expected = [10 * row + column for row in range(5) for column in range(int(fill[row]))]
    assert _sealing.compact(region, fill).tolist() == expected


@pytest.mark.usefixtures("form")
def test_rows_are_laid_out_one_after_the_other() -> None:
    sealed = torch.tensor([3, 0, 9], dtype=torch.int32)
    found = _sealing.lay_out(sealed, 12)
    assert found is not None
    fill, begin = found
    assert_equal(fill, torch.tensor([3, 0, 9]))
    assert_equal(begin, torch.tensor([0, 3, 3]))
    fill.zero_()
    assert sealed.tolist() == [3, 0, 9]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    ("fills", "size"), [([3, -3, 9], 9), ([3, 0, 9], 11), ([2**31 - 1] * 2 + [2, 5], 5)]
)
def test_what_is_not_the_layout_of_so_many_bytes(fills: list[int], size: int) -> None:
    assert _sealing.lay_out(torch.tensor(fills, dtype=torch.int32), size) is None


def test_fills_that_a_hook_has_made_so_long_that_their_sum_wraps() -> None:
    assert _sealing.lay_out(torch.tensor([2**62] * 4 + [5]), 5) is None


@given(lanes_of_rows)
def test_lanes_pack_into_18_bits(values: list[list[int]]) -> None:
    lanes = torch.tensor(values, dtype=torch.int32)
    packed, plain = both(lambda: _sealing.pack_lanes(lanes))
    assert packed.dtype == torch.uint8
    assert packed.shape == (len(values), 18 * LANES // 8) == (len(values), LANE_BYTES)
    assert_equal(packed, plain)
    for back in both(lambda: _sealing.unpack_lanes(packed)):
        assert_equal(back, lanes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 1 << 30))
def test_both_forms_compact_alike(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    used = max(1, *lengths)
    shape = len(lengths), used + 3
    stack = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    fill = torch.tensor(lengths)
    assert_equal(*both(lambda: _sealing.compact(stack[:, :used], fill)))


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("change", [torch.Tensor.double, torch.Tensor.long])
def test_what_a_hook_has_made_another_type_of_is_read_as_numbers(
    change: Callable[[Tensor], Tensor],
) -> None:
    lanes = torch.full((2, LANES), 5 * LANE_LOW, dtype=torch.int32)
    packed = _sealing.pack_lanes(lanes)
    assert_equal(_sealing.unpack_lanes(change(packed)), lanes)
    found = _sealing.lay_out(change(torch.tensor([1, 2], dtype=torch.int32)), 3)
    assert found is not None
    assert [part.tolist() for part in found] == [[1, 2], [0, 1]]

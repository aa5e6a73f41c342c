import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from revrnn.fixed import (
    H_ONE,
    RADIX_Z,
    STATE_LIMIT,
    STATE_LIMIT_VALUE,
    Z_MAX,
    Z_ONE,
    ForgetRange,
    quantise_forget,
    to_fixed,
    to_float,
)


def test_a_state_in_range_cannot_wrap_within_one_step() -> None:
    for extreme in (STATE_LIMIT - 1, 1 - STATE_LIMIT):
        for z in (1, Z_MAX):
            for update in (-H_ONE, H_ONE):
                for filled_in in (0, z - 1):
                    new = (extreme >> RADIX_Z) * z + filled_in + update
                    assert -(1 << 31) <= new < 1 << 31
    assert STATE_LIMIT_VALUE == 254


def test_to_fixed_rounds_halves_to_even() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -0.51], dtype=torch.float64) / H_ONE
    assert to_fixed(values).tolist() == [0, 2, 2, 0, -2, 0, -1]


@given(st.integers(-H_ONE, H_ONE))
def test_fixed_values_up_to_one_survive_float32(fixed: int) -> None:
    tensor = torch.tensor([fixed], dtype=torch.int32)
    assert torch.equal(to_fixed(to_float(tensor)), tensor)


@given(st.integers(1 - STATE_LIMIT, STATE_LIMIT - 1))
def test_to_float_rounds_to_nearest(fixed: int) -> None:
    tensor = torch.tensor([fixed], dtype=torch.int32)
    exact = fixed / H_ONE
    assert to_float(tensor, torch.float64).item() == exact
    assert abs(to_float(tensor).item() - exact) <= abs(exact) * 2.0**-24


@pytest.mark.parametrize("bits", [0.5, 1, 2, 3, 5, 10, None])
def test_forget_values_stay_in_range(bits: float | None) -> None:
    forget = ForgetRange.from_bits(bits)
    gate = torch.linspace(0, 1, 10_001)
    z = quantise_forget(gate, forget)
    assert z.dtype == torch.int32
    assert bool((z.diff() >= 0).all())
    assert z[0] == forget.z_min
    assert z[-1] == Z_MAX
    if bits is not None:
        # The bound on the bits forgotten holds for the quantised value.
        assert -math.log2(int(z.min()) / Z_ONE) <= bits
    unclamped = (z > forget.z_min) & (z < Z_MAX)
    real = forget.floor + (1 - forget.floor) * gate.double()
    assert bool(((z / Z_ONE - real).abs()[unclamped] <= 0.5001 / Z_ONE).all())


def test_no_limit_means_down_to_the_smallest_forget_value() -> None:
    assert ForgetRange.from_bits(None) == ForgetRange(floor=0.0, z_min=1)
    assert ForgetRange.from_bits(1) == ForgetRange(floor=0.5, z_min=Z_ONE // 2)

import pytest
import torch
from helpers import assert_equal
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from revrnn.exact import (
    LANE_BITS,
    LANE_LOW,
    divide,
    multiply,
    multiply_untaped,
    oracle_divide,
    oracle_multiply,
    refill,
    rotate_left,
    rotate_right,
)
from revrnn.fixed import RADIX_Z, STATE_LIMIT, Z_MAX, Z_ONE

states = st.integers(1 - STATE_LIMIT, STATE_LIMIT - 1)
forgets = st.integers(1, Z_MAX)
lane_values = st.integers(LANE_LOW, 256 * LANE_LOW - 1)

EXTREME_STATES = [1 - STATE_LIMIT, -(1 << 23), -1025, -1024, -1023, -1, 0, 1, 1023, 1024, 1 << 23]
EXTREME_STATES += [STATE_LIMIT - 1]
EXTREME_FORGETS = [1, 2, 3, 4, 511, 512, 1022, 1023]
EXTREME_LANES = [1024, 1025, 65535, 65536, 131071, 131072, 196608, 262143]


def test_the_worked_example_of_the_paper() -> None:
    """Appendix C.2, with our radix in place of R_Z = 4."""
    assert oracle_multiply(1, 1 << RADIX_Z, 17) == ((1 << RADIX_Z) // 17, 17 + (1 << RADIX_Z) % 17)


@given(st.integers(0, 1 << 200), states, forgets)
def test_the_oracle_is_a_bijection(buffer: int, h: int, z: int) -> None:
    assert oracle_divide(*oracle_multiply(buffer, h, z), z) == (buffer, h)


@given(st.integers(0, 1 << 200), states, forgets)
def test_the_oracle_multiplies(buffer: int, h: int, z: int) -> None:
    _, product = oracle_multiply(buffer, h, z)
    # Division by 2^R and filling in are each off by less than z.
    assert abs(product - h * z / Z_ONE) < z


def tensors(*columns: list[int]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.int32) for column in columns]


def check_against_oracle(lanes: Tensor, h: Tensor, z: Tensor) -> Tensor:
    """Values, interval and way back of the lane version; returns the byte counts."""
    new_lanes, product, counts, emitted = multiply(lanes, h, z)
    assert new_lanes.dtype == product.dtype == torch.int32
    assert bool(((new_lanes >= LANE_LOW) & (new_lanes < 256 * LANE_LOW)).all())
    assert bool(((counts >= 0) & (counts <= 2)).all())

    # The oracle with the lane, less its emitted bytes, as buffer.
    kept = (lanes >> (8 * counts)).tolist()
    expected = [oracle_multiply(*row) for row in zip(kept, h.tolist(), z.tolist(), strict=True)]
    assert new_lanes.tolist() == [buffer for buffer, _ in expected]
    assert product.tolist() == [value for _, value in expected]
    assert_equal(emitted, torch.stack((lanes % 256, lanes // 256 % 256), dim=-1).to(torch.uint8))

    short, old, wanted = divide(new_lanes, product, z)
    assert_equal(old, h)
    assert_equal(wanted, counts)
    unasked = torch.arange(2) >= counts[:, None]
    assert_equal(refill(short, wanted, emitted.masked_fill(unasked, 0xAA)), lanes)
    return counts


def random_triples(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator, dtype=torch.int32)

    # Half of the states are as small as hidden states are; a third of z are small, to emit much.
    h = integers(1 - STATE_LIMIT, STATE_LIMIT)
    h[::2] >>= 8
    z = integers(1, Z_ONE)
    z[::3] = z[::3] % 4 + 1
    return integers(LANE_LOW, 256 * LANE_LOW), h, z


def test_extremes_agree_with_the_oracle() -> None:
    grid = torch.cartesian_prod(*tensors(EXTREME_LANES, EXTREME_STATES, EXTREME_FORGETS))
    counts = check_against_oracle(*grid.unbind(1))
    assert counts.unique().tolist() == [0, 1, 2]


def test_random_pairs_agree_with_the_oracle() -> None:
    counts = check_against_oracle(*random_triples(100_000, seed=0))
    assert counts.unique().tolist() == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_million_random_pairs_agree_with_the_oracle() -> None:
    for seed in range(20):
        check_against_oracle(*random_triples(500_000, seed=seed + 1))


@given(lane_values, states, forgets)
def test_any_lane_state_and_forget_value_round_trip(lane: int, h: int, z: int) -> None:
    check_against_oracle(*tensors([lane], [h], [z]))


def test_every_lane_is_kept_in_its_interval_by_every_forget_value() -> None:
    """Exhaustive over z and the borders of emission, the two residues that matter."""
    z = torch.arange(1, Z_ONE, dtype=torch.int32)[:, None, None]
    borders = torch.cat((z << 8, z << 16, torch.full_like(z, LANE_LOW)), dim=1)
    lanes = (borders + torch.arange(-2, 3, dtype=torch.int32)).clamp(LANE_LOW, 256 * LANE_LOW - 1)
    for residue in (0, Z_MAX):
        h = torch.full_like(lanes, residue)
        new_lanes, product, counts, emitted = multiply(lanes, h, z.expand_as(lanes))
        assert int(new_lanes.min()) >= LANE_LOW
        assert int(new_lanes.max()) < 256 * LANE_LOW == 1 << LANE_BITS
        short, old, wanted = divide(new_lanes, product, z.expand_as(lanes))
        assert_equal(old, h)
        assert_equal(refill(short, wanted, emitted), lanes)
        assert_equal(wanted, counts)


def test_untaped_multiplication_is_the_rounded_down_product() -> None:
    _, h, z = random_triples(100_000, seed=3)
    grid = torch.cartesian_prod(*tensors(EXTREME_STATES, EXTREME_FORGETS))
    h, z = torch.cat((h, grid[:, 0])), torch.cat((z, grid[:, 1]))
    assert_equal(multiply_untaped(h, z), ((h.long() * z.long()) >> RADIX_Z).to(torch.int32))


@given(states, st.integers(0, RADIX_Z))
def test_rotating_brings_the_low_digits_up(h: int, n: int) -> None:
    own, z = tensors([h], [Z_ONE >> n])
    rotated = rotate_right(own, z)
    digits = h & Z_MAX
    expected = ((digits & ((1 << n) - 1)) << (RADIX_Z - n)) | (digits >> n)
    assert int(rotated) == (h & ~Z_MAX) | expected
    assert_equal(rotate_left(rotated, z), own)

"""What a forget gate is, and what it does to a state."""

from functools import partial

import pytest
import torch
from helpers import assert_equal
from torch import Tensor

from revrnn import exact
from revrnn.errors import ReversalError
from revrnn.fixed import STATE_LIMIT, Z_ONE, ForgetRange
from revrnn.forgetting import Discrete, Draw, Estimator, Fractional, Retained, Rule
from revrnn.noise import Noise
from revrnn.tape import LANES, EntropyTape

FORGET = ForgetRange.from_bits(None)
ROWS, UNITS = 5, 37

rules = pytest.mark.parametrize(
    "rule",
    [Fractional(), Fractional(0.4), Retained(), Retained(0.4), Discrete(3)],
    ids=["fractional", "fractional, zoneout", "retained", "retained, zoneout", "discrete"],
)
estimators = pytest.mark.parametrize(
    ("estimator", "temperature"), [("gumbel", 1.0), ("gumbel", 0.4), ("categorical", 1.0)]
)


def draw(seed: int = 1, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Draw:
    noise = Noise(seed, time=0, group=0, rows=rows, device=torch.device("cpu"))
    return partial(noise.uniform, 0, dtype=dtype)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


def states() -> Tensor:
    """Of all sizes and signs, the extremes among them."""
    generator = torch.Generator().manual_seed(4)
    h = torch.randint(1 - STATE_LIMIT, STATE_LIMIT, (ROWS, UNITS), generator=generator)
    h >>= torch.randint(0, 32, h.shape, generator=generator)
    h[0, :4] = torch.tensor([1 - STATE_LIMIT, STATE_LIMIT - 1, -1, 0])
    return h.to(torch.int32)


def amounts(rule: Rule, h: Tensor) -> Tensor:
    sums = normal(len(h), len(rule.names("z")) * UNITS)
    columns, chosen = rule.activate(sums, UNITS, draw())
    return rule.amount(columns, chosen, FORGET)


@rules
def test_what_is_multiplied_comes_back(rule: Rule) -> None:
    h = states()
    z = amounts(rule, h)
    tape = EntropyTape(ROWS, writing=True, device="cpu")
    tape.reserve(1, UNITS)
    product = rule.multiply(tape, h, z, 0)
    back = EntropyTape.open(tape.seal())
    assert_equal(rule.divide(back, product, z, None), h)
    back.check_rewound()


@rules
def test_stored_units_come_back_and_must_fit(rule: Rule) -> None:
    h, stored = states(), 5
    z = amounts(rule, h)
    tape = EntropyTape(ROWS, writing=True, device="cpu")
    tape.reserve(1, UNITS)
    product = rule.multiply(tape, h, z, stored)
    sealed = tape.seal()
    kept = h[:, :stored].clone()
    assert_equal(rule.divide(EntropyTape.open(sealed), product, z, kept), h)
    kept[3, 2] += Z_ONE
    with pytest.raises(ReversalError, match="a stored unit of batch row 3 was changed"):
        rule.divide(EntropyTape.open(sealed), product, z, kept)


def test_what_is_retained_is_not_touched() -> None:
    h = states()
    rule = Retained()
    tape = EntropyTape(ROWS, writing=True, device="cpu")
    assert rule.multiply(tape, h, amounts(rule, h), 0) is h
    assert not tape.stack.numel()


@pytest.mark.parametrize("floor_bits", [None, 2.0])
def test_a_share_of_nothing_leaves_a_unit_as_it_was(floor_bits: float | None) -> None:
    """To the bit, and on an empty tape: z* is 2^RADIX_Z there, whatever the gate."""
    h, forget = states(), ForgetRange.from_bits(floor_bits)
    rule, columns = Fractional(0.5), normal(ROWS, UNITS).sigmoid()
    everything, nothing = torch.ones_like(columns), torch.zeros_like(columns)
    z = rule.amount(columns, nothing, forget)
    assert_equal(z.unique(), torch.tensor([Z_ONE], dtype=torch.int32))
    tape = EntropyTape(ROWS, writing=True, device="cpu")
    tape.reserve(1, UNITS)
    assert_equal(rule.multiply(tape, h, z, 0), h)
    assert float(tape.ideal.sum()) == 0
    assert_equal(tape.lanes, torch.full_like(tape.lanes, exact.LANE_LOW))
    # And a unit that takes the whole step, takes that of a layer without zoneout.
    plain = Fractional().amount(columns, columns[:, :0], forget)
    assert int((rule.amount(columns, everything, forget) - plain).abs().max()) <= 1


def test_shares_are_as_frequent_as_asked() -> None:
    rows, p = 20_000, 0.3
    _, chosen = Fractional(p).activate(torch.zeros(rows, 4), 4, draw(rows=rows))
    assert set(chosen.unique().tolist()) == {0.0, 1.0}
    assert abs(float((chosen == 0).float().mean()) - p) < 5 * (p * (1 - p) / (4 * rows)) ** 0.5
    _, mean = Retained(p, gated=False).activate(torch.zeros(rows, 0), 4, None)
    assert_equal(mean, torch.full((rows, 4), 1 - p))


@pytest.mark.parametrize("bits", [1, 2, 3, 10])
def test_discrete_forgetting_shifts(bits: int) -> None:
    """Also negative states, which two's complement rounds towards minus infinity."""
    h = states()
    rule = Discrete(bits)
    z = amounts(rule, h)
    n = torch.log2(Z_ONE / z).to(torch.int32)
    assert set(n.unique().tolist()) == set(range(bits + 1))
    assert_equal(z, Z_ONE >> n)
    for stored in (0, 5, UNITS):
        tape = EntropyTape(ROWS, writing=True, device="cpu")
        tape.reserve(1, UNITS)
        assert_equal(rule.multiply(tape, h, z, stored), h >> n)
        assert_equal(tape.ideal, n[:, stored:].sum(1).double())


def test_the_bits_shifted_out_are_those_on_the_lane() -> None:
    """A lane takes in just the n low digits: x becomes x 2^n + (h mod 2^n)."""
    h = torch.tensor([[-1, 5, (1 << 23) + 3, -1024, 0b1011]], dtype=torch.int32)
    n = torch.tensor([[1, 2, 3, 0, 4]], dtype=torch.int32)
    z = (Z_ONE >> n).to(torch.int32)
    tape = EntropyTape(1, writing=True, device="cpu")
    tape.reserve(1, 5)
    assert_equal(Discrete(4).multiply(tape, h, z, 0), h >> n)
    low = h & ((1 << n) - 1)
    expected = ((exact.LANE_LOW << n) + low).to(torch.int32)
    assert_equal(tape.lanes[:, :5].contiguous(), expected)
    assert LANES >= 5


# -- choosing -------------------------------------------------------------------------------------


@estimators
def test_choices_are_as_frequent_as_the_softmax_says(
    estimator: Estimator, temperature: float
) -> None:
    """Whatever the estimator: 100,000 draws, within five standard deviations."""
    rows, bits = 100_000, 3
    pre = torch.tensor([0.3, 1.5, -2.0, 0.9]).expand(rows, -1)
    _, chosen = Discrete(bits, estimator, temperature).activate(pre, 1, draw(rows=rows))
    expected = torch.softmax(pre[0].relu(), 0)
    for n, p in enumerate(expected.tolist()):
        share = float((chosen == 2.0**-n).float().mean())
        assert abs(share - p) < 5 * (p * (1 - p) / rows) ** 0.5


def test_without_numbers_the_likeliest_is_taken() -> None:
    pre = torch.tensor([[-2.0, 1.0, 0.5], [-1.0, -3.0, -2.0], [0.0, 0.0, 0.0]])  # a unit each row
    _, chosen = Discrete(2).activate(pre, 1, None)
    # Where relu brings all to 0, the pre-activations themselves decide; of equal ones the first.
    assert chosen.flatten().tolist() == [0.5, 1.0, 1.0]


def soften(rule: Discrete, pre: Tensor, u: Tensor | None) -> Tensor:
    """sum_n w_n 2^-n as torch differentiates it: what the choice stands for in backward."""
    s = pre.unflatten(1, (rule.bits + 1, -1)).relu()
    if rule.estimator == "gumbel":
        if u is not None:
            s = s - (-u.log()).log().view_as(s)
        s = s / rule.temperature
    values = 2.0 ** -torch.arange(rule.bits + 1, dtype=pre.dtype)
    return (torch.softmax(s, 1) * values[:, None]).sum(1)


@estimators
@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("drawn", [True, False])
def test_gradients_are_straight_through(
    estimator: Estimator, temperature: float, bits: int, drawn: bool
) -> None:
    rule = Discrete(bits, estimator, temperature)
    pre = 2 * normal(ROWS, (bits + 1) * UNITS, dtype=torch.float64)
    numbers = draw(dtype=torch.float64) if drawn else None
    columns, chosen = rule.activate(pre, UNITS, numbers)
    d_z = torch.randn(ROWS, UNITS, dtype=torch.float64)
    leaf = pre.clone().requires_grad_()
    soft = soften(rule, leaf, None if numbers is None else numbers(pre.shape[1]))
    (expected,) = torch.autograd.grad(soft, leaf, d_z)
    found = rule.slope(d_z, columns, chosen, FORGET)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_extreme_logits_stay_finite() -> None:
    pre = torch.tensor([[1e4, -1e4, 0.0], [3e38, 3e38, 3e38], [-3e38, 1e-30, 80.0]])
    for rule in (Discrete(2), Discrete(2, "gumbel", 2.0**-6), Discrete(2, "categorical")):
        columns, chosen = rule.activate(pre, 1, draw(rows=3))
        assert bool(columns.isfinite().all())
        assert set(chosen.flatten().tolist()) <= {1.0, 0.5, 0.25}
        slope = rule.slope(torch.ones(3, 1), columns, chosen, FORGET)
        assert bool(slope.isfinite().all())
        torch.testing.assert_close(columns.abs().sum(1), torch.ones(3))

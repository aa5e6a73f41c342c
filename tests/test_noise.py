"""Noise that can be drawn again."""

import torch
from helpers import assert_equal

from revrnn.noise import Noise

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def oracle(seed: int, time: int, row: int, group: int, purpose: int, column: int) -> float:
    """The formulas of the module on Python integers."""

    def mix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    def mix32(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    key = seed
    for part in (time, row, 2 * purpose + group):
        key = mix64((key + (part + 1) * 0x9E3779B97F4A7C15) & MASK)
    x = mix32((column * 0x9E3779B9 + key) & 0xFFFFFFFF)
    return ((mix32(x ^ (key >> 32)) >> 9) + 0.5) / 2**23


def test_it_is_what_the_formulas_say() -> None:
    for seed, time, group, purpose in ((0, 0, 0, 0), (2**62 + 12345, 999_999, 1, 3), (7, 5, 1, 0)):
        found = Noise(seed, time, group, 5, CPU).uniform(purpose, 40, torch.float64)
        expected = [
            [oracle(seed, time, row, group, purpose, column) for column in range(40)]
            for row in range(5)
        ]
        assert_equal(found, torch.tensor(expected, dtype=torch.float64))


def test_the_same_place_gives_the_same_numbers_and_another_gives_others() -> None:
    def draw(seed: int = 1, time: int = 2, group: int = 0, purpose: int = 1) -> torch.Tensor:
        return Noise(seed, time, group, 8, CPU).uniform(purpose, 64, torch.float32)

    here = draw()
    assert_equal(draw(), here)
    for other in (draw(seed=2), draw(time=3), draw(group=1), draw(purpose=0)):
        # Of 2^23 values, two of 512 pairs at the very most are the same by chance.
        assert int((other == here).sum()) <= 2
    assert len(here.unique()) >= 510


def test_fewer_rows_or_columns_are_the_first_ones() -> None:
    many = Noise(3, 4, 1, 9, CPU).uniform(0, 50, torch.float32)
    assert_equal(Noise(3, 4, 1, 2, CPU).uniform(0, 7, torch.float32), many[:2, :7].contiguous())


def test_numbers_are_uniform_and_independent() -> None:
    """Of a million: mean, variance, every sixteenth, and the correlation of neighbours in column,
    row and time, each within five standard deviations."""
    first, second = (Noise(11, t, 0, 1000, CPU).uniform(2, 1000, torch.float64) for t in (0, 1))
    count = first.numel()
    assert bool(((first > 0) & (first < 1)).all())
    assert abs(first.mean() - 1 / 2) < 5 / (12 * count) ** 0.5
    assert abs(first.var() - 1 / 12) < 5 / (180 * count) ** 0.5
    share = torch.histc(first, bins=16, min=0, max=1) / count
    assert float((share - 1 / 16).abs().max()) < 5 * (15 / 256 / count) ** 0.5
    centred = first - 0.5
    for a, b in (
        (centred[:, 1:], centred[:, :-1]),
        (centred[1:], centred[:-1]),
        (centred, second - 0.5),
    ):
        assert abs(float((a * b).mean() * 12)) < 5 / a.numel() ** 0.5

"""The coefficients of activations.h: minimax fits by reweighted least squares, in float64.

    python csrc/fit_activations.py

Prints each polynomial's coefficients, lowest power first, rounded to float32, and the largest error
of the fit before that rounding.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

Curve = Callable[[np.ndarray], np.ndarray]


def fit(
    target: Curve, powers: Sequence[int], low: float, high: float, scale: Curve
) -> tuple[np.ndarray, float]:
    """Coefficients of ``x**powers`` for the smallest maximum of ``|error| / scale`` (Lawson)."""
    x = (np.cos(np.linspace(0.0, np.pi, 4001)) * (high - low) + high + low) / 2
    x = x[np.abs(x) > 1e-9]
    basis = np.stack([x**power for power in powers], axis=1)
    weight = np.ones_like(x)
    for _ in range(60):
        rows = np.sqrt(weight) / scale(x)
        coefficients, *_ = np.linalg.lstsq(basis * rows[:, None], target(x) * rows, rcond=None)
        error = np.abs(basis @ coefficients - target(x)) / scale(x)
        weight *= np.sqrt(error / error.max() + 1e-3)
        weight /= weight.max()
    return coefficients, float(error.max())


def main() -> None:
    half_ln2 = math.log(2.0) / 2 * 1.001
    root = math.sqrt(0.5)
    fits = {
        "e^r - 1 - r, relative": fit(
            lambda r: np.exp(r) - 1 - r, range(2, 7), -half_ln2, half_ln2, np.exp
        ),
        "tanh(x) - x, |x| < 0.625, relative": fit(
            lambda x: np.tanh(x) - x, range(3, 12, 2), 0.0, 0.625, lambda x: np.tanh(x) + 1e-30
        ),
        "log2(1 + m), absolute": fit(
            lambda m: np.log2(1 + m), range(1, 8), root - 1, 1 / root - 1, np.ones_like
        ),
    }
    for name, (coefficients, error) in fits.items():
        rounded = [float(np.float32(c)) for c in coefficients]
        print(name, f"(error {error:.1e})")
        for value in rounded:
            print(f"  {value!r:>26}  {value.hex()}")


if __name__ == "__main__":
    main()

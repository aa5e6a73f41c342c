"""What a streamed pass's head returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Values:
    """What the head returned, summed over chunks."""

    def __init__(self) -> None:
        self._totals: list[Tensor] | None = None
        self._dtypes: list[torch.dtype] = []
        self._constant: list[bool] = []
        self._single = True

    def check(self, returned: Any) -> list[Tensor]:
        """The scalars of one chunk's result."""
        single = isinstance(returned, Tensor)
        values = [returned] if single else returned
        if not isinstance(values, (tuple, list)) or not values:
            raise TypeError(
                "head must return a scalar tensor or a tuple of them, got "
                f"{type(returned).__name__}"
            )
        for value in values:
            if not isinstance(value, Tensor):
                raise TypeError(f"head must return scalar tensors, got {type(value).__name__}")
            if value.dim() != 0:
                raise ValueError(
                    "head must return scalars, summed over the chunk, got shape "
                    f"{tuple(value.shape)}"
                )
            if value.is_complex():
                raise ValueError(f"head must return real scalars, got {value.dtype}")
        if self._totals is not None and len(values) != len(self._totals):
            raise ValueError(
                f"head must return as many scalars for every chunk, got {len(values)} after "
                f"{len(self._totals)}"
            )
        self._single = single
        return list(values)

    def add(self, values: Sequence[Tensor]) -> None:
        # In float64 and int64, since there may be thousands of chunks.
        wide = [
            value.detach().to(torch.float64 if value.is_floating_point() else torch.int64)
            for value in values
        ]
        constant = [not value.requires_grad for value in values]
        if self._totals is None:
            self._totals, self._constant = wide, constant
            self._dtypes = [
                value.dtype if value.is_floating_point() else torch.int64 for value in values
            ]
        else:
            self._totals = [total + value for total, value in zip(self._totals, wide, strict=True)]
            self._constant = [a and b for a, b in zip(self._constant, constant, strict=True)]

    def totals(self) -> list[Tensor]:
        """The sums; new tensors at every call, which may become part of a graph."""
        assert self._totals is not None
        return [
            total.to(dtype, copy=True)
            for total, dtype in zip(self._totals, self._dtypes, strict=True)
        ]

    def constant(self, totals: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``totals`` that no chunk can give a gradient for."""
        return [total for total, constant in zip(totals, self._constant, strict=True) if constant]

    def returned(self, totals: Sequence[Tensor]) -> Any:
        """In the form in which the head returned them."""
        return totals[0] if self._single else tuple(totals)

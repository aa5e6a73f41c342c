"""The table of kernel backends, and which of them a pass uses.

Names: ``reference`` (plain torch, any device), ``cpu`` (C++, the best tier of this machine) and its
tiers forced, ``cpu-avx512``, ``cpu-avx2``, ``cpu-baseline``. `use` or the environment variable
``REVRNN_KERNELS`` force one; otherwise CPU tensors get ``cpu`` where it was built, and all others
``reference``.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from types import TracebackType
from typing import Self

import torch

from revrnn.kernels.contract import (
    Backend,
    Gradients,
    Layer,
    Record,
    Steps,
    Weights,
)
from revrnn.kernels.reference import ReferenceBackend

__all__ = [
    "Backend",
    "Gradients",
    "Layer",
    "Record",
    "Steps",
    "Weights",
    "available",
    "choose",
    "get",
    "use",
]

ENVIRONMENT_VARIABLE = "REVRNN_KERNELS"

_forced: str | None = None


@cache
def _table() -> dict[str, Backend]:
    table: dict[str, Backend] = {"reference": ReferenceBackend()}
    try:
        from revrnn.kernels import cpu
    except ImportError:  # the pure-Python package
        return table
    tiers = cpu.tiers()
    table["cpu"] = cpu.CpuBackend(tiers[0])
    for tier in tiers:
        table[f"cpu-{tier}"] = cpu.CpuBackend(tier)
    return table


def available() -> list[str]:
    """The backends of this installation on this machine."""
    return list(_table())


def get(name: str) -> Backend:
    """The backend of that name."""
    table = _table()
    if name not in table:
        raise ValueError(f"kernels must be one of {', '.join(table)} on this machine, got {name!r}")
    return table[name]


class _Use:
    """What `use` returns: nothing to do for a plain call, the way back for a ``with`` block."""

    def __init__(self, before: str | None) -> None:
        self._before = before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _forced
        _forced = self._before


def use(name: str | None) -> _Use:
    """Force a backend for all passes that begin from now on; None chooses by device again.

    As a context manager (``with revrnn.kernels.use("reference"):``) for the block only. A backward
    pass always uses the backend of its forward pass. Takes precedence over ``REVRNN_KERNELS``.
    """
    global _forced
    if name is not None:
        get(name)
    before, _forced = _forced, name
    return _Use(before)


@cache
def _warn_slow() -> None:
    warnings.warn(
        "revrnn was installed without its C++ kernels and runs on the reference kernels, which are "
        "many times slower; install it where a C++ compiler is (see the README) to get them",
        stacklevel=2,
    )


def choose(device: torch.device) -> Backend:
    """The backend for tensors on ``device``."""
    name = _forced or os.environ.get(ENVIRONMENT_VARIABLE)
    if name:
        backend = get(name)
        refusal = backend.refusal(device)
        if refusal is not None:
            raise ValueError(refusal)
        return backend
    if device.type == "cpu":
        if "cpu" in _table():
            return get("cpu")
        _warn_slow()
    return get("reference")

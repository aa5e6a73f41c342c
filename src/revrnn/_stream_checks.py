"""Checks of the arguments of `revrnn.stream`, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from revrnn import _checks


def tensors(name: str, value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One or several tensors as a tuple."""
    if not isinstance(value, (Tensor, tuple, list)):
        raise TypeError(
            f"{name} must be a tensor or a sequence of tensors, got {type(value).__name__}"
        )
    parts = (value,) if isinstance(value, Tensor) else tuple(value)
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} must hold tensors, got {type(part).__name__}")
    return parts


def sequence(name: str, parts: Sequence[Tensor]) -> tuple[int, int]:
    """Time steps and batch rows of tensors (T, N, ...)."""
    if not parts:
        raise ValueError(f"{name} must hold at least one tensor, got none")
    first = parts[0]
    if first.dim() < 2:
        raise ValueError(f"{name} must be (T, N, ...), time first, got shape {tuple(first.shape)}")
    for part in parts[1:]:
        if part.shape[:2] != first.shape[:2]:
            raise ValueError(
                f"{name} must agree in their time steps and batch rows, got shapes "
                f"{tuple(first.shape)} and {tuple(part.shape)}"
            )
    steps, batch = first.shape[:2]
    if steps < 1 or batch < 1:
        raise ValueError(
            f"{name} must have at least one time step and one batch row, got {steps} and {batch}"
        )
    return steps, batch


def same_steps(name: str, parts: Sequence[Tensor], steps: int, of: str) -> None:
    """Tensors (T, ...) with T = ``steps``."""
    for part in parts:
        if part.dim() < 1 or part.shape[0] != steps:
            raise ValueError(
                f"{name} must have {steps} time steps in their first dimension, as {of}, "
                f"got shape {tuple(part.shape)}"
            )


def no_gradients(name: str, parts: Sequence[Tensor]) -> None:
    """They would be dropped without a word."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        raise ValueError(
            f"{name} must not require gradients, got requires_grad=True; detach them, or pass them "
            "as context"
        )


def tensor(name: str, value: object, parameter: Tensor, *, floating: bool = True) -> None:
    """On the device of the layers, and of their dtype where it is floating, or has to be."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if floating or value.is_floating_point():
        _checks._dtype(name, value, parameter.dtype)
    _checks._on(name, value, parameter.device, "the weights")


def checkpoint_every(value: object, tape: str) -> None:
    if value is None:
        return
    if value != "auto":
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(
                f"checkpoint_every must be a positive int, 'auto' or None, got {value!r}"
            )
        _checks.positive("checkpoint_every", value)
    if tape == "paper":
        raise ValueError(
            f"checkpoint_every must be None with tape='paper', whose buffer cannot start midway, "
            f"got {value!r}"
        )


def function(name: str, value: object, *, optional: bool = False) -> None:
    if not callable(value) and not (optional and value is None):
        raise TypeError(f"{name} must be a module or a function, got {type(value).__name__}")

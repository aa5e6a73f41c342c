"""Backward passes that cannot themselves be differentiated, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Like torch's decorator of that name, but never silent.

    Torch's lets a second derivative pass, as zero, when the incoming gradient itself needs none (a
    gradient penalty on ``out.sum()``, say). Here, whenever the pass is recorded for a second
    derivative (``create_graph=True``), taking that derivative is an error.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        error = torch._C._functions.DelayedError(
            b"RevGRU and RevLSTM can be differentiated only once: the gradient of a gradient is "
            b"not available",
            len(found),
        )
        detached = [None if part is None else part.detach().requires_grad_() for part in found]
        return tuple(error(*detached))  # type: ignore[arg-type]

    return wrapper

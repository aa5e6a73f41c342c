"""Functions that torch.compile leaves alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Run it and all it calls as written, inside `torch.compile` too.

    What a compiler makes of the reference kernels (a product and a sum into one fma, say) differs
    in the last bit from what the reverse pass computes. ``torch.compiler.disable`` as a decorator
    would do, but it loads the compiler, which takes seconds: here only who uses it waits for it.
    """

    @functools.cache
    def disabled() -> Callable[P, R]:
        return cast("Callable[P, R]", torch.compiler.disable(function))

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return disabled()(*args, **kwargs)

    return wrapper

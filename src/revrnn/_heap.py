"""What a training loop does for the C library's allocator (`csrc/heap.h` says why)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from revrnn._native import cpu


def _nothing() -> None:
    pass


gather_offcuts: Callable[[], None] = _nothing if cpu is None else cpu.gather_offcuts
"""To be called between chunks, while little is alive: keeps offcuts of aligned blocks, which glibc
before 2.38 holds back, from scattering the heap. Takes a few microseconds; changes no setting of
the allocator."""


@cache
def keep_freed_memory() -> None:
    """Has glibc keep the memory of a step for the next one, as it does by itself in a program that
    has ever freed a tensor of 32 MiB. Once a process. Streaming does not ask for it: its steps are
    long, and memory is what it is for."""
    if cpu is not None:
        cpu.keep_freed_memory()

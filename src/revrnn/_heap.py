"""What a loop over chunks does for the C library's allocator."""

from __future__ import annotations

from collections.abc import Callable


def _compiled() -> Callable[[], None]:
    try:
        from revrnn._cpu import gather_offcuts
    except ImportError:  # the pure-Python package
        return lambda: None
    return gather_offcuts


gather_offcuts = _compiled()
"""To be called between chunks, while little is alive: keeps offcuts of aligned blocks, which glibc
before 2.38 holds back, from scattering the heap (`csrc/heap.h`). Takes a few microseconds; changes
no setting of the allocator."""

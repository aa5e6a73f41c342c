"""The compiled module, if it is installed."""

from __future__ import annotations

from types import ModuleType


def _compiled() -> ModuleType | None:
    try:
        import revrnn._cpu as _cpu
    except ImportError:  # the pure-Python package
        return None
    return _cpu


cpu = _compiled()
"""`revrnn._cpu`, or None."""

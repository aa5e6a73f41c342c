import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# No deadline: the machine may be busy. Derandomized where nobody looks at a random failure twice.
settings.register_profile("revrnn", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("revrnn")


@pytest.fixture(autouse=True)
def _all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' small layers use all threads too, as large ones do."""
    try:
        from revrnn.kernels import cpu
    except ImportError:  # the pure-Python package
        return
    monkeypatch.setattr(cpu, "GRAIN", 0)
    monkeypatch.setattr(cpu, "PACKING_GRAIN", 1)


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory that torch hands out uninitialised holds NaN, or the largest integer.

    That is ``torch.empty``, ``empty_like``, ``new_empty``, ``resize_``: whoever reads what nobody
    wrote is seen, kernel scratch included.
    """
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(1).isnan())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads() -> Iterator[None]:
    """For tests that change the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)

"""torch.compile leaves reversible layers alone, and is not loaded for their sake."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import revrnn
from revrnn import RevGRU, kernels
from revrnn._uncompiled import uncompiled


def test_it_is_the_same_function() -> None:
    @uncompiled
    def double(x: Tensor, *, more: float = 0.0) -> Tensor:
        """Twice."""
        return 2 * x + more

    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert torch.equal(double(torch.ones(2), more=1.0), torch.full((2,), 3.0))


def test_the_compiler_is_not_loaded() -> None:
    script = """
import sys, torch, revrnn
rnn = revrnn.RevGRU(2, 4)
rnn(torch.zeros(3, 1, 2))[0].sum().backward()
revrnn.stream(rnn, torch.zeros(3, 1, 2), head=torch.sum)
print("torch._dynamo" in sys.modules)
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "False"


@pytest.mark.slow  # it takes torch many seconds to load its compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", kernels.available())
def test_what_is_compiled_comes_back(name: str) -> None:
    """Inductor's idea of a step differs from that of the reverse pass in the last bits."""
    torch.manual_seed(0)
    rnn, linear = RevGRU(4, 8, num_layers=2), nn.Linear(8, 1)
    x = torch.randn(9, 3, 4)

    def whole(x: Tensor) -> Tensor:
        out, _ = rnn(x)
        return out

    def streamed(x: Tensor) -> Tensor:
        loss: Tensor
        loss, _ = revrnn.stream(rnn, x, head=lambda out: linear(out).square().sum())
        return loss

    weights = list(rnn.parameters())
    with kernels.use(name):
        for function in (whole, streamed):
            expected = torch.autograd.grad(function(x).sum(), weights)
            found = torch.autograd.grad(torch.compile(function)(x).sum(), weights)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

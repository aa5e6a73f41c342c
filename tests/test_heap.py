"""What a loop over chunks does to the C library's heap."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import compiled

from revrnn._heap import gather_offcuts

MEBIBYTE = 2**20


def test_gather_offcuts_only_returns() -> None:
    for _ in range(100):
        assert gather_offcuts() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of the process")
@pytest.mark.skipif(not compiled, reason="the pure-Python package leaves the heap alone")
def test_a_streamed_step_does_not_scatter_the_heap() -> None:
    """The benchmark's model over 1024 steps. The gradients of its weights take 22 MiB, a chunk's
    logits, their gradient and a fresh gradient of their weights 20. Peaks were 57 to 60 MiB; with
    offcuts left where they are most were 75 to 120."""
    case = {"method": "RevLSTM streamed", "steps": 1024, "threads": 1}
    command = [sys.executable, "-m", "benchmarks._memory_case", json.dumps(case)]
    root = Path(__file__).parents[1]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["peak"] < 70 * MEBIBYTE

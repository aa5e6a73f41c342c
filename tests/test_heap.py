"""What a loop over chunks does to the C library's heap."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import compiled

from revrnn._heap import gather_offcuts, keep_freed_memory

MEBIBYTE = 2**20


STEPS_OF_A_SMALL_LAYER = """
import resource
import torch, revrnn

torch.set_num_threads(1)
rnn = revrnn.RevLSTM(300, 300, max_forget_bits=3)
x = torch.randn(13, 64, 300)

def step():
    rnn(x)[0].sum().backward()
    rnn.zero_grad(set_to_none=True)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(5):
    step()
before = faults()
for _ in range(10):
    step()
print((faults() - before) / 10)
"""


def test_gather_offcuts_only_returns() -> None:
    for _ in range(100):
        assert gather_offcuts() is None


def test_keep_freed_memory_only_returns() -> None:
    assert keep_freed_memory() is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc does with free memory")
@pytest.mark.skipif(not compiled, reason="the pure-Python package leaves the heap alone")
@pytest.mark.parametrize("kept", [True, False])
def test_a_step_finds_the_memory_of_the_last_one(kept: bool) -> None:
    """Pages that a step has the system map: none, or thousands where the user has told glibc to
    give everything back, which is his to say."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    if not kept:
        environment["MALLOC_TRIM_THRESHOLD_"] = "131072"
    command = [sys.executable, "-c", STEPS_OF_A_SMALL_LAYER]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    pages = float(result.stdout)
    assert pages < 200 if kept else pages > 1000


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

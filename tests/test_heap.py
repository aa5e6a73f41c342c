"""What a loop over chunks does to the C library's heap."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import compiled

from revrnn._heap import gather_offcuts

MEBIBYTE = 2**20


STEPS_OF_A_SMALL_LAYER = """
import ctypes, mmap, resource, sys

PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)

def mapped():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * mmap.PAGESIZE / 2**20

before = mapped()
mmap.mmap(-1, 2**24).write(bytes(2**24))
if mapped() - before < 15:
    sys.exit("this system does not count the pages that it maps")

import torch, revrnn

torch.set_num_threads(1)
rnn = revrnn.RevLSTM(300, 300, max_forget_bits=3)
x = torch.randn(13, 64, 300)

def step():
    rnn(x)[0].sum().backward()
    rnn.zero_grad(set_to_none=True)

for _ in range(5):
    step()
before = mapped()
for _ in range(10):
    step()
print((mapped() - before) / 10)
"""


def test_gather_offcuts_only_returns() -> None:
    for _ in range(100):
        assert gather_offcuts() is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc does with free memory")
@pytest.mark.skipif(not compiled, reason="the pure-Python package leaves the heap alone")
@pytest.mark.parametrize("kept", [True, False])
def test_a_step_finds_the_memory_of_the_last_one(kept: bool) -> None:
    """MiB that a step has the system map: next to none, or most of what it needs where the user has
    told glibc to give everything back, which is his to say."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))
    }
    if not kept:
        environment["MALLOC_TRIM_THRESHOLD_"] = "131072"
    command = [sys.executable, "-c", STEPS_OF_A_SMALL_LAYER]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if "does not count" in result.stderr:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr
    mapped = float(result.stdout)
    assert mapped < 1 if kept else mapped > 4


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

"""How much is held between forward and backward, and how much both need while they run."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import backends, compiled
from torch import Tensor

from revrnn import RevGRU, RevLSTM, kernels
from revrnn.diagnostics import live_bytes
from revrnn.kernels import Backend

Rnn = RevGRU | RevLSTM
modules = pytest.mark.parametrize("kind", [RevGRU, RevLSTM], ids=lambda kind: kind.__name__)


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    """Many small operations under a tracker: more threads would only wait for each other."""
    torch.set_num_threads(1)


# -- the tape -------------------------------------------------------------------------------------


@pytest.mark.skipif(not compiled, reason="takes long on the reference kernels")
@modules
@pytest.mark.parametrize(
    ("steps", "batch", "hidden", "bits", "limit"),
    [
        (70, 20, 650, 3, 1.03),
        (13, 64, 300, 3, 1.12),
        (13, 64, 300, None, 1.12),
        (70, 20, 650, None, 1.03),
    ],
)
def test_the_tape_is_close_to_the_entropy_limit(
    kind: type[Rnn], steps: int, batch: int, hidden: int, bits: float | None, limit: float
) -> None:
    """Lane states and byte counts included; on short sequences they are what is above the limit."""
    torch.manual_seed(0)
    rnn = kind(hidden, hidden, max_forget_bits=bits)
    rnn(torch.randn(steps, batch, hidden), keep=0)
    report = rnn.tape_report()
    assert 1 <= report.overhead <= limit
    assert report.savings > 28


@modules
def test_the_papers_buffer_has_the_order_of_the_papers_savings(kind: type[Rnn]) -> None:
    """F = 2 and T = 70: about 13x below 32 bits (the paper's tables 1 and 6).

    When any integer of the batch would overflow, a plane is begun for all units of all rows. So
    what counts is the unit that forgets fastest. It cannot forget more than F bits a time: then a
    plane lasts for 53 / 2 multiplications, and 70 steps of two groups take 6 of them, which is
    11.7x. Training gives units time scales of their own, some of them as short as F allows, and
    these rule. Here that is done by forget biases that differ from unit to unit. Initial weights
    have all units forget alike, about 0.7 bits, and so look better than anything trained.

    An entropy-coded tape does not care for the fastest unit.
    """

    def savings(tape: str, spread: float) -> tuple[float, float]:
        torch.manual_seed(0)
        rnn = kind(32, 650, max_forget_bits=2, tape=tape)  # type: ignore[arg-type]
        bias = rnn.get_parameter("bias_l0").detach().view(2, -1, 325)
        forget_gates = [0] if kind is RevGRU else [0, 3]
        bias[:, forget_gates] += spread * torch.randn(2, len(forget_gates), 325)
        rnn(torch.randn(70, 20, 32), keep=0)
        report = rnn.tape_report()
        return report.savings, report.overhead

    initial, _ = savings("paper", 0.0)
    assert initial > 20
    trained, overhead = savings("paper", 2.5)
    assert 11.5 < trained < 16
    assert overhead > 2  # "about twice the amount theoretically possible", or more
    ours, overhead = savings("entropy", 2.5)
    assert ours > 2.5 * trained
    assert overhead < 1.03


# -- while it runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    batch: int = 4
    hidden: int = 64
    chunk: int = 8

    def make(self, kind: type[Rnn], **options: Any) -> Rnn:
        torch.manual_seed(0)
        return kind(8, self.hidden, max_forget_bits=2, chunk_size=self.chunk, **options)

    def input(self, steps: int) -> Tensor:
        return torch.randn(steps, self.batch, 8)


SMALL, LARGE = Sizes(), Sizes(batch=16, hidden=128)

# What a chunk's steps are, as int64: a number or two a step, where states are a thousand bytes.
BYTES_A_STEP = 24


@dataclass(frozen=True)
class Use:
    """Bytes of one training step, beside its input."""

    forward: int  # peak
    kept: int  # alive between forward and backward
    backward: int  # peak, less what was alive before
    tape: int


def use_of(rnn: Rnn, x: Tensor, *, keep: int | None) -> Use:
    with live_bytes() as memory:
        out, finals = rnn(x, keep=keep)
        forward, kept = memory.peak, memory.now
        h_n = finals[0] if isinstance(finals, tuple) else finals
        loss = h_n.sum() if out is None else out.sum()
        before = memory.now
        memory.reset_peak()
        loss.backward()
        backward = memory.peak - before
    return Use(forward, kept, backward, rnn.tape_report().held_bits // 8)


@backends
@modules
@pytest.mark.parametrize("keep", [None, 0, 7])
def test_backward_needs_a_few_chunks_whatever_the_length(
    backend: Backend, kind: type[Rnn], keep: int | None
) -> None:
    uses = []
    for steps in (16, 48):
        rnn = SMALL.make(kind)
        with kernels.use(backend.name):
            uses.append(use_of(rnn, SMALL.input(steps), keep=keep))
    short, long = uses
    assert long.backward - short.backward < 32 * BYTES_A_STEP

    # The record of a chunk: gates, states before, h of group 1 after, and what else is needed.
    gates, states = (3, 1) if kind is RevGRU else (5, 2)
    units = (gates + states) * SMALL.hidden + SMALL.hidden // 2 + SMALL.hidden
    record = 4 * SMALL.chunk * SMALL.batch * units
    # Weights packed for both directions, their gradients, and scratch that does not depend on T.
    weights = 4 * sum(parameter.numel() for parameter in rnn.parameters())
    scratch = 1 << 20 if backend in compiled else 0
    assert short.backward < 4 * weights + 4 * record + scratch


@pytest.mark.skipif(not compiled, reason="takes long on the reference kernels")
@modules
def test_forward_holds_nothing_but_the_tape(kind: type[Rnn]) -> None:
    """Without outputs, what grows with T is the tape: with an eighth of it as room for more, and
    while such a region is made compact, with a copy and a mask of that."""
    short, long = (use_of(LARGE.make(kind), LARGE.input(steps), keep=0) for steps in (500, 4000))
    tape, steps = long.tape - short.tape, 3500 * BYTES_A_STEP
    assert tape <= long.kept - short.kept < tape + steps
    assert long.forward - short.forward < 1.5 * tape + steps
    states = 4 * 3500 * LARGE.batch * LARGE.hidden
    assert long.forward - short.forward < states / 10


@modules
def test_stored_states_are_seen_by_the_same_measure(kind: type[Rnn]) -> None:
    short, long = (
        use_of(SMALL.make(kind, reversible=False), SMALL.input(steps), keep=0) for steps in (32, 96)
    )
    assert long.kept - short.kept > 4 * 64 * SMALL.batch * SMALL.hidden


@modules
def test_without_gradients_nothing_is_held(kind: type[Rnn]) -> None:
    rnn = SMALL.make(kind)
    peaks = []
    for steps in (32, 96):
        x = SMALL.input(steps)
        with torch.no_grad(), live_bytes() as memory:
            rnn(x, keep=0)
        peaks.append(memory.peak)
    assert peaks[1] - peaks[0] < 64 * BYTES_A_STEP


SCRIPT = """
import json, resource, sys
import torch
import revrnn

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

def step(x):
    _, finals = rnn(x, keep=0)
    (finals[0] if isinstance(finals, tuple) else finals).sum().backward()

torch.set_num_threads(1)
kind, how, steps = sys.argv[1:]
rnn = getattr(revrnn, kind)(4, 128, reversible=how == "tape")
x = torch.randn(int(steps), 32, 4)
step(x[:50])
# Importing torch took more than is resident now: fill up to that peak, to see what goes beyond.
ballast = torch.ones((peak() - resident()) // 4)
before = peak()
step(x)
print(json.dumps({"peak": peak() - before, "tape": rnn.tape_report().held_bits // 8}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of the process")
@pytest.mark.skipif(not compiled, reason="takes long on the reference kernels")
@modules
def test_the_peak_of_the_process_does_not_hold_the_states(kind: type[Rnn]) -> None:
    """Also beyond what torch tells of: the peak of a process during one training step."""

    def measure(how: str, steps: int) -> dict[str, int]:
        command = [sys.executable, "-W", "error", "-c", SCRIPT, kind.__name__, how, str(steps)]
        output = subprocess.run(command, capture_output=True, check=True, text=True, timeout=120)
        return json.loads(output.stdout)  # type: ignore[no-any-return]

    # T N H floats are 262 MB, the tape is 8 (a RevLSTM's 16). Beside it there are room for more
    # tape, a few chunks, and what the allocator of the C library keeps.
    taped = measure("tape", 16_000)
    assert taped["peak"] < 2 * taped["tape"] + (40 << 20)
    # The same measure sees states where there are some.
    assert measure("states", 1000)["peak"] > 4 * 1000 * 32 * 128

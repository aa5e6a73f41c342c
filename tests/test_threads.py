"""Threads and processes: the GIL, several modules at once, forks, and the end of the process.

What may hang or crash runs in a process of its own, with a time limit.
"""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from helpers import make_problem, run_forward
from torch import Tensor

import revrnn
from revrnn import kernels
from revrnn.cells import LSTM

pytestmark = pytest.mark.skipif(
    "cpu" not in kernels.available(), reason="the C++ kernels were not built"
)


@pytest.fixture(params=["borrowed", "own"])
def source(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels take their threads: torch's OpenMP runtime, or a pool of their own."""
    import revrnn._cpu as _cpu
    from revrnn.kernels._openmp import gomp_parallel

    if request.param == "borrowed" and not gomp_parallel():
        pytest.skip("this torch brings no OpenMP runtime to borrow from")
    _cpu.borrow_openmp(gomp_parallel() if request.param == "borrowed" else 0)
    yield request.param
    _cpu.borrow_openmp(gomp_parallel())


def step(rnn: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Output and all gradients of one training step, without touching what threads share."""
    inputs = [x.detach().clone().requires_grad_(), *rnn.parameters()]
    out, _ = rnn(inputs[0])
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("threads", "source")
def test_other_python_threads_run_during_a_kernel() -> None:
    torch.set_num_threads(1)  # a core is left for the other thread
    problem = make_problem(LSTM, [8] * 3000, inputs=8, hidden=256)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    other = threading.Thread(target=tick)
    other.start()
    begin = time.perf_counter()
    run_forward(kernels.get("cpu"), problem)  # one chunk: one call of the kernel
    end = time.perf_counter()
    done.set()
    other.join()
    # With the GIL held throughout there would be a gap as long as the kernel.
    inside = [begin, *(tick for tick in ticks if begin < tick < end), end]
    longest = max(b - a for a, b in itertools.pairwise(inside))
    assert longest < 0.8 * (end - begin)
    assert len(inside) > 6


@pytest.mark.usefixtures("threads", "source")
@pytest.mark.parametrize("count", [1, 2])
def test_two_modules_train_at_once(count: int) -> None:
    torch.set_num_threads(count)
    torch.manual_seed(0)
    jobs = [
        (revrnn.RevGRU(12, 32, num_layers=2), torch.randn(25, 6, 12)),
        (revrnn.RevLSTM(12, 32, bidirectional=True), torch.randn(20, 7, 12)),
    ]
    alone = [step(rnn, x) for rnn, x in jobs]
    wrong: list[str] = []
    start = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        torch.set_num_threads(count)  # OpenMP's number belongs to the thread
        start.wait()
        for _ in range(20):
            if not same(step(*jobs[index]), alone[index]):
                wrong.append(type(jobs[index][0]).__name__)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.usefixtures("source")
def test_one_module_serves_two_threads() -> None:
    torch.manual_seed(0)
    rnn = revrnn.RevLSTM(6, 16)
    inputs = [torch.randn(15, 3, 6), torch.randn(9, 5, 6)]
    alone = [step(rnn, x) for x in inputs]
    right: list[bool] = []

    def work(index: int) -> None:
        right.extend(same(step(rnn, inputs[index]), alone[index]) for _ in range(20))

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(right) == 40
    assert all(right)


@pytest.mark.usefixtures("threads", "source")
@pytest.mark.parametrize("name", ["RevGRU", "RevLSTM"])
def test_more_threads_than_rows(name: str) -> None:
    torch.manual_seed(0)
    rnn = getattr(revrnn, name)(5, 20, num_layers=2)
    for batch in (1, 3):
        x = torch.randn(11, batch, 5)
        torch.set_num_threads(1)
        with torch.no_grad():
            expected, _ = rnn(x)
        torch.set_num_threads(9)
        found = step(rnn, x)
        assert torch.equal(found[0], expected)
        assert same(found, step(rnn, x))


# -- processes ------------------------------------------------------------------------------------

PRELUDE = """
import os, sys, threading
import torch
import revrnn
import revrnn._cpu

torch.set_num_threads(2)
if sys.argv[1] == "own":
    revrnn._cpu.borrow_openmp(0)

# Small enough for torch itself to stay on one thread: in a fork of a process that used its OpenMP
# runtime, torch's own parallel loops hang, with and without revrnn.
torch.manual_seed(0)
rnn = revrnn.RevLSTM(8, 32, num_layers=2)
x = torch.randn(12, 6, 8)

def step(rnn=rnn):
    out, _ = rnn(x)
    return [out.detach(), *torch.autograd.grad(out.sum(), list(rnn.parameters()))]

def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
"""


def run(script: str, source: str) -> str:
    """What the script prints, run after the prelude. Fails if it hangs or does not end well."""
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, source],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


forks = pytest.mark.skipif(not hasattr(sys.modules["os"], "fork"), reason="there is no fork")


@forks
def test_a_fork_after_use_computes_the_same(source: str) -> None:
    script = """
expected = step()
for _ in range(3):  # generations: each is forked from one that has used its own threads
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))
    if not same(step(), expected):
        os._exit(1)
print("right", flush=True)
os._exit(0)
"""
    assert run(script, source) == "right"


@forks
def test_a_fork_before_use_runs_modules() -> None:
    """The parent has used torch's threads, which the child does not have."""
    script = """
import os, torch, revrnn
torch.set_num_threads(2)
torch.randn(2000, 2000).exp().sum()
child = os.fork()
if child == 0:
    with torch.no_grad():
        out, _ = revrnn.RevGRU(128, 256)(torch.zeros(8, 20, 128))
    os._exit(0 if out.shape == (8, 20, 256) else 1)
_, status = os.waitpid(child, 0)
print(status)
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "0"


@forks
def test_a_fork_during_use_computes_the_same(source: str) -> None:
    """Another thread of the parent is inside the kernels at the moment of the fork."""
    script = """
expected = step()
done = threading.Event()
other = revrnn.RevGRU(8, 32)

def busy():
    while not done.is_set():
        step(other)

worker = threading.Thread(target=busy)
worker.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if same(step(), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
assert same(step(), expected)
done.set()
worker.join()
print("right")
"""
    assert run(script, source) == "right"


@forks
def test_dataloader_workers_run_modules(source: str) -> None:
    script = """
from torch.utils.data import DataLoader, Dataset

class Steps(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torch.cat([part.flatten() for part in step()])

expected = torch.cat([part.flatten() for part in step()])
for _ in range(2):
    loader = DataLoader(Steps(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for rows in loader:
        assert all(torch.equal(row, expected) for row in rows)
assert torch.equal(torch.cat([part.flatten() for part in step()]), expected)
print("right")
"""
    assert run(script, source) == "right"


def test_the_process_ends_while_the_pool_exists(source: str) -> None:
    assert run("step(); print('done')", source) == "done"

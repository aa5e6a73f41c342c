"""Streaming inside DistributedDataParallel: two processes against one with the whole batch."""

import datetime
import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from revrnn import RevGRU, RevLSTM, stream

if distributed.is_available():
    # Before the group exists: its functions would keep it as a default argument, and with it the
    # group's threads, which now and then abort the process as it ends.
    import torch.distributed.nn.functional

STEPS, BATCH, WORDS, WIDTH = 17, 4, 11, 6

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="no gloo"
)


class Model(nn.Module):
    """Tied embeddings, two layers of different kinds."""

    def __init__(self, gradients: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gradients = gradients
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.ModuleList([RevGRU(WIDTH, 8), RevLSTM(8, WIDTH)])
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def head(self, h: Tensor, y: Tensor) -> Tensor:
        logits = h @ self.embedding.weight.t() + self.bias
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss, _ = stream(
            self.rnn, x, stem=self.embedding, head=self.head, targets=y, chunk_size=5,
            checkpoint_every=10, gradients=self.gradients,
        )  # fmt: skip
        return loss / x.numel()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(WORDS, (2, STEPS, BATCH), generator=generator).unbind(0))


def train(model: nn.Module, rows: slice) -> None:
    x, y = data()
    model(x[:, rows], y[:, rows]).backward()


def thread_names() -> list[str]:
    """Of this process, as far as the system tells them."""
    return [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=100),
    )
    for gradients in ("eager", "lazy"):
        model = DistributedDataParallel(Model(gradients))
        train(model, slice(2 * rank, 2 * rank + 2))
        result = {name: p.grad for name, p in model.module.named_parameters()}
        torch.save(result, f"{folder}/{gradients}-{rank}.pt")
        del model
    gc.collect()
    distributed.destroy_process_group()
    assert not [name for name in thread_names() if "gloo" in name]


def test_two_processes_equal_one(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    workers = [context.Process(target=worker, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(timeout=150)
    codes = [process.exitcode for process in workers]
    for process in workers:
        if process.is_alive():
            process.kill()
    assert codes == [0, 0]
    for gradients in ("eager", "lazy"):
        model = Model(gradients)
        train(model, slice(None))
        for rank in range(2):
            found = torch.load(tmp_path / f"{gradients}-{rank}.pt")
            assert len(found) == 8
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)

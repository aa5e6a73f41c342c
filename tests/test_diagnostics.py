import gc

import pytest
import torch
from torch import Tensor

from revrnn import RevGRU, RevLSTM, kernels
from revrnn.diagnostics import LayerReport, TapeReport, live_bytes

FLOATS = 1000
BYTES = 4 * FLOATS


# -- reports --------------------------------------------------------------------------------------


def layer(name: str, scale: int = 1) -> LayerReport:
    return LayerReport(
        name=name,
        tape_bits=1000 * scale,
        lane_bits=200 * scale,
        stored_bits=320 * scale,
        ideal_bits=1216.0 * scale,
        naive_bits=15200 * scale,
        unit_steps=900 * scale,
    )


def test_a_layer_says_what_is_held_beside_what_would_have_to_be() -> None:
    report = layer("layer 0")
    assert report.held_bits == 1520
    assert report.overhead == 1.25
    assert report.savings == 10


def test_a_report_adds_its_layers_up() -> None:
    report = TapeReport([layer("layer 0"), layer("layer 1", 3)])
    assert report.held_bits == 4 * 1520
    assert report.ideal_bits == 4 * 1216
    assert report.naive_bits == 4 * 15200
    assert report.unit_steps == 4 * 900
    assert report.overhead == 1.25
    assert report.savings == 10
    assert report.total.name == "total"
    assert report.total.lane_bits == 800


def test_nothing_held_is_no_division_by_zero() -> None:
    empty = TapeReport([])
    assert empty.held_bits == empty.ideal_bits == empty.naive_bits == 0
    assert empty.overhead != empty.overhead  # not a number
    assert empty.savings == float("inf")


def test_reports_print_as_a_table() -> None:
    lines = str(TapeReport([layer("layer 0"), layer("layer 0 (reverse)", 1000)])).splitlines()
    assert lines[0].split() == [
        *("layer", "held", "bits", "tape", "lanes", "stored", "ideal", "32-bit"),
        *("held/ideal", "savings"),
    ]
    assert lines[1].split()[2:] == [
        "1,520",
        "1,000",
        "200",
        "320",
        "1,216",
        "15,200",
        "1.250",
        "10.0x",
    ]
    assert [line[:20].rstrip() for line in lines[1:]] == ["layer 0", "layer 0 (reverse)", "total"]
    assert len({len(line) for line in lines}) == 1
    assert len(str(TapeReport([layer("layer 0")])).splitlines()) == 2  # a total would only repeat


@pytest.mark.parametrize("kind", [RevGRU, RevLSTM])
@pytest.mark.parametrize("keep", [None, 0, 3])
def test_held_bits_are_those_that_autograd_holds(kind: type[RevGRU | RevLSTM], keep: int) -> None:
    """Integers are saved for the tape and for stored units only."""
    torch.manual_seed(0)
    rnn = kind(5, 40, 2, max_forget_bits=2, chunk_size=8)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype in (torch.uint8, torch.int32):
            saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rnn(torch.randn(50, 3, 5), keep=keep)
    report = rnn.tape_report()
    assert sum(8 * tensor.nbytes for tensor in saved.values()) == report.held_bits
    states = 1 if kind is RevGRU else 2
    assert report.naive_bits == 2 * 32 * 50 * 3 * 40 * states
    assert report.layers[1].stored_bits == 32 * 50 * 3 * (keep or 0)
    assert report.layers[0].stored_bits == 0
    assert report.unit_steps == 50 * 3 * (2 * 40 * states - (keep or 0))


def test_ideal_bits_of_known_gates() -> None:
    """Zero weights make every gate 1/2, and F = 1 makes that 3/4."""
    rnn = RevGRU(3, 20, max_forget_bits=1)
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.zero_()
    for name in kernels.available():
        with kernels.use(name):
            rnn(torch.randn(7, 2, 3))
        expected = -torch.tensor(0.75).log2().item()
        report = rnn.tape_report()
        assert report.ideal_bits / report.unit_steps == pytest.approx(expected, rel=1e-6)


# -- live bytes -----------------------------------------------------------------------------------


def test_a_storage_is_counted_once_and_until_it_is_freed() -> None:
    with live_bytes() as memory:
        x = torch.ones(FLOATS)
        assert memory.now == BYTES
        view, same, part = x.view(10, -1), x.detach(), x[5:]
        x.add_(1)
        assert memory.now == BYTES
        del x, view, same
        assert memory.now == BYTES  # part still holds it
        del part
        assert memory.now == 0
        assert memory.peak == BYTES


def test_the_peak_is_of_what_was_alive_at_once() -> None:
    with live_bytes() as memory:
        for _ in range(5):
            x = torch.ones(FLOATS)
            x = x + 1
            del x
        assert memory.peak == 2 * BYTES
        memory.reset_peak()
        assert memory.peak == memory.now == 0
        y = torch.ones(FLOATS)
        memory.reset_peak()
        assert memory.peak == BYTES
        del y


def test_what_is_freed_after_the_block_is_not_alive() -> None:
    with live_bytes() as memory:
        x = torch.ones(FLOATS)
    y = torch.ones(FLOATS)
    assert memory.now == BYTES
    del x
    assert memory.now == 0
    assert memory.peak == BYTES
    del y


def test_tensors_from_outside_are_not_counted() -> None:
    outside = torch.ones(FLOATS)
    with live_bytes() as memory:
        views = [outside.view(10, -1), outside.detach(), outside[3:]]
        outside.mul_(2)
        torch.add(outside, 1, out=outside)
        assert memory.now == memory.peak == 0
        del views, outside
    assert memory.now == 0


@pytest.mark.parametrize("inside", [True, False])
def test_growing_and_shrinking_storages(inside: bool) -> None:
    before = torch.ones(FLOATS)
    with live_bytes() as memory:
        x = torch.ones(FLOATS) if inside else before
        del before
        start = memory.now
        assert start == (BYTES if inside else 0)
        x.resize_(3 * FLOATS)
        assert memory.now == start + 2 * BYTES
        x.resize_(5 * FLOATS)
        assert memory.now == memory.peak == start + 4 * BYTES
        x.untyped_storage().resize_(0)
        x.detach()  # storages are looked at when an operation meets them
        assert memory.now == 0
        del x
        assert memory.now == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0] * FLOATS),
        lambda: torch.empty(FLOATS),
        lambda: torch.ones(1).new_empty(FLOATS),
        lambda: torch.empty_like(
            torch.empty(1).expand(FLOATS), memory_format=torch.contiguous_format
        ),
        lambda: torch.cat([torch.ones(FLOATS // 2)] * 2),
        lambda: torch.arange(FLOATS, dtype=torch.float32),
        lambda: torch.ones(FLOATS).to_sparse().to_dense(),
        lambda: torch.nn.Parameter(torch.ones(FLOATS)),
    ],
)
def test_whatever_makes_a_tensor_is_seen(make) -> None:  # type: ignore[no-untyped-def]
    with live_bytes() as memory:
        x = make()
        assert memory.now == BYTES
    del x
    assert memory.now == 0


def test_tensors_without_memory_are_not_counted() -> None:
    with live_bytes() as memory:
        meta = torch.empty(FLOATS, device="meta")
        sparse = torch.eye(2).to_sparse()
        assert memory.peak < 100
    del meta, sparse


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return 2 * x

    @staticmethod
    def backward(ctx, d_y):  # type: ignore[no-untyped-def]
        scratch = torch.empty(50 * FLOATS)
        scratch[:FLOATS] = d_y
        return 2 * scratch[:FLOATS]


def test_what_backward_makes_is_seen() -> None:
    x = torch.ones(FLOATS, requires_grad=True)
    with live_bytes() as memory:
        loss = Doubling.apply(x).sum()
        assert memory.peak < 3 * BYTES
        loss.backward()
        assert memory.peak >= 51 * BYTES
        del loss
    assert memory.now == BYTES  # the gradient
    x.grad = None
    assert memory.now == 0


@pytest.mark.parametrize("kind", [RevGRU, RevLSTM])
def test_kernel_scratch_is_seen(kind: type[RevGRU | RevLSTM]) -> None:
    """Of all that the C++ kernels work on, nothing is allocated behind torch's back."""
    if "cpu" not in kernels.available():
        pytest.skip("needs the C++ kernels")
    rnn = kind(8, 64)
    x = torch.randn(20, 4, 8)
    weights = sum(4 * parameter.numel() for parameter in rnn.parameters())
    with kernels.use("cpu"), live_bytes() as memory:
        h_n = rnn(x, keep=0)[1]
        # Packed weights, and gates of the only chunk.
        gates = 4 * 20 * 4 * (3 if kind is RevGRU else 5) * 64
        assert memory.peak >= weights + gates
        memory.reset_peak()
        (h_n if isinstance(h_n, Tensor) else h_n[0]).sum().backward()
        # Packed weights in both directions, gradients, gates.
        assert memory.peak >= 3 * weights + gates
        del h_n
    rnn.zero_grad()
    gc.collect()
    assert memory.now == 0

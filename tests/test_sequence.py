import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from revrnn._sequence import InputSequence, output_dtype
from revrnn.cells import GRU, LSTM

T, N, X = 5, 3, 2


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def sequence(input: Tensor | PackedSequence, *, batch_first: bool = False) -> InputSequence:
    return InputSequence(input, torch.zeros(1), X, batch_first)


def forms() -> list[tuple[Tensor | PackedSequence, bool]]:
    x = data(T, N, X)
    return [
        (x, False),
        (x.transpose(0, 1), False),  # not contiguous
        (x, True),
        (x[:, 0], False),
        (x[:, 0], True),
        (pack_padded_sequence(x, torch.tensor([5, 3, 3])), False),
        (pack_padded_sequence(x, torch.tensor([2, 5, 1]), enforce_sorted=False), False),
        (pack_sequence([x[:4, 0]]), False),
    ]


@pytest.mark.parametrize("index", range(len(forms())))
def test_the_output_has_the_form_of_the_input(index: int) -> None:
    input, batch_first = forms()[index]
    rows = sequence(input, batch_first=batch_first)
    assert rows.data.is_contiguous()
    assert len(rows.data) == int(rows.batch_sizes.sum())
    back = rows.output(rows.data, torch.float32)
    if isinstance(input, PackedSequence):
        assert isinstance(back, PackedSequence)
        for part, expected in zip(back, input, strict=True):
            assert (part is None and expected is None) or torch.equal(part, expected)
    else:
        assert isinstance(back, Tensor)
        assert torch.equal(back, input)
    assert rows.output(None, torch.float32) is None


@pytest.mark.parametrize("index", range(len(forms())))
@pytest.mark.parametrize("count", [1, 2])
def test_states_go_in_and_come_out_in_the_same_order(index: int, count: int) -> None:
    input, batch_first = forms()[index]
    rows = sequence(input, batch_first=batch_first)
    unbatched = isinstance(input, Tensor) and input.dim() == 2
    shape = (4, 6) if unbatched else (4, rows.batch, 6)
    given = [data(*shape) + which for which in range(count)]
    slots = rows.initial_states(given, 4, 6)
    for slot in slots:
        assert slot is not None
        assert slot.shape == (count, rows.batch, 6)
        assert slot.is_contiguous()
    finals = rows.final_states([slot for slot in slots if slot is not None], torch.float32)
    assert len(finals) == count
    for final, expected in zip(finals, given, strict=True):
        assert torch.equal(final, expected)
    assert rows.initial_states(None, 4, 6) == [None] * 4


def test_packed_rows_know_their_batch_row() -> None:
    x = torch.arange(3.0).expand(T, N).unsqueeze(2).expand(-1, -1, X)
    packed = pack_padded_sequence(x, torch.tensor([2, 5, 1]), enforce_sorted=False)
    rows = sequence(packed)
    assert packed.sorted_indices is not None
    assert torch.equal(packed.sorted_indices[rows.batch_rows()], rows.data[:, 0].long())
    dense = sequence(x.contiguous())
    assert torch.equal(dense.batch_rows(), dense.data[:, 0].long())


def test_one_dtype_of_computation() -> None:
    parameter = torch.zeros(1, dtype=torch.float64)
    rows = InputSequence(data(T, N, X).double(), parameter, X, False)
    assert rows.data.dtype == torch.float32
    (state, *_) = rows.initial_states([data(1, N, 4).double()], 1, 4)
    assert state is not None
    assert state.dtype == torch.float32


@pytest.mark.parametrize("cell", [GRU, LSTM])
def test_output_dtype_without_and_with_autocast(cell: type) -> None:
    half, single, double = (data(1).to(d) for d in (torch.bfloat16, torch.float32, torch.float64))
    for part in (half, single, double):
        assert output_dtype(part, cell) == part.dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert output_dtype(half, cell) == torch.bfloat16
        assert output_dtype(double, cell) == torch.float64
        assert output_dtype(half, cell, single, single_step=True) == torch.float32
        assert output_dtype(single, cell, half, single_step=True) == torch.bfloat16

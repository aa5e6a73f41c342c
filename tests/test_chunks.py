import torch
from helpers import assert_equal, ragged
from hypothesis import given
from hypothesis import strategies as st

from revrnn.chunks import ROWS_PER_CHUNK, cut, default_chunk_size, dense

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6)
sizes = st.integers(1, 15)


@given(lengths, sizes, st.booleans())
def test_chunks_take_every_step_once_and_in_order(
    lengths: list[int], size: int, backwards: bool
) -> None:
    batch_sizes = torch.tensor(ragged(lengths))
    starts = (batch_sizes.cumsum(0) - batch_sizes).tolist()
    packed = torch.arange(int(batch_sizes.sum()))
    chunks = list(cut(batch_sizes, size, backwards=backwards))

    steps = []
    for chunk in chunks:
        assert 1 <= len(chunk.steps.active) <= size
        assert chunk.steps.rows == int(chunk.steps.active.sum())
        assert_equal(chunk.of(packed), torch.arange(chunk.first_row, chunk.last_row))
        for index, (offset, active) in enumerate(
            zip(chunk.steps.offsets.tolist(), chunk.steps.active.tolist(), strict=True)
        ):
            steps.append((chunk.steps.time(index), chunk.first_row + offset, active))
    expected = list(zip(range(len(starts)), starts, batch_sizes.tolist(), strict=True))
    assert steps == (expected[::-1] if backwards else expected)
    # All are full, but for the last of the sequence.
    short = chunks[0] if backwards else chunks[-1]
    assert all(len(chunk.steps.active) == size for chunk in chunks if chunk is not short)


@given(lengths, sizes, st.booleans())
def test_kernels_get_contiguous_int64(lengths: list[int], size: int, backwards: bool) -> None:
    for chunk in cut(torch.tensor(ragged(lengths)), size, backwards=backwards):
        for tensor in (chunk.steps.offsets, chunk.steps.active):
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()


@given(lengths, sizes, st.booleans())
def test_batch_rows(lengths: list[int], size: int, backwards: bool) -> None:
    batch_sizes = ragged(lengths)
    rows = torch.cat([torch.arange(active) for active in batch_sizes])
    for chunk in cut(torch.tensor(batch_sizes), size, backwards=backwards):
        assert_equal(chunk.batch_rows(), chunk.of(rows))


@given(st.integers(1, 30), st.integers(1, 6), sizes)
def test_dense_chunks_are_those_of_a_full_batch(steps: int, batch: int, size: int) -> None:
    first = 0
    for expected in cut(torch.full((steps,), batch), size, backwards=False):
        last = first + len(expected.steps.active)
        chunk = dense(first, last, batch)
        assert (chunk.first_row, chunk.last_row) == (expected.first_row, expected.last_row)
        assert_equal(chunk.steps.offsets, expected.steps.offsets)
        assert_equal(chunk.steps.active, expected.steps.active)
        assert chunk.steps.rows == expected.steps.rows
        assert chunk.steps.time(0) == first
        first = last


@given(st.integers(1, 5000), st.integers(1, 2000))
def test_default_chunks_are_of_about_the_same_size(steps: int, batch: int) -> None:
    size = default_chunk_size(steps, batch)
    assert 1 <= size <= steps
    assert size == 1 or size * batch <= 1.5 * ROWS_PER_CHUNK
    # As few chunks as that allows, and none longer than needed for so many.
    most = max(1, round(ROWS_PER_CHUNK / batch))
    count = -(-steps // size)
    assert count == -(-steps // most)
    assert size == 1 or -(-steps // (size - 1)) > count

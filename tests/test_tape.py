import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from helpers import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from revrnn import exact
from revrnn.errors import ReversalError
from revrnn.exact import LANE_LOW
from revrnn.fixed import RADIX_Z, STATE_LIMIT, Z_ONE
from revrnn.tape import LANES, EntropyTape, PaperTape, SealedPaperTape, SealedTape

DEVICE = "cpu"


@dataclass
class Call:
    """One multiplication of (n, U) units, and what came of it."""

    h: Tensor
    z: Tensor
    product: Tensor | None = None


def make_calls(shapes: Sequence[tuple[int, int]], seed: int, *, smallest: int = 1) -> list[Call]:
    """Random states and forget values of these (n, U), some of each extreme."""
    generator = torch.Generator().manual_seed(seed)
    calls = []
    for shape in shapes:
        h = torch.randint(
            1 - STATE_LIMIT, STATE_LIMIT, shape, generator=generator, dtype=torch.int32
        )
        z = torch.randint(smallest, Z_ONE, shape, generator=generator, dtype=torch.int32)
        z[torch.rand(shape, generator=generator) < 0.1] = smallest
        calls.append(Call(h, z))
    return calls


def write(target: EntropyTape | PaperTape, calls: list[Call], *, chunk: int = 1) -> None:
    """Multiply everything, reserving room ``chunk`` calls at a time."""
    for i, call in enumerate(calls):
        if i % chunk == 0:
            units = max(c.h.shape[1] for c in calls[i : i + chunk])
            target.reserve(chunk, units)
        call.product = target.multiply(call.h, call.z)


def read(target: EntropyTape | PaperTape, calls: list[Call], *, chunk: int = 1) -> None:
    """Undo everything and check that it is undone."""
    for i, call in reversed(list(enumerate(calls))):
        if i % chunk == chunk - 1 or i == len(calls) - 1:
            target.recall()
        assert call.product is not None
        assert_equal(target.divide(call.product, call.z), call.h)
    target.check_rewound()


def entropy(rows: int, *, writing: bool = True) -> EntropyTape:
    return EntropyTape(rows, writing=writing, device=DEVICE)


ROWS = 3
shape_lists = st.lists(st.tuples(st.integers(1, ROWS), st.integers(1, 40)), max_size=12)


# -- EntropyTape ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(shape_lists, st.integers(0, 1 << 30), st.integers(1, 4))
def test_any_calls_come_back(shapes: list[tuple[int, int]], seed: int, chunk: int) -> None:
    calls = make_calls(shapes, seed)
    forward = entropy(ROWS)
    write(forward, calls, chunk=chunk)
    sealed = forward.seal()
    kept = [tensor.clone() for tensor in sealed.tensors()]
    read(EntropyTape.open(SealedTape.from_tensors(sealed.tensors())), calls, chunk=chunk)
    for now, before in zip(sealed.tensors(), kept, strict=True):
        assert_equal(now, before)


def model_of_one_row(calls: list[Call], row: int) -> tuple[list[int], bytes, list[list[int]]]:
    """The tape format once more, in plain Python: lanes, stack, and products call by call."""
    lanes = [LANE_LOW] * LANES
    stack = bytearray()
    products = []
    for call in calls:
        if row >= len(call.h):
            continue
        units = list(zip(call.h[row].tolist(), call.z[row].tolist(), strict=True))
        product = []
        for start in range(0, len(units), LANES):
            first, second = [], []
            for lane, (h, z) in enumerate(units[start : start + LANES]):
                x = lanes[lane]
                emitted = [first, second]
                while (x << RADIX_Z) + h % Z_ONE >= z * 256 * LANE_LOW:
                    emitted.pop(0).append(x % 256)
                    x //= 256
                lanes[lane], value = exact.oracle_multiply(x, h, z)
                product.append(value)
            stack += bytes(first + second)
        products.append(product)
    return lanes, bytes(stack), products


def test_the_format_byte_for_byte() -> None:
    # Units: more than two blocks, a part of one, exactly one.
    calls = make_calls([(3, 37), (3, 5), (2, 16), (1, 33), (1, 1), (3, 48)], seed=1)
    forward = entropy(3)
    write(forward, calls, chunk=len(calls))
    sealed = forward.seal()
    ((data, fill),) = sealed.segments
    rows = data.split(fill.tolist())
    for row in range(3):
        lanes, stack, products = model_of_one_row(calls, row)
        assert forward.lanes[row].tolist() == lanes
        assert bytes(rows[row].tolist()) == stack
        mine = [call.product[row].tolist() for call in calls if row < len(call.h)]
        assert mine == products
    assert fill.dtype == torch.int32
    assert data.dtype == torch.uint8


def test_a_row_does_not_depend_on_its_batch() -> None:
    calls = make_calls([(4, 21)] * 6, seed=2)
    together = entropy(4)
    write(together, calls)
    for row in range(4):
        alone = entropy(1)
        mine = [Call(call.h[row : row + 1], call.z[row : row + 1]) for call in calls]
        write(alone, mine)
        assert_equal(alone.lanes[0], together.lanes[row])
        for one, call in zip(mine, calls, strict=True):
            assert_equal(one.product[0], call.product[row])


def test_without_writing_everything_but_the_bytes_is_the_same() -> None:
    calls = make_calls([(3, 37)] * 5, seed=3)
    silent_calls = [Call(call.h, call.z) for call in calls]
    forward, silent = entropy(3), entropy(3, writing=False)
    write(forward, calls)
    write(silent, silent_calls)
    for call, silent_call in zip(calls, silent_calls, strict=True):
        assert_equal(call.product, silent_call.product)
    assert_equal(forward.lanes, silent.lanes)
    assert silent.stack.numel() == 0
    assert not silent.ideal.any()
    assert silent.seal().tape_bits == 0


def test_ideal_is_the_information_forgotten() -> None:
    calls = make_calls([(3, 37), (2, 37), (1, 5)], seed=4)
    forward = entropy(3)
    write(forward, calls)
    for row in range(3):
        expected = -sum(
            math.log2(z / Z_ONE)
            for call in calls
            if row < len(call.z)
            for z in call.z[row].tolist()
        )
        assert forward.ideal[row].item() == pytest.approx(expected, rel=1e-12)


def test_a_short_sequence_is_one_segment() -> None:
    calls = make_calls([(5, 50)] * 10, seed=5, smallest=Z_ONE // 8)
    forward = entropy(5)
    write(forward, calls)
    assert len(forward.seal().segments) == 1


def test_segments_stay_few_and_slack_small() -> None:
    units, steps = 16, 2000
    calls = make_calls([(2, units)] * steps, seed=6, smallest=Z_ONE // 8)
    forward = entropy(2)
    chunk_bytes = 2 * 2 * units  # both rows, two bytes a multiplication
    for call in calls:
        forward.reserve(1, units)
        call.product = forward.multiply(call.h, call.z)
        sealed = sum(data.numel() for data, _ in forward._segments)
        assert forward.stack.numel() <= chunk_bytes + max(chunk_bytes, sealed // 8)
    sealed_tape = forward.seal()
    # 8 until an eighth of the tape is more than a chunk, then each is an eighth longer.
    total = sum(data.numel() for data, _ in sealed_tape.segments)
    assert len(sealed_tape.segments) < 20 + math.log(total / chunk_bytes) / math.log(1.1)
    read(EntropyTape.open(sealed_tape), calls)


def test_reserve_keeps_a_region_that_has_room() -> None:
    forward = entropy(2)
    forward.reserve(100, 8)
    stack = forward.stack
    write(forward, make_calls([(2, 8)] * 3, seed=7))
    assert forward.stack is stack


def test_multiplying_without_room_is_refused() -> None:
    forward = entropy(1)
    forward.reserve(1, 4)
    call = make_calls([(1, 100)], seed=8)[0]
    with pytest.raises(RuntimeError, match="reserve"):
        forward.multiply(call.h, call.z)


def test_bits_count_everything_that_is_held() -> None:
    forward = entropy(3)
    write(forward, make_calls([(3, 20)] * 4, seed=9))
    sealed = forward.seal()
    held = sum(8 * tensor.numel() * tensor.element_size() for tensor in sealed.tensors())
    assert sealed.tape_bits + sealed.lane_bits == held
    assert sealed.lane_bits == 3 * LANES * 18


def test_nothing_written_is_nothing_held() -> None:
    sealed = entropy(2).seal()
    assert sealed.tape_bits == 0
    EntropyTape.open(sealed).check_rewound()


@pytest.mark.parametrize(("steps", "rows", "units"), [(70, 4, 650), (13, 64, 650)])
def test_the_tape_is_near_the_entropy_limit(steps: int, rows: int, units: int) -> None:
    generator = torch.Generator().manual_seed(10)
    forward = entropy(rows)
    h = torch.randint(-(1 << 23), 1 << 23, (rows, units), generator=generator, dtype=torch.int32)
    for _ in range(steps):
        z = torch.randint(Z_ONE // 8, Z_ONE, (rows, units), generator=generator).int()
        forward.reserve(1, units)
        h = forward.multiply(h, z) + torch.randint(-(1 << 21), 1 << 21, h.shape).int()
    sealed = forward.seal()
    ideal = forward.ideal.sum().item()
    assert ideal <= sealed.tape_bits + sealed.lane_bits <= 1.03 * ideal


# -- what a broken tape does ----------------------------------------------------------------------


def test_reading_more_than_was_written_is_an_error() -> None:
    fresh = entropy(2)
    call = make_calls([(2, 16)], seed=11, smallest=1)[0]
    call.z.fill_(1)
    call.h.bitwise_and_(1023)  # a quotient that a state may have left
    with pytest.raises(ReversalError, match="row 0 ran empty"):
        fresh.divide(call.h, call.z)


def test_a_state_that_no_forward_pass_leaves_is_an_error() -> None:
    h = torch.tensor([[5], [1 << 21]], dtype=torch.int32)
    with pytest.raises(ReversalError, match="row 1 left its range"):
        entropy(2).divide(h, torch.ones_like(h))


def test_a_lane_below_its_range_is_an_error() -> None:
    sealed = entropy(3).seal()
    sealed.lanes[2, 3] = 3  # lane 1: L = 1024 becomes 768
    with pytest.raises(ReversalError, match="lane of batch row 2"):
        EntropyTape.open(sealed)


def test_leaving_something_on_tape_is_an_error() -> None:
    calls = make_calls([(2, 64)] * 3, seed=12)
    forward = entropy(2)
    write(forward, calls, chunk=3)
    back = EntropyTape.open(forward.seal())
    back.divide(calls[2].product, calls[2].z)
    with pytest.raises(ReversalError, match="not used up"):
        back.check_rewound()


def test_a_segment_left_over_is_an_error() -> None:
    forward = entropy(1)
    calls = make_calls([(1, 64)] * 40, seed=13)
    write(forward, calls)
    sealed = forward.seal()
    assert len(sealed.segments) > 1
    back = EntropyTape.open(SealedTape(sealed.lanes, sealed.segments[:1]))
    back.fill.zero_()
    back._segments = list(sealed.segments)
    with pytest.raises(ReversalError, match="not used up"):
        back.check_rewound()


def test_lanes_out_of_place_are_an_error() -> None:
    tape_ = entropy(3)
    tape_.lanes[1, 5] += 1
    with pytest.raises(ReversalError, match="row 1 did not return"):
        tape_.check_rewound()


@pytest.mark.parametrize("which", ["lanes", "data", "fill"])
def test_a_corrupted_tape_is_noticed(which: str) -> None:
    """Whatever is changed: the states come back different, or an error is raised."""
    calls = make_calls([(2, 40)] * 5, seed=14)
    forward = entropy(2)
    write(forward, calls, chunk=5)
    sealed = forward.seal()
    ((data, fill),) = sealed.segments
    target = {"lanes": sealed.lanes, "data": data, "fill": fill}[which]
    for index in range(0, target.numel(), 7):
        before = target.flatten()[index].clone()
        target.view(-1)[index] ^= 1
        assert comes_back_different(lambda: EntropyTape.open(sealed), calls)
        target.view(-1)[index] = before
    assert not comes_back_different(lambda: EntropyTape.open(sealed), calls)


def comes_back_different(reopen: Callable[[], EntropyTape | PaperTape], calls: list[Call]) -> bool:
    """Whether undoing the calls gives other states, or an error."""
    different = False
    try:
        back = reopen()
        for call in reversed(calls):
            different |= not torch.equal(back.divide(call.product, call.z), call.h)
        back.check_rewound()
    except ReversalError:
        return True
    return different


# -- PaperTape ------------------------------------------------------------------------------------

UNITS = 6
paper_shapes = st.lists(st.tuples(st.integers(1, ROWS), st.integers(1, UNITS)), max_size=60)


def paper(rows: int, units: int = UNITS, *, writing: bool = True) -> PaperTape:
    return PaperTape(rows, units, writing=writing, device=DEVICE)


@settings(deadline=None)
@given(paper_shapes, st.integers(0, 1 << 30))
def test_any_calls_come_back_from_the_papers_buffer(
    shapes: list[tuple[int, int]], seed: int
) -> None:
    calls = make_calls(shapes, seed)
    forward = paper(ROWS)
    write(forward, calls)
    sealed = forward.seal()
    kept = [tensor.clone() for tensor in sealed.tensors()]
    read(PaperTape.open(SealedPaperTape.from_tensors(sealed.tensors())), calls)
    for now, before in zip(sealed.tensors(), kept, strict=True):
        assert_equal(now, before)


def test_planes_are_begun_when_any_integer_would_overflow() -> None:
    calls = make_calls([(2, UNITS)] * 100, seed=15)
    forward = paper(2)
    buffers = [[0] * UNITS, [0] * UNITS]  # Algorithm 4 in Python integers
    planes, positions = 1, []
    for operation, call in enumerate(calls):
        if any(buffer >= 1 << (63 - RADIX_Z) for row in buffers for buffer in row):
            buffers = [[0] * UNITS, [0] * UNITS]
            planes += 1
            positions.append(operation)
        expected = torch.empty_like(call.h)
        for row in range(2):
            for unit in range(UNITS):
                buffers[row][unit], value = exact.oracle_multiply(
                    buffers[row][unit], int(call.h[row, unit]), int(call.z[row, unit])
                )
                assert buffers[row][unit] < 1 << 63
                expected[row, unit] = value
        assert_equal(forward.multiply(call.h, call.z), expected)
    sealed = forward.seal()
    assert planes > 3
    assert sealed.positions == tuple(positions)
    assert sealed.tape_bits == planes * 2 * UNITS * 64
    assert forward.ideal.sum().item() == pytest.approx(
        -sum((call.z.double() / Z_ONE).log2().sum().item() for call in calls)
    )


def test_fewer_units_use_the_last_columns() -> None:
    forward = paper(1)
    call = make_calls([(1, 2)], seed=16)[0]
    call.h |= Z_ONE - 1  # something to keep
    call.z.fill_(2)
    forward.multiply(call.h, call.z)
    assert forward.plane[0, : UNITS - 2].tolist() == [0] * (UNITS - 2)
    assert bool((forward.plane[0, UNITS - 2 :] > 0).all())


def test_the_papers_buffer_without_writing_gives_the_same_states() -> None:
    calls = make_calls([(2, UNITS)] * 100, seed=17)
    silent_calls = [Call(call.h, call.z) for call in calls]
    forward, silent = paper(2), paper(2, writing=False)
    write(forward, calls)
    write(silent, silent_calls)
    for call, silent_call in zip(calls, silent_calls, strict=True):
        assert_equal(call.product, silent_call.product)
    assert len(silent.seal().planes) == 1
    assert not silent.ideal.any()


def test_a_broken_paper_buffer_is_noticed() -> None:
    calls = make_calls([(2, UNITS)] * 30, seed=18)
    forward = paper(2)
    write(forward, calls)
    sealed = forward.seal()
    back = PaperTape.open(sealed)
    with pytest.raises(ReversalError, match="still on the tape"):
        back.check_rewound()
    for change in (1, 1 << 40):
        sealed.planes[-1][1, 2] ^= change
        assert comes_back_different(lambda: PaperTape.open(sealed), calls)
        sealed.planes[-1][1, 2] ^= change
    assert not comes_back_different(lambda: PaperTape.open(sealed), calls)
    out_of_place = paper(2)
    out_of_place.plane[1, 2] = 1
    with pytest.raises(ReversalError, match="row 1 did not return to 0"):
        out_of_place.check_rewound()
    with pytest.raises(ReversalError, match="nothing is left"):
        paper(2).divide(calls[0].h, calls[0].z)

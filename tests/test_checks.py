from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

from revrnn import _checks


def test_sizes() -> None:
    assert _checks.positive("n", 3) == 3
    assert _checks.even("n", 4) == 4
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"n must be a positive int, got {value}"):
            _checks.positive("n", value)
    for wrong in (1.0, "1", None, True, np.int64(3)):  # torch.nn takes ints only, too
        with pytest.raises(TypeError, match="n must be a positive int, got"):
            _checks.even("n", wrong)
    with pytest.raises(ValueError, match=r"n must be even, .* got 3"):
        _checks.even("n", 3)


def test_probabilities() -> None:
    for value in (0, 0.0, 0.999, np.float64(0.5)):
        assert _checks.probability("p", value) == value
    for value in (1, 1.0, -0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"p must be a number in \[0, 1\), got"):
            _checks.probability("p", value)
    for wrong in (True, "0.5", None, torch.tensor(0.5)):
        with pytest.raises(TypeError, match=r"p must be a number in \[0, 1\), got"):
            _checks.probability("p", wrong)


def test_forgetting() -> None:
    for value in (None, 10, 1, 0.5, 0.0015, 10.0):
        assert _checks.forgetting("fractional", value, "gumbel", 1) == (value, 1.0)
    for value in (0, -1, 10.5, 11, float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match=r"max_forget_bits must be in \(0, 10\]"):
            _checks.forgetting("fractional", value, "gumbel", 1)
    for value in (1e-300, 1e-9, 0.0014):
        with pytest.raises(ValueError, match="must allow for the 1023/1024"):
            _checks.forgetting("fractional", value, "gumbel", 1)
    for wrong in (True, "3", torch.tensor(3)):
        with pytest.raises(TypeError, match="max_forget_bits must be None or a number of bits"):
            _checks.forgetting("fractional", wrong, "gumbel", 1)
    assert _checks.forgetting("none", None, "gumbel", 1) == (None, 1.0)
    with pytest.raises(ValueError, match="max_forget_bits must be None with forget='none'"):
        _checks.forgetting("none", 3, "gumbel", 1)
    with pytest.raises(ValueError, match=r"forget must be one of 'fractional', .*got 'all'"):
        _checks.forgetting("all", None, "gumbel", 1)


def test_discrete_forgetting() -> None:
    for bits in (1, 10):
        for temperature in (2**-6, 0.5, 64):
            found = _checks.forgetting("discrete", bits, "gumbel", temperature)
            assert found == (bits, temperature)
    assert _checks.forgetting("discrete", 2, "categorical", 1) == (2, 1.0)
    with pytest.raises(ValueError, match="max_forget_bits must be given with forget='discrete'"):
        _checks.forgetting("discrete", None, "gumbel", 1)
    for bits in (2.0, True, "2"):
        with pytest.raises(TypeError, match="max_forget_bits must be a positive int, got"):
            _checks.forgetting("discrete", bits, "gumbel", 1)
    with pytest.raises(ValueError, match="max_forget_bits must be a positive int, got 0"):
        _checks.forgetting("discrete", 0, "gumbel", 1)
    with pytest.raises(ValueError, match=r"max_forget_bits must be at most 10 .* got 11"):
        _checks.forgetting("discrete", 11, "gumbel", 1)
    with pytest.raises(ValueError, match="estimator must be one of 'gumbel', 'categorical'"):
        _checks.forgetting("discrete", 2, "reinforce", 1)
    for value in (0, -1.0, 65, float("nan")):
        with pytest.raises(ValueError, match="temperature must be between 1/64 and 64, got"):
            _checks.forgetting("discrete", 2, "gumbel", value)
    for wrong in (None, "1", True):
        with pytest.raises(TypeError, match="temperature must be a positive number, got"):
            _checks.forgetting("discrete", 2, "gumbel", wrong)
    with pytest.raises(ValueError, match=r"must be 1 with 'categorical', got 0\.5"):
        _checks.forgetting("discrete", 2, "categorical", 0.5)


def test_choices_and_flags() -> None:
    assert _checks.one_of("tape", "b", ("a", "b")) == "b"
    with pytest.raises(ValueError, match="tape must be one of 'a', 'b', got 'c'"):
        _checks.one_of("tape", "c", ("a", "b"))
    assert _checks.flag("bias", False) is False
    for wrong in (0, 1.0, None, "False"):
        with pytest.raises(TypeError, match="bias must be True or False, got"):
            _checks.flag("bias", wrong)


def test_keep() -> None:
    for value in (None, 0, 4):
        assert _checks.keep(value, 8) == value
    for value in (-1, 5):
        with pytest.raises(ValueError, match=f"keep must be between 0 and half .* 4, got {value}"):
            _checks.keep(value, 8)
    for wrong in (1.0, True, "1"):
        with pytest.raises(TypeError, match="keep must be None or an int"):
            _checks.keep(wrong, 8)


def test_parameter_dtype() -> None:
    for dtype in (None, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        _checks.parameter_dtype(dtype)
    for dtype in (torch.int32, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match="dtype must be a real floating-point dtype"):
            _checks.parameter_dtype(dtype)


def check_input(data: Any, parameter: torch.Tensor | None = None) -> None:
    _checks.input_tensor(data, torch.zeros(1) if parameter is None else parameter, 3, (2, 3))


def test_input_tensors() -> None:
    check_input(torch.zeros(5, 2, 3))
    check_input(torch.zeros(5, 3))
    for shape in ((3,), (1, 5, 2, 3), ()):
        with pytest.raises(ValueError, match="input must have 2 or 3 dimensions, got shape"):
            check_input(torch.zeros(shape))
    for shape in ((5, 2, 4), (5, 3, 2), (5, 2, 0)):
        with pytest.raises(ValueError, match="input must have input_size = 3 features"):
            check_input(torch.zeros(shape))
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        with pytest.raises(
            ValueError, match=r"input must have the dtype of the weights, .*32, got"
        ):
            check_input(torch.zeros(5, 2, 3, dtype=dtype))
    for wrong in (None, [torch.zeros(3)], np.zeros((5, 2, 3))):
        with pytest.raises(TypeError, match="input must be a dense tensor or a PackedSequence"):
            check_input(wrong)
    with pytest.raises(ValueError, match="got a sparse_coo tensor"):
        check_input(torch.zeros(5, 2, 3).to_sparse())


def test_autocast_takes_what_it_casts() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            check_input(torch.zeros(5, 2, 3, dtype=dtype))
        for dtype in (torch.float64, torch.int64, torch.complex64):
            with pytest.raises(ValueError, match="input must have the dtype of the weights"):
                check_input(torch.zeros(5, 2, 3, dtype=dtype))
        with pytest.raises(ValueError, match="input must have the dtype of the weights"):
            check_input(torch.zeros(5, 2, 3), torch.zeros(1, dtype=torch.float64))


def test_devices() -> None:
    meta = torch.zeros(5, 2, 3, device="meta", dtype=torch.float64)
    with pytest.raises(ValueError, match="input must be on the device of the weights, cpu, got m"):
        check_input(meta)
    with pytest.raises(ValueError, match="input must hold values, got a tensor on the meta device"):
        check_input(meta, torch.zeros(1, device="meta", dtype=torch.float64))


def test_empty_input() -> None:
    _checks.not_empty((1, 1, 3), 1, 1)
    for steps, batch in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one time step and one batch row, got shape"):
            _checks.not_empty((steps, batch, 3), steps, batch)


def pack(sizes: Any, rows: int = 8, **indices: Any) -> PackedSequence:
    if isinstance(sizes, list):
        sizes = torch.tensor(sizes, dtype=torch.int64)
    return PackedSequence(torch.zeros(rows, 3), sizes, **indices)


def test_packed_sequences() -> None:
    order = torch.tensor([2, 0, 1])
    _checks.packed(pack([4, 3, 1]))
    _checks.packed(pack([8]))
    _checks.packed(pack([3, 3, 2], sorted_indices=order, unsorted_indices=order.argsort()))
    for sizes in ([1, 2, 5], [4, 4, 0], [9, -1], [4, 0, 4], [0], list(range(30))):
        with pytest.raises(ValueError, match="batch_sizes of the input must be positive and must"):
            _checks.packed(pack(sizes))
    for sizes in ([4, 3], [4, 4, 1], [9], [1 << 62, 1 << 62, 1 << 62, 1 << 62, 8]):
        with pytest.raises(ValueError, match="batch_sizes of the input must add up to"):
            _checks.packed(pack(sizes))
    with pytest.raises(ValueError, match="input must have at least one time step"):
        _checks.packed(pack([]))
    for wrong in (torch.tensor([4, 4], dtype=torch.int32), torch.tensor([[8]])):
        with pytest.raises(ValueError, match="batch_sizes of the input must be a 1-D int64 tensor"):
            _checks.packed(pack(wrong))


@pytest.mark.parametrize(
    ("there", "back"),
    [
        ([0, 1, 3], [0, 1, 2]),  # out of range
        ([0, 1, -1], [0, 1, 2]),
        ([0, 1, 1], [0, 1, 2]),
        ([0, 1, 2], [0, 1, 1]),
        ([0, 1], [0, 1]),
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([1, 2, 0], [1, 2, 0]),  # does not undo it
        ([[0, 1, 2]], [[0, 1, 2]]),
        ([0.0, 1.0, 2.0], [0, 1, 2]),
        (None, [0, 1, 2]),
    ],
)
def test_permutations_of_packed_sequences(there: Any, back: Any) -> None:
    given = pack([3, 3, 2])
    wrong = given._replace(
        sorted_indices=None if there is None else torch.tensor(there),
        unsorted_indices=torch.tensor(back),
    )
    with pytest.raises(ValueError, match="must be int64 permutations of its 3 batch rows"):
        _checks.packed(wrong)


def test_pairs() -> None:
    h, c = torch.zeros(1), torch.ones(1)
    assert _checks.pair(None) is None
    assert _checks.pair((h, c)) == (h, c)
    assert _checks.pair([h, c]) == (h, c)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"hx must be a pair \(h_0, c_0\), got Tensor"):
        _checks.pair(torch.zeros(2, 3, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hx must be a pair \(h_0, c_0\), got 3 items"):
        _checks.pair((h, c, c))  # type: ignore[arg-type]


def test_states() -> None:
    cpu, single = torch.device("cpu"), torch.float32
    good = torch.zeros(1, 2, 4)

    def check(*states: Any) -> None:
        _checks.state_tensors(states, (1, 2, 4), cpu, single)

    check(good, good)
    with pytest.raises(ValueError, match=r"c_0 must have shape \(1, 2, 4\), got \(1, 2, 5\)"):
        check(good, torch.zeros(1, 2, 5))
    with pytest.raises(ValueError, match=r"h_0 must have the dtype of the weights, .*, got .*64"):
        check(good.double(), good)
    with pytest.raises(ValueError, match="c_0 must be on the device of the weights, cpu, got meta"):
        check(good, good.to("meta"))
    with pytest.raises(TypeError, match="h_0 must be a dense tensor, got float"):
        check(0.0, good)


def test_weights() -> None:
    cpu = torch.device("cpu")
    shapes = {"weight": (4, 3), "bias": (4,)}
    _checks.weights([torch.zeros(4, 3), torch.zeros(4)], shapes, cpu)
    for wrong, message in (
        (torch.zeros(3), r"bias must have shape \(4,\), got \(3,\)"),
        (torch.zeros(4, dtype=torch.complex64), "bias must be of a real floating-point dtype"),
        (torch.zeros(4, device="meta"), "bias must be on the device of the other weights, cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            _checks.weights([torch.zeros(4, 3), wrong], shapes, cpu)
    with pytest.raises(TypeError, match="bias must be a dense tensor, got NoneType"):
        _checks.weights([torch.zeros(4, 3), None], shapes, cpu)  # type: ignore[list-item]

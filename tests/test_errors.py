"""Every mistake that docs/errors.md lists is made here, and the tables there are what came of it.

``python tests/test_errors.py`` writes the tables anew.
"""

import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from revrnn import (
    NonFiniteError,
    ReversalError,
    RevGRU,
    RevLSTM,
    StateOverflowError,
    kernels,
)

DOCS = Path(__file__).parent.parent / "docs" / "errors.md"

X, H, T, N = 3, 4, 5, 2  # input size, hidden size, steps, batch rows


@dataclass
class Case:
    what: str
    make: Callable[[], object]
    error: type[Exception]
    advice: str
    says: str = ""
    """What to show of a message that is torch's own; otherwise its first sentence is shown."""


def x() -> Tensor:
    return torch.randn(T, N, X, generator=torch.Generator().manual_seed(0))


def gru(**settings: Any) -> RevGRU:
    torch.manual_seed(0)
    return RevGRU(X, H, **settings)


def lstm(**settings: Any) -> RevLSTM:
    torch.manual_seed(0)
    return RevLSTM(X, H, **settings)


def changed(tensor: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def by_hand(sizes: list[int], rows: int = 8, **indices: Tensor) -> PackedSequence:
    return PackedSequence(torch.zeros(rows, X), torch.tensor(sizes), **indices)


ARGUMENTS = [
    Case(
        "a size that is not positive",
        lambda: RevGRU(0, H),
        ValueError,
        "Sizes count from 1; so do `num_layers` and `chunk_size`.",
    ),
    Case("a size that is no int", lambda: RevGRU(X, 4.0), TypeError, "Pass an int."),
    Case(
        "an odd hidden size",
        lambda: RevGRU(X, 5),
        ValueError,
        "Take one unit more or less: the two halves update each other in turn.",
    ),
    Case(
        "`dropout`, `weight_dropout`, `hidden_dropout` or `zoneout` outside [0, 1)",
        lambda: gru(dropout=1.0),
        ValueError,
        "A probability of 1 would leave nothing.",
    ),
    Case(
        "dropout where `bias` belongs",
        lambda: RevGRU(X, H, 1, 0.5),
        TypeError,
        "The order is that of torch.nn; pass settings by keyword.",
    ),
    Case(
        "`max_forget_bits` that is not positive, or beyond the format",
        lambda: gru(max_forget_bits=11),
        ValueError,
        "A forget value has 10 bits; `None` sets no limit.",
    ),
    Case(
        "`max_forget_bits` below what every step forgets",
        lambda: gru(max_forget_bits=0.001),
        ValueError,
        "The largest forget value is 1023/1024; 1 and more are useful limits.",
    ),
    Case("an unknown tape", lambda: gru(tape="rans"), ValueError, "See the message."),
    Case(
        '`tape="paper"` with other kernels forced',
        lambda: _forced("cpu", lambda: gru(tape="paper")(x())),
        ValueError,
        "Lift the force, or force `reference`.",
    ),
    Case(
        "an integer or complex `dtype`",
        lambda: gru(dtype=torch.int32),
        TypeError,
        "Parameters are real; the recurrence is in fixed point whatever they are.",
    ),
    Case(
        "a limit where nothing is forgotten",
        lambda: gru(forget="none", max_forget_bits=3),
        ValueError,
        "Leave `max_forget_bits` out.",
    ),
    Case(
        "discrete forgetting without a limit",
        lambda: gru(forget="discrete"),
        ValueError,
        "Say from how many whole bits a unit chooses, 1 to 10.",
    ),
    Case(
        "a part of a bit with discrete forgetting",
        lambda: gru(forget="discrete", max_forget_bits=1.5),
        TypeError,
        "Pass an int.",
    ),
    Case(
        "zoneout with discrete forgetting",
        lambda: gru(forget="discrete", max_forget_bits=2, zoneout=0.1),
        ValueError,
        "In eval, the mean of staying and stepping is no whole bit.",
    ),
    Case("`keep` beyond H/2, or negative", lambda: gru()(x(), keep=3), ValueError, "0 to H/2."),
]

INPUT = [
    Case("wrong rank", lambda: gru()(torch.zeros(X)), ValueError, "Add the missing dimension."),
    Case(
        "wrong number of features",
        lambda: gru()(torch.zeros(T, N, X + 1)),
        ValueError,
        "Features come last, with `batch_first` too.",
    ),
    Case(
        "another dtype than the weights'; integers, complex",
        lambda: gru()(x().double()),
        ValueError,
        "As with torch.nn: convert the input or the module, or use autocast.",
    ),
    Case(
        "another device than the weights'",
        lambda: gru()(x().to("meta")),
        ValueError,
        "Move the input or the module.",
    ),
    Case(
        "everything on the meta device",
        lambda: gru(device="meta")(x().to("meta")),
        ValueError,
        "Give the module memory first: `to_empty`, then `reset_parameters` or `load_state_dict`.",
    ),
    Case(
        "no time step, or no batch row",
        lambda: gru()(torch.zeros(0, N, X)),
        ValueError,
        "Skip empty batches.",
    ),
    Case("a list of tensors", lambda: gru()([x()]), TypeError, "`torch.stack` or `pack_sequence`."),
    Case(
        "a sparse or nested tensor",
        lambda: gru()(x().to_sparse()),
        ValueError,
        "`to_dense`; `pack_sequence` for sequences of different lengths.",
    ),
    Case(
        "a length of zero",
        lambda: pack_padded_sequence(x(), torch.tensor([T, 0])),
        RuntimeError,
        "torch refuses to pack it: drop the empty sequence.",
        says="Length of all samples has to be greater than 0",
    ),
    Case(
        "a length beyond the padded batch, which torch packs",
        lambda: gru()(pack_padded_sequence(x(), torch.tensor([T + 2, T]))),
        ValueError,
        "Correct the lengths.",
    ),
    Case(
        "a PackedSequence by hand whose steps grow, or are empty",
        lambda: gru()(by_hand([1, 3, 4])),
        ValueError,
        "The longest sequence comes first; `pack_sequence` sees to it.",
    ),
    Case(
        "one whose steps do not add up",
        lambda: gru()(by_hand([4, 3])),
        ValueError,
        "As above.",
    ),
    Case(
        "one whose indices are no permutations",
        lambda: gru()(by_hand([4, 4], sorted_indices=torch.tensor([0, 1, 2, 3, 4]))),
        ValueError,
        "As above.",
    ),
]

STATE = [
    Case(
        "wrong shape",
        lambda: gru(num_layers=2)(x(), torch.zeros(1, N, H)),
        ValueError,
        "(layers * directions, N, H), or without N when the input is unbatched; also with "
        "`batch_first`.",
    ),
    Case(
        "wrong dtype",
        lambda: gru()(x(), torch.zeros(1, N, H, dtype=torch.int32)),
        ValueError,
        "As for the input.",
    ),
    Case(
        "wrong device",
        lambda: gru()(x(), torch.zeros(1, N, H, device="meta")),
        ValueError,
        "As for the input.",
    ),
    Case(
        "a tensor where RevLSTM takes a pair",
        lambda: lstm()(x(), torch.zeros(1, N, H)),
        TypeError,
        "`(h_0, c_0)`.",
    ),
    Case("a tuple where RevGRU takes a tensor", lambda: gru()(x(), (x(),)), TypeError, "`h_0`."),
    Case(
        "NaN or infinity in the initial state",
        lambda: gru()(x(), changed(torch.zeros(1, N, H), (0, 1, 2), torch.nan)),
        NonFiniteError,
        "Look where the state comes from.",
    ),
    Case(
        "an initial state out of range",
        lambda: gru()(x(), torch.full((1, N, H), 300.0)),
        StateOverflowError,
        "Begin with a smaller state.",
    ),
]

NUMBERS = [
    Case(
        "NaN or infinity in the input",
        lambda: gru()(changed(x(), (2, 1, 0), torch.nan)),
        NonFiniteError,
        "The message names layer, batch row and time step: look at the input there.",
    ),
    Case(
        "NaN or infinity in the weights",
        lambda: _with_weights(gru(), torch.inf)(x()[:, :1]),
        NonFiniteError,
        "Training has diverged: lower the learning rate, clip gradients, and go back to the last "
        "good checkpoint.",
    ),
    Case(
        "a float64 input beyond float32",
        lambda: gru().double()(1e300 * x()[:, :1].double()),
        NonFiniteError,
        "The recurrence computes in float32: scale the input.",
    ),
    Case(
        "a state that grows out of range",
        lambda: _with_weights(lstm(), 5.0)(torch.ones(1000, 1, X)),
        StateOverflowError,
        "Lower the learning rate, clip gradients, let the layer forget more, or detach and rescale "
        "the state that is carried on. A RevGRU's h stays near (-1, 1) when it begins there; "
        "a RevLSTM's h and c need not.",
    ),
]

BACKWARD = [
    Case(
        "a weight, input or state changed in place between forward and backward",
        lambda: _backward(lstm(), lambda rnn: _add(rnn.weight_hh_l0)),
        ReversalError,
        "Call the optimizer after backward, and change clones.",
    ),
    Case(
        "the same, behind autograd's back (`.data`)",
        lambda: _backward(lstm(), lambda rnn: rnn.weight_hh_l0.data.add_(1)),
        ReversalError,
        "As above.",
        says="of batch row 0",
    ),
    Case(
        "backward twice",
        lambda: _twice(gru()),
        RuntimeError,
        "Add the losses, or pass `retain_graph=True`: the tape is not used up by backward.",
        says="Trying to backward through the graph a second time",
    ),
    Case(
        "the gradient of a gradient",
        lambda: _double(gru()),
        RuntimeError,
        "Reversible layers are differentiated once; use torch.nn for gradient penalties.",
        says="differentiated only once",
    ),
    Case(
        "several gradients in one pass",
        lambda: _several(gru()),
        RuntimeError,
        "One backward pass for each: a reversal has one state to bring back.",
    ),
    Case(
        "an input from `torch.inference_mode()` in training",
        lambda: _inference(gru()),
        RuntimeError,
        "Clone it, or use `torch.no_grad()`, as with torch.nn.",
        says="Inference tensors cannot be saved for backward",
    ),
]

OTHER = [
    Case(
        "a report before there is one",
        lambda: gru().tape_report(),
        RuntimeError,
        "It speaks of the last forward pass that recorded for backward.",
    ),
    Case(
        "parameters of another shape",
        lambda: _replaced(gru(), nn.Parameter(torch.zeros(4, 4)))(x()),
        ValueError,
        "`weight_hh` is (G*H, H/2).",
    ),
    Case(
        "parameters on several devices",
        lambda: _replaced(gru(), nn.Parameter(torch.zeros(12, 2, device="meta")))(x()),
        ValueError,
        "Move the module as a whole.",
    ),
    Case(
        "complex parameters",
        lambda: _complex(gru())(x().to(torch.complex64)),
        ValueError,
        "Real and imaginary parts can be features of a real input.",
    ),
    Case(
        "unknown kernels",
        lambda: kernels.use("gpu"),
        ValueError,
        "`revrnn.kernels.available()` lists them.",
        says="kernels must be one of reference",
    ),
    Case(
        "`torch.jit.trace`",
        lambda: torch.jit.trace(gru(), (x(),)),
        RuntimeError,
        "`torch.compile` of a model works: the graph breaks around the layer.",
    ),
    Case(
        "`torch.func` and `torch.vmap`",
        lambda: _vmap(gru()),
        RuntimeError,
        "`torch.func.functional_call` works; for the others use torch.nn.",
    ),
]

SECTIONS = {
    "Arguments": ARGUMENTS,
    "Input": INPUT,
    "Initial state": STATE,
    "Numbers": NUMBERS,
    "Backward": BACKWARD,
    "Others": OTHER,
}
CASES = [case for cases in SECTIONS.values() for case in cases]


def _forced(name: str, run: Callable[[], object]) -> None:
    with kernels.use(name):
        run()


def _with_weights(rnn: Any, value: float) -> Any:
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.fill_(value)
    return rnn


def _add(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.add_(1)


def _backward(rnn: Any, between: Callable[[Any], object]) -> None:
    out, _ = rnn(x()[:, :1])
    between(rnn)
    out.sum().backward()


def _twice(rnn: Any) -> None:
    out, _ = rnn(x())
    out.sum().backward()
    out.sum().backward()


def _double(rnn: Any) -> None:
    inputs = x().requires_grad_()
    out, _ = rnn(inputs)
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    gradient.square().sum().backward()


def _several(rnn: Any) -> None:
    out, _ = rnn(x())
    torch.autograd.grad(out.sum(), rnn.bias_l0, torch.ones(2), is_grads_batched=True)


def _inference(rnn: Any) -> None:
    with torch.inference_mode():
        inputs = x()
    rnn(inputs)


def _vmap(rnn: Any) -> None:
    torch.vmap(lambda part: rnn(part)[0])(torch.zeros(2, T, N, X))


def _replaced(rnn: Any, parameter: nn.Parameter) -> Any:
    rnn.weight_hh_l0 = parameter
    return rnn


def _complex(rnn: Any) -> Any:
    for parameter in rnn.parameters():
        parameter.data = parameter.data.to(torch.complex64)
    return rnn


def caught(case: Case) -> Exception:
    """What the mistake leads to. Anything but the expected kind passes through."""
    try:
        case.make()
    except case.error as error:
        return error
    raise AssertionError(f"{case.what}: nothing was raised")


def table(cases: list[Case]) -> str:
    lines = ["| what | error | message | what to do |", "|---|---|---|---|"]
    for case in cases:
        error = caught(case)
        shown = f"… {case.says} …" if case.says else re.split(r"\. ", str(error))[0]
        cells = (case.what, f"`{type(error).__name__}`", shown, case.advice)
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def rewrite(text: str) -> str:
    """The page with every table as it should be."""
    for title, cases in SECTIONS.items():
        heading = f"## {title}\n"
        assert heading in text, f"docs/errors.md has no section {title}"
        before, _, after = text.partition(heading)
        above, below = re.split(r"^(?:\|.*\n)+", after, maxsplit=1, flags=re.MULTILINE)
        text = before + heading + above + table(cases) + below
    return text


quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, about torch.jit


@quiet
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_a_mistake_is_one_clear_error(case: Case) -> None:
    if "forced" in case.what and "cpu" not in kernels.available():
        pytest.skip("the C++ kernels were not built")
    error = caught(case)
    assert type(error) is case.error
    assert case.says in str(error)
    assert str(error)


@quiet
@pytest.mark.skipif("cpu" not in kernels.available(), reason="the C++ kernels were not built")
def test_the_page_says_what_happens() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert rewrite(text) == text, "run: python tests/test_errors.py"


@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize("case", [*NUMBERS, *BACKWARD], ids=lambda case: case.what)
def test_all_kernels_find_the_same(case: Case, name: str) -> None:
    expected = caught(case)
    with kernels.use(name):
        found = caught(case)
    assert type(found) is type(expected)
    if "behind" not in case.what:  # a wrong weight is noticed where something first gives way
        assert str(found) == str(expected)


@pytest.mark.parametrize("name", kernels.available())
def test_the_step_and_row_are_named(name: str) -> None:
    rnn = gru(num_layers=2)
    bad = changed(x(), (3, 1, 0), torch.nan)
    with kernels.use(name):
        with pytest.raises(NonFiniteError, match=r"layer 0: a gate of batch row 1 .* time step 3"):
            rnn(bad)
        both = gru(bidirectional=True)
        with pytest.raises(NonFiniteError, match=r"layer 0: a gate of batch row 1 .* time step 3"):
            both(bad)
        with torch.no_grad():
            rnn.weight_hh_l1[0, 0] = torch.nan
        with pytest.raises(NonFiniteError, match=r"layer 1: a gate of batch row 0 .* time step 0"):
            rnn(x()[:, :1])


def test_rows_of_a_packed_sequence_are_explained() -> None:
    packed = pack_sequence([x()[:2, 0], torch.full((4, X), torch.nan)], enforce_sorted=False)
    with pytest.raises(NonFiniteError, match="batch row 0") as caught:
        gru()(packed)
    assert "sorted_indices" in caught.value.__notes__[0]


def test_an_error_leaves_the_module_usable() -> None:
    rnn = lstm()
    expected, _ = rnn(x())
    with pytest.raises(NonFiniteError):
        rnn(changed(x(), (0, 0, 0), torch.inf))
    with pytest.raises(ReversalError):
        _backward(rnn, lambda rnn: _add(rnn.weight_hh_l0))
    with torch.no_grad():
        rnn.weight_hh_l0.sub_(1)
    torch.testing.assert_close(rnn(x())[0], expected)
    rnn(x())[0].sum().backward()


def test_errors_travel_between_processes() -> None:
    for error in (
        ReversalError.at("layer 1", 5, 3),
        NonFiniteError.at("layer 1", 5, 3),
        StateOverflowError.at("layer 1", 5, 3),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert "layer 1" in str(again)
        assert "row 3" in str(again)
        assert "step 5" in str(again)
    assert issubclass(ReversalError, RuntimeError)
    assert issubclass(StateOverflowError, ArithmeticError)
    assert issubclass(NonFiniteError, ArithmeticError)


if __name__ == "__main__":
    DOCS.write_text(rewrite(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{len(CASES)} rows written\n")

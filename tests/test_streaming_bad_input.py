"""Wrong arguments of `revrnn.stream`: one sentence each, that names the argument."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from revrnn import RevGRU, RevLSTM, VariationalDropout, stream

STEPS, BATCH, WIDTH, HIDDEN = 6, 2, 4, 8
X = torch.zeros(STEPS, BATCH, WIDTH)
TOKENS = torch.zeros(STEPS, BATCH, dtype=torch.int64)


def head(h: Tensor, *others: Tensor) -> Tensor:
    return h.sum()


def gru(**options: Any) -> RevGRU:
    return RevGRU(WIDTH, HIDDEN, **options)


def lstm(inputs: int = WIDTH, **options: Any) -> RevLSTM:
    return RevLSTM(inputs, HIDDEN, **options)


def h_0(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape or (1, BATCH, HIDDEN), **options)


DROP = VariationalDropout(0.1)
CASES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    # rnn
    ("rnn: none", {"rnn": None}, TypeError, "rnn must be a RevGRU, a RevLSTM or a .*, got None"),
    ("rnn: other", {"rnn": nn.GRU(4, 8)}, TypeError, "rnn must be a RevGRU, .* got GRU"),
    ("rnn: string", {"rnn": "gru"}, TypeError, "rnn must be a RevGRU, .* got str"),
    ("rnn: part", {"rnn": [gru(), nn.Dropout()]}, TypeError, "rnn must be .* got Dropout out of"),
    ("rnn: first", {"rnn": [DROP, gru()]}, TypeError, "got VariationalDropout out of place"),
    ("rnn: twice", {"rnn": [gru(), DROP, DROP, lstm(8)]}, TypeError, "got VariationalDropout out"),
    ("rnn: last", {"rnn": [gru(), DROP]}, ValueError, "rnn must end with .* VariationalDropout at"),
    ("rnn: empty", {"rnn": nn.ModuleList()}, ValueError, "rnn must end with .* an empty sequence"),
    ("rnn: both ways", {"rnn": gru(bidirectional=True)}, ValueError, "got bidirectional=True"),
    ("rnn: batch first", {"rnn": gru(batch_first=True)}, ValueError, "got batch_first=True"),
    ("rnn: sizes", {"rnn": [gru(), lstm(6)]}, ValueError, "input_size must be 8, got 6"),
    (
        "rnn: mixed",
        {"rnn": [gru(), lstm(8, reversible=False)]},
        ValueError,
        r"same reversible and tape settings, got \(True, 'entropy'\) and \(False, 'entropy'\)",
    ),
    (
        "rnn: dtypes",
        {"rnn": [gru(), lstm(8, dtype=torch.float64)]},
        ValueError,
        "all of rnn must have the dtype .* torch.float32, got torch.float64",
    ),
    # inputs
    ("inputs: list", {"inputs": [[1.0]]}, TypeError, "inputs must hold tensors, got list"),
    ("inputs: none", {"inputs": None}, TypeError, "inputs must be a tensor or .* got NoneType"),
    ("inputs: no one", {"inputs": ()}, ValueError, "inputs must hold at least one tensor"),
    ("inputs: two", {"inputs": (X, X)}, ValueError, "inputs must be one tensor when there is no"),
    ("inputs: vector", {"inputs": X[:, 0, 0]}, ValueError, r"inputs must be \(T, N, ...\)"),
    ("inputs: no steps", {"inputs": X[:0]}, ValueError, "inputs must have at least one time step"),
    ("inputs: no rows", {"inputs": X[:, :0]}, ValueError, "one batch row, got 6 and 0"),
    ("inputs: uneven", {"inputs": (X, X[1:])}, ValueError, "inputs must agree in their time"),
    ("inputs: tokens", {"inputs": TOKENS}, ValueError, "inputs must be floating-point .* no stem"),
    ("inputs: features", {"inputs": X[..., 1:]}, ValueError, r"inputs must have shape \(6, 2, 4\)"),
    ("inputs: dtype", {"inputs": X.double()}, ValueError, "inputs must have the dtype .*float64"),
    ("inputs: device", {"inputs": X.to("meta")}, ValueError, "inputs must be on the device .* cpu"),
    # stem
    ("stem: no function", {"stem": 3}, TypeError, "stem must be a module or a function, got int"),
    ("stem: length", {"stem": lambda x: x[1:]}, ValueError, r"the stem's output must have shape"),
    ("stem: features", {"stem": lambda x: x[..., :3]}, ValueError, r"\(6, 2, 4\).*got \(6, 2, 3\)"),
    ("stem: flat", {"stem": lambda x: x.flatten(0, 1)}, ValueError, r"got \(12, 4\)"),
    (
        "stem: dtype",
        {"stem": lambda x: x.double()},
        ValueError,
        "stem's output must have the dtype",
    ),
    ("stem: integers", {"stem": lambda x: x.long()}, ValueError, "the stem's output .*int64"),
    ("stem: tuple", {"stem": lambda x: (x,)}, TypeError, "stem's output must be a .* got tuple"),
    # head
    ("head: none", {"head": None}, TypeError, "head must be a module or a function, got NoneType"),
    (
        "head: vector",
        {"head": lambda h: h.sum(0)},
        ValueError,
        r"return scalars, .* shape \(2, 8\)",
    ),
    ("head: one", {"head": lambda h: h.sum()[None]}, ValueError, r"return scalars.* shape \(1,\)"),
    ("head: nothing", {"head": lambda h: None}, TypeError, "head must return a scalar .* NoneType"),
    ("head: empty", {"head": lambda h: ()}, TypeError, "head must return a scalar .* got tuple"),
    ("head: number", {"head": lambda h: (h.sum(), 1.0)}, TypeError, "scalar tensors, got float"),
    (
        "head: complex",
        {"head": lambda h: h.sum() * 1j},
        ValueError,
        "head must return real scalars",
    ),
    # targets
    ("targets: long", {"targets": torch.zeros(7, 2)}, ValueError, r"targets .* 6 time .* \(7, 2\)"),
    (
        "targets: short",
        {"targets": (TOKENS, TOKENS[1:])},
        ValueError,
        "targets must have 6 time st",
    ),
    ("targets: scalar", {"targets": torch.zeros(())}, ValueError, r"targets must .* shape \(\)"),
    ("targets: number", {"targets": 3}, TypeError, "targets must be a tensor or .* got int"),
    (
        "targets: gradients",
        {"targets": torch.zeros(6, 2, requires_grad=True)},
        ValueError,
        "targets must not require gradients",
    ),
    # context
    ("context: dtype", {"context": h_0().double()}, ValueError, "context must have the dtype .*64"),
    ("context: device", {"context": h_0(device="meta")}, ValueError, "context must be on the dev"),
    ("context: number", {"context": [1.0]}, TypeError, "context must hold tensors, got float"),
    # state
    (
        "state: pair",
        {"state": (h_0(), h_0())},
        TypeError,
        "state must be a tensor h_0 for a RevGRU",
    ),
    ("state: shape", {"state": h_0(1, 3, 8)}, ValueError, r"state's h_0 must .* \(1, 2, 8\), got"),
    ("state: dtype", {"state": h_0().double()}, ValueError, "state's h_0 must have the dtype"),
    ("state: number", {"state": 0}, TypeError, "state must be a tensor h_0 .* got int"),
    ("state: no pair", {"rnn": lstm(), "state": h_0()}, TypeError, r"a pair \(h_0, c_0\).* Tensor"),
    (
        "state: three",
        {"rnn": lstm(), "state": (h_0(),) * 3},
        TypeError,
        r"state must be a pair \(h_0, c_0\) for a RevLSTM, got a tuple of 3",
    ),
    (
        "state: c_0",
        {"rnn": lstm(), "state": (h_0(), h_0(2, 2, 8))},
        ValueError,
        "state's c_0 must have shape",
    ),
    (
        "state: part",
        {"rnn": lstm(), "state": (h_0(), 1)},
        TypeError,
        "state's c_0 must be a dense tensor, got int",
    ),
    (
        "state: entries",
        {"rnn": [gru(), lstm(8)], "state": [h_0()]},
        ValueError,
        "state must be a list with one entry for each of the 2 modules of rnn, got a list of 1",
    ),
    (
        "state: no list",
        {"rnn": [gru()], "state": h_0()},
        ValueError,
        "state must be a list.* Tensor",
    ),
    # numbers and names
    ("chunk_size: 0", {"chunk_size": 0}, ValueError, "chunk_size must be a positive int, got 0"),
    ("chunk_size: 2.0", {"chunk_size": 2.0}, TypeError, "chunk_size must be a positive int, got 2"),
    ("chunk_size: True", {"chunk_size": True}, TypeError, "chunk_size must be a .* got True"),
    ("every: 0", {"checkpoint_every": 0}, ValueError, "checkpoint_every must be a positive int"),
    (
        "every: text",
        {"checkpoint_every": "x"},
        TypeError,
        "checkpoint_every .* int, 'auto' or None",
    ),
    ("every: 1.5", {"checkpoint_every": 1.5}, TypeError, "checkpoint_every must be .* got 1.5"),
    (
        "every: paper",
        {"rnn": gru(tape="paper"), "checkpoint_every": 4},
        ValueError,
        "checkpoint_every must be None with tape='paper', .* got 4",
    ),
    ("gradients", {"gradients": "late"}, ValueError, "gradients must be one of .* got 'late'"),
]


@pytest.mark.parametrize("gradients", ["eager", "lazy"])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_one_clear_sentence(
    gradients: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    options = {"rnn": gru(), "inputs": X, "head": head, "gradients": gradients, **arguments}
    if "head" in arguments:
        options["chunk_size"] = 2
    with pytest.raises(error, match=message) as caught:
        stream(options.pop("rnn"), options.pop("inputs"), options.pop("state", None), **options)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("gradients", ["eager", "lazy"])
@pytest.mark.parametrize("name", ["stem", "head"])
def test_work_in_place(name: str, gradients: str) -> None:
    """Without a tape nothing else would notice that the second run sees other numbers."""
    functions = {
        "stem": {"stem": lambda x: x.mul_(2), "head": head},
        "head": {"head": lambda h, y: (h[..., :4] - y.add_(1)).square().sum()},
    }
    targets = X.clone() if name == "head" else ()
    with pytest.raises(ValueError, match=f"{name} must not change its arguments in place"):
        stream(
            gru(reversible=False), X.clone(), targets=targets, gradients=gradients,
            **functions[name],
        )  # fmt: skip
    with torch.inference_mode():
        stream(gru(), X.clone(), targets=X.clone(), head=lambda h, y: y.add_(h[..., :4]).sum())


@pytest.mark.parametrize("gradients", ["eager", "lazy"])
def test_head_that_changes_its_mind(gradients: str) -> None:
    calls: Iterator[int] = iter(range(100))
    with pytest.raises(ValueError, match="as many scalars for every chunk, got 2 after 1"):
        stream(
            gru(),
            X,
            head=lambda h: (h.sum(),) * (1 + (next(calls) > 0)),
            chunk_size=2,
            gradients=gradients,
        )


def test_eager_needs_a_floating_scalar() -> None:
    with pytest.raises(
        ValueError, match=r"head's first scalar must be floating-point, got .*int64"
    ):
        stream(gru(), X, head=lambda h: (h > 0).sum())
    count, _ = stream(gru(), X, head=lambda h: (h > 9).sum(), gradients="lazy")
    assert int(count) == 0


def test_targets_with_gradients_are_fine_without_learning() -> None:
    target = torch.zeros(STEPS, BATCH, requires_grad=True)
    with torch.no_grad():
        stream(gru(), X, head=head, targets=target)


def test_wrong_order_of_checks_hides_nothing() -> None:
    """The user's functions do not run before all arguments are checked."""

    def never(*_: Tensor) -> Tensor:
        raise AssertionError("called")

    for bad in ({"targets": X[1:]}, {"chunk_size": 0}, {"checkpoint_every": "all"}):
        with pytest.raises((ValueError, TypeError)):
            stream(gru(), X, head=never, stem=never, **bad)
    with pytest.raises(ValueError, match="state's h_0"):
        stream(gru(), X, X, head=never, stem=never)

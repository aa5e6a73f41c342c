"""The toy tasks and their models."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("lightning_fabric")

from revrnn import RevGRU, RevLSTM
from revrnn.recipes import toy
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.toy import MODELS, TASKS, Model, draw, evaluate

REPEAT, MEMORISE = TASKS["repeat"], TASKS["memorise"]

sizes = st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**62))


def test_repeat_by_hand() -> None:
    tokens = torch.tensor([[3, 0], [7, 1]])  # (T, N)
    inputs = REPEAT.inputs(tokens)
    assert inputs.dtype == torch.float32
    assert inputs[:, 0].tolist() == [
        [0, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert torch.equal(REPEAT.answers(tokens), tokens)


def test_memorise_by_hand() -> None:
    tokens = torch.tensor([[3, 0], [7, 1]])
    inputs = MEMORISE.inputs(tokens)
    assert inputs[:, 0].tolist() == [
        [0, 0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 1],
    ]
    assert MEMORISE.answers(tokens).tolist() == [[7, 1], [3, 0]]


@given(sizes)
def test_repeating_asks_at_each_step_for_the_token_before(of: tuple[int, int, int]) -> None:
    length, rows, seed = of
    tokens = draw(length, rows, seed)
    inputs = REPEAT.inputs(tokens)
    assert inputs.shape == (length + 1, rows, 8)
    asked = inputs[-length:]  # the steps that answer
    # Step t reads token t, and answers with what step t - 1 read.
    assert torch.equal(REPEAT.answers(tokens), inputs[:-1].argmax(2))
    assert torch.equal(asked[:-1].argmax(2), tokens[1:])
    assert not asked[-1].any()
    assert torch.equal(inputs[:-1].sum(2), torch.ones(length, rows))


@given(sizes)
def test_memorising_asks_after_the_end_and_backwards(of: tuple[int, int, int]) -> None:
    length, rows, seed = of
    tokens = draw(length, rows, seed)
    inputs = MEMORISE.inputs(tokens)
    assert inputs.shape == (2 * length, rows, 9)
    flag = inputs[..., 8]
    assert not flag[:length].any()
    assert flag[length:].all()
    assert not inputs[length:, :, :8].any()
    assert torch.equal(inputs[:length, :, :8].argmax(2), tokens)
    assert torch.equal(MEMORISE.answers(tokens).flip(0), tokens)


@given(sizes)
def test_the_same_seed_draws_the_same(of: tuple[int, int, int]) -> None:
    torch.manual_seed(of[2] % 100)  # of no importance
    assert torch.equal(draw(*of), draw(*of))
    assert not torch.equal(draw(30, 10, of[2]), draw(30, 10, of[2] + 1))


def test_tokens_are_equally_likely() -> None:
    counts = draw(100, 800, 1).flatten().bincount(minlength=8)
    assert len(counts) == 8
    assert counts.sum() == 80_000
    # 5 standard deviations of a binomial count
    assert (counts - 10_000).abs().max() < 5 * math.sqrt(80_000 * (1 / 8) * (7 / 8))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_model_runs_and_learns_from_both_tasks(name: str, task: toy.Task) -> None:
    torch.manual_seed(1)
    model = Model(name, task.features, 6)
    tokens = draw(5, 3, 1)
    scores = model(task.inputs(tokens), 5)
    assert scores.shape == (5, 3, 8)
    scores.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    assert any(parameter.grad.any() for parameter in model.rnn.parameters())  # type: ignore[union-attr]


def test_models_are_what_they_are_called() -> None:
    kinds = {name: type(Model(name, 8, 4).rnn) for name in MODELS}
    assert kinds["gru"] is nn.GRU
    assert kinds["lstm"] is nn.LSTM
    assert kinds["revgru"] is kinds["nf-revgru"] is RevGRU
    assert kinds["revlstm"] is kinds["nf-revlstm"] is RevLSTM
    for name in ("revgru", "revlstm"):
        for prefix, tapeless in (("", False), ("nf-", True)):
            rnn = Model(prefix + name, 8, 4).rnn
            rnn(REPEAT.inputs(draw(5, 3, 1)))
            report = rnn.tape_report()
            assert (report.held_bits == 0) is tapeless


@pytest.mark.parametrize(
    ("name", "hidden", "message"),
    [
        ("rnn", 8, "there is no model 'rnn': choose gru, lstm"),
        ("gru", 0, "hidden must be 1 or more, got 0"),
        ("nf-revgru", 7, "hidden must be even for a nf-revgru"),
    ],
)
def test_models_that_cannot_be(name: str, hidden: int, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Model(name, 8, hidden)


# -- evaluation -----------------------------------------------------------------------------------


class Oracle(Model):
    """Knows the token at the step before; or, blind, answers 3 with certainty or not at all."""

    def __init__(self, sure: float, blind: bool = False) -> None:
        super().__init__("gru", 8, 1)
        self.sure, self.blind = sure, blind

    def forward(self, inputs: Tensor, answers: int) -> Tensor:
        assert not self.training
        if self.blind:
            shown = torch.zeros(answers, inputs.shape[1], 8)
            shown[..., 3] = 1
            return self.sure * shown
        return self.sure * inputs[:-1][-answers:]


def test_evaluation_counts_tokens_and_nats() -> None:
    tokens = draw(6, 50, 3)
    for rows in (1, 7, 50, 1000):
        right, loss = evaluate(Oracle(1.0), REPEAT, tokens, rows)
        assert right == 6
        assert loss == pytest.approx(math.log(math.e + 7) - 1, rel=1e-5)
        right, loss = evaluate(Oracle(0.0), REPEAT, tokens, rows)
        assert loss == pytest.approx(math.log(8), rel=1e-5)
        right, _ = evaluate(Oracle(1.0, blind=True), REPEAT, tokens, rows)
        assert right == pytest.approx(int((tokens == 3).sum()) / 50)
    model = Oracle(1.0)
    evaluate(model, REPEAT, tokens)
    assert model.training

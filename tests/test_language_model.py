"""The language model: sizes, streaming against the whole at once, regularisation, generation."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("pooch")

from revrnn.recipes.errors import RecipeError
from revrnn.recipes.language_model import (
    MODELS,
    PAPER_SIZES,
    LanguageModel,
    ModelConfig,
    ModelName,
    Usual,
    paper_report,
    parameter_count,
)

models = pytest.mark.parametrize("model", MODELS)
NO_DROPOUT = {f"{name}_dropout": 0.0 for name in ("embedding", "input", "output", "weight")}


def make(model: ModelName, hidden: tuple[int, ...] = (12, 8), **changes: object) -> LanguageModel:
    torch.manual_seed(0)
    bits = 3.0 if model.startswith("rev") else None
    options = {"words": 30, "hidden": hidden, "max_forget_bits": bits} | changes
    return LanguageModel(ModelConfig(model=model, **options))


def batch(steps: int = 20, rows: int = 3) -> tuple[Tensor, Tensor]:
    words = torch.randint(30, (steps + 1, rows), generator=torch.Generator().manual_seed(1))
    return words[:-1], words[1:]


@pytest.mark.parametrize(
    ("model", "layers", "millions"),
    [
        ("revgru", 1, 8.4),
        ("revgru", 2, 13.6),
        ("revlstm", 1, 9.7),
        ("revlstm", 2, 18.4),
        ("gru", 1, 9.0),
        ("gru", 2, 16.2),
        ("lstm", 1, 9.9),
        ("lstm", 2, 19.5),
    ],
)
def test_parameters_are_as_many_as_the_papers(
    model: ModelName, layers: int, millions: float
) -> None:
    with torch.device("meta"):
        made = LanguageModel(ModelConfig(model=model, hidden=PAPER_SIZES[layers]))
    assert round(parameter_count(made) / 1e6, 1) == millions


@pytest.mark.parametrize("model", ["revgru", "revlstm"])
@pytest.mark.parametrize("changes", [NO_DROPOUT, {}], ids=["plain", "dropout"])
def test_streaming_gives_the_loss_and_gradients_of_the_whole(
    model: ModelName, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("revrnn.recipes.language_model.LEAST_LOGITS", 0)  # small chunks
    words, targets = batch()
    results = []
    for streaming in (True, False):
        made = make(model, streaming=streaming, **changes)
        torch.manual_seed(2)
        _, state = made(words, targets)
        state = [_detached(part) for part in state]
        loss, state = made(words, targets, state)
        loss.backward()
        results.append((loss, state, {name: p.grad for name, p in made.named_parameters()}))
    (loss, state, gradients), (whole_loss, whole_state, whole_gradients) = results
    torch.testing.assert_close(loss, whole_loss)
    for own, other in zip(_flat(state), _flat(whole_state), strict=True):
        assert torch.equal(own, other)
    assert gradients.keys() == whole_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, whole_gradients[name], msg=lambda m, n=name: f"{n}: {m}"
        )


def _flat(state: object) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [tensor for part in state for tensor in _flat(part)]  # type: ignore[attr-defined]


def _detached(state: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    if isinstance(state, Tensor):
        return state.detach()
    return tuple(part.detach() for part in state)


@pytest.mark.parametrize("model", ["revgru", "revlstm"])
@pytest.mark.parametrize(
    ("bits", "z"), [(None, 0.5), (5.0, 0.5), (2.0, 0.5), (1.0, 0.625), (0.5, 2**-0.5 * 0.75 + 0.25)]
)
def test_layers_begin_like_those_of_torch(model: ModelName, bits: float | None, z: float) -> None:
    """Forget values in the middle, and as much variance of what recurrent weights add."""
    (layer,) = make(model, (400,), max_forget_bits=bits).layers
    least = 0.0 if bits is None else 2.0**-bits
    names = layer._cell.gate_names
    bias = layer.bias_l0.view(2, len(names), -1).sigmoid().mean((0, 2))
    for gate, begin in zip(names, bias.tolist(), strict=True):
        expected = z if gate in ("z", "f", "p") else 0.5
        value = least + (1 - least) * begin if gate in ("z", "f", "p") else begin
        assert value == pytest.approx(expected, abs=0.005)
    _, recurrent, *_ = nn.GRU(1, 400).all_weights[0]
    variance = 400 * recurrent.var()
    torch.testing.assert_close(200 * layer.weight_hh_l0.var(), variance, rtol=0.02, atol=0)


@pytest.mark.parametrize(("name", "kind"), [("gru", nn.GRU), ("lstm", nn.LSTM)])
def test_the_layers_to_compare_with_are_those_of_torch(
    name: str, kind: Callable[..., nn.RNNBase]
) -> None:
    torch.manual_seed(0)
    layer = Usual(name, 5, 8, weight_dropout=0.5)
    x = torch.randn(7, 3, 5)
    plain = kind(5, 8)
    plain.load_state_dict(layer.rnn.state_dict())
    layer.eval()
    output, state = layer(x)
    expected, expected_state = plain(x)
    assert torch.equal(output, expected)
    output, _ = layer(x, state)
    assert torch.equal(output, plain(x, expected_state)[0])

    layer.train()
    torch.manual_seed(3)
    output, _ = layer(x)
    torch.manual_seed(3)
    with torch.no_grad():
        dropped = nn.functional.dropout(plain.weight_hh_l0, 0.5)
        assert 0.3 < (dropped == 0).float().mean() < 0.7
        plain.weight_hh_l0.copy_(dropped)
    assert torch.equal(output, plain(x)[0])


@models
def test_the_loss_is_that_of_the_text_in_nats(model: ModelName) -> None:
    made = make(model).eval()
    words, targets = batch()
    loss, _ = made(words, targets)
    with torch.no_grad():
        outputs, _ = made.run(made.stem(words))
        log_p = made.head.logits(outputs).log_softmax(-1)
    expected = -log_p.gather(-1, targets.unsqueeze(-1)).mean()
    torch.testing.assert_close(loss.detach(), expected)


@models
def test_state_is_carried_on(model: ModelName) -> None:
    made = make(model).eval()
    words, targets = batch()
    with torch.no_grad():
        whole, whole_state = made(words, targets)
        first, state = made(words[:8], targets[:8])
        second, state = made(words[8:], targets[8:], state)
    torch.testing.assert_close((8 * first + 12 * second) / 20, whole)
    for own, other in zip(_flat(state), _flat(whole_state), strict=True):
        torch.testing.assert_close(own, other, atol=1e-3, rtol=0)


@models
def test_what_is_generated_follows_the_prompt(model: ModelName) -> None:
    made = make(model)
    prompt = batch()[0][:, 0]
    greedy = made.generate(prompt, 10, temperature=0)
    assert made.training
    made.eval()
    text = torch.tensor([*prompt.tolist(), *greedy])
    with torch.no_grad():
        outputs, _ = made.run(made.stem(text.unsqueeze(1)))
        likely = made.head.logits(outputs).argmax(-1).flatten()
    assert likely[len(prompt) - 1 : -1].tolist() == greedy
    draw = [
        made.generate(prompt, 10, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert draw[0] == draw[1] != draw[2]


def test_what_tapes_hold() -> None:
    words, targets = batch(40, 8)
    usual = make("lstm")
    usual(words, targets)[0].backward()
    assert usual.tape_report() is None
    assert paper_report(usual, words) is None
    made = make("revlstm", **NO_DROPOUT)
    made(words, targets)[0].backward()
    held = made.tape_report()
    paper = paper_report(made, words)
    assert held is not None
    assert paper is not None
    assert held.unit_steps == paper.unit_steps == 40 * 8 * 2 * 20
    assert paper.ideal_bits == pytest.approx(held.ideal_bits, rel=1e-3)
    assert held.ideal_bits < held.held_bits
    assert {layer.tape for layer in made.layers if hasattr(layer, "tape")} == {"entropy"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rnn"}, "no model 'rnn': choose revgru, revlstm, gru, lstm"),
        ({"hidden": ()}, "hidden sizes must be positive"),
        ({"hidden": (13,)}, r"hidden sizes of a revlstm must be even.*got \[13\]"),
        ({"max_forget_bits": 11.0}, r"max_forget_bits must be in \(0, 10\].*got 11"),
        ({"forget": "discrete"}, "max_forget_bits must be given with forget='discrete'"),
        ({"forget": "none", "max_forget_bits": 2.0}, "must be None with forget='none'.*got 2"),
        ({"model": "lstm", "forget": "none"}, "forget is only for revgru and revlstm, got none"),
        ({"estimator": "reinforce"}, "estimator must be one of 'gumbel', 'categorical'"),
        ({"model": "gru", "max_forget_bits": 2.0}, "only for revgru and revlstm, got 2 for gru"),
        ({"weight_dropout": 1.0}, "weight_dropout must be at least 0 and below 1, got 1"),
    ],
)
def test_models_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        ModelConfig(**changes)


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"forget": "discrete", "max_forget_bits": 2.0}, 2),
        ({"forget": "none", "max_forget_bits": None}, None),
    ],
)
def test_other_kinds_of_forgetting_train(settings: dict[str, object], bits: int | None) -> None:
    made = make("revgru", **settings)
    words, targets = batch()
    made(words, targets)[0].backward()
    report = made.tape_report()
    assert report is not None
    assert (report.held_bits > 0) == (bits is not None)
    assert made.layers[0].max_forget_bits == bits
    assert paper_report(made, words) is None  # there is no buffer of the paper's for these


def test_the_code_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[1] / "docs" / "language_models.md"
    (code,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    exec(code, {})
    assert "held/ideal" in capsys.readouterr().out


def test_the_smallest_temperature_is_that_of_the_likeliest_words() -> None:
    made = make("revgru")
    prompt = batch()[0][:, 0]
    greedy = made.generate(prompt, 10, temperature=0)
    for temperature in (1e-6, 1e-30, 1e-45):
        assert made.generate(prompt, 10, temperature=temperature) == greedy

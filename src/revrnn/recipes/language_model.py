"""A word-level language model: embedding, recurrent layers, softmax. One file, top to bottom.

Letters in shapes: T time steps, N batch rows, V words, E embedding features, H units of a layer.

Where what is dropped, in training (the paper's values):

    embedding    words, 0.1: a word dropped is zero wherever it stands
    input        features of the first layer's input, 0.3, one mask for all time steps
    weights      DropConnect on the hidden-to-hidden matrices, 0.5, one mask a call
    output       units of every layer's output, 0.4, one mask for all time steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

import revrnn
from revrnn import RevGRU, RevLSTM, _checks
from revrnn._base import ForgetName
from revrnn.diagnostics import LayerReport, TapeReport
from revrnn.forgetting import Estimator
from revrnn.recipes.errors import RecipeError

ModelName: TypeAlias = Literal["revgru", "revlstm", "gru", "lstm"]
MODELS: tuple[ModelName, ...] = get_args(ModelName)

State: TypeAlias = Any
"""Of every layer what its module returns: h_n, or (h_n, c_n). None at the beginning of a text."""

PAPER_SIZES = {1: (650,), 2: (1150, 650)}
"""The paper's hidden sizes by the number of layers; the embedding has 650 features in both."""


LEAST_LOGITS = 100_000
"""So many logits at least are streamed at once; and so many rows (time steps times batch) that the
logits are as large as the output matrix, whose gradient is made anew for every chunk and added up.
Fewer cost time, more memory: with 10,000 words and 650 units a training step took 1.4 times that of
nn.LSTM with all logits in chunks of 80 rows, 1.2 of 200, 1.1 of 700. With 141 words and 128 units
it took 1.8 times in chunks of 120 rows, 1.3 of 700."""


@dataclass(frozen=True)
class ModelConfig:
    """What makes a model; the defaults are the paper's."""

    model: ModelName = "revlstm"
    """revgru, revlstm, gru or lstm."""
    words: int = 10_000
    """V."""
    hidden: tuple[int, ...] = PAPER_SIZES[1]
    """H of each layer, the last of which is E too: the embedding is also the output matrix."""
    max_forget_bits: float | None = None
    """The most that a unit of a reversible layer may forget a step; None: no limit."""
    forget: ForgetName = "fractional"
    """How the units of reversible layers forget: fractional, discrete or none."""
    estimator: Estimator = "gumbel"
    """Of gradients with discrete forgetting: gumbel or categorical."""
    temperature: float = 1.0
    """Of the gumbel estimator."""
    embedding_dropout: float = 0.1
    input_dropout: float = 0.3
    output_dropout: float = 0.4
    weight_dropout: float = 0.5
    streaming: bool = True
    """Reversible layers are trained chunk by chunk, by `revrnn.stream`."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise RecipeError(f"there is no model {self.model!r}: choose {', '.join(MODELS)}.")
        if not self.hidden or min(self.hidden) < 1:
            raise RecipeError(f"hidden sizes must be positive, got {list(self.hidden)}.")
        if self.reversible and any(size % 2 for size in self.hidden):
            raise RecipeError(
                f"hidden sizes of a {self.model} must be even, since its units form two groups, "
                f"got {list(self.hidden)}."
            )
        for name in ("max_forget_bits", "forget"):
            value, usual = getattr(self, name), getattr(ModelConfig, name)
            if value != usual and not self.reversible:
                raise RecipeError(
                    f"{name} is only for revgru and revlstm, got {_plain(value)} for {self.model}."
                )
        try:
            _checks.forgetting(self.forget, self._bits, self.estimator, self.temperature)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{error}.") from error
        for name in ("embedding", "input", "output", "weight"):
            p = getattr(self, f"{name}_dropout")
            if not 0 <= p < 1:
                raise RecipeError(f"{name}_dropout must be at least 0 and below 1, got {p:g}.")

    @property
    def reversible(self) -> bool:
        return self.model.startswith("rev")

    @property
    def forgetting(self) -> dict[str, Any]:
        """The arguments of a reversible layer that say how it forgets."""
        return {
            "max_forget_bits": self._bits,
            "forget": self.forget,
            "estimator": self.estimator,
            "temperature": self.temperature,
        }

    @property
    def _bits(self) -> float | None:
        """Whole bits as an integer, as discrete forgetting wants them."""
        return cast("float | None", _plain(self.max_forget_bits))


def _plain(value: object) -> object:
    """A float that is a whole number as an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# ------------------------------------------------------------------------------- layers to compare


class Usual(nn.Module):
    """An nn.GRU or nn.LSTM of one layer with DropConnect: ``output, state = layer(x, state)``."""

    def __init__(self, model: str, inputs: int, hidden: int, weight_dropout: float) -> None:
        super().__init__()
        self.rnn = nn.LSTM(inputs, hidden) if model == "lstm" else nn.GRU(inputs, hidden)
        self.weight_dropout = weight_dropout

    def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        ih, hh, *biases = self.rnn.all_weights[0]
        weights = [ih, functional.dropout(hh, self.weight_dropout, self.training), *biases]
        if state is None:
            zeros = x.new_zeros(1, x.shape[1], self.rnn.hidden_size)  # (1, N, H)
            state = (zeros, zeros) if isinstance(self.rnn, nn.LSTM) else zeros
        # What the module's own forward calls, with its own matrix in the place of the second.
        options = (True, 1, 0.0, self.training, False, False)
        if isinstance(self.rnn, nn.LSTM):
            output, h, c = torch.lstm(x, state, weights, *options)
            return output, (h, c)
        return torch.gru(x, state, weights, *options)


# ------------------------------------------------------------------------------------ below, above


class Stem(nn.Module):
    """Words (T, N) to the first layer's input (T, N, E)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        features = config.hidden[-1]
        self.embedding = revrnn.EmbeddingDropout(config.words, features, config.embedding_dropout)
        self.dropout = revrnn.VariationalDropout(config.input_dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, words: Tensor) -> Tensor:
        return cast(Tensor, self.dropout(self.embedding(words)))


class Head(nn.Module):
    """The last layer's output (T, N, E) to losses; the output matrix is the embedding."""

    def __init__(self, config: ModelConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.dropout = revrnn.VariationalDropout(config.output_dropout)
        self.weight = embedding.weight  # (V, E)
        self.bias = nn.Parameter(torch.zeros(config.words))

    def logits(self, outputs: Tensor) -> Tensor:
        """(T, N, E) -> (T, N, V)."""
        return functional.linear(self.dropout(outputs), self.weight, self.bias)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of -log p(target) over all steps and rows, in nats."""
        logits = self.logits(outputs).flatten(0, 1)  # (T N, V)
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum")


# --------------------------------------------------------------------------------------- the model


class LanguageModel(nn.Module):
    """``loss, state = model(words, targets, state)``: nats a word, and the state after the last.

    ``words`` and ``targets`` are (T, N), the targets one step ahead.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = Stem(config)
        self.layers = nn.ModuleList()
        """Recurrent layers, with dropout between."""
        inputs = config.hidden[-1]
        for hidden in config.hidden:
            if len(self.layers):
                self.layers.append(revrnn.VariationalDropout(config.output_dropout))
            self.layers.append(_layer(config, inputs, hidden))
            inputs = hidden
        self.head = Head(config, self.stem.embedding)

    def forward(self, words: Tensor, targets: Tensor, state: State = None) -> tuple[Tensor, State]:
        if self.config.reversible and self.config.streaming:
            total, state = revrnn.stream(
                self.layers,
                words,
                state,
                stem=self.stem,
                head=self.head,
                targets=targets,
                chunk_size=self._chunk_size(words.shape[1]),
            )
        else:
            outputs, state = self.run(self.stem(words), state)
            total = self.head(outputs, targets)
        return total / targets.numel(), state

    def _chunk_size(self, batch: int) -> int:
        """Time steps that are streamed at once."""
        config = self.config
        rows = max(config.hidden[-1], LEAST_LOGITS // config.words)
        return max(1, rows // batch)

    def run(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        """The recurrent layers alone, all time steps at once: (T, N, E) -> (T, N, E)."""
        states = iter(state or [None] * len(self.config.hidden))
        finals = []
        for layer in self.layers:
            if isinstance(layer, revrnn.VariationalDropout):
                x = layer(x)
            else:
                x, final = layer(x, next(states))
                finals.append(final)
        return x, finals

    def tape_report(self) -> TapeReport | None:
        """Of all layers in the last training step; None where there is no tape."""
        reports: list[LayerReport] = []
        for layer in self.layers:
            if isinstance(layer, (RevGRU, RevLSTM)):
                reports += layer.tape_report().layers
        return TapeReport(reports) if reports else None

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> list[int]:
        """The words that follow a prompt (T,): drawn from ``p ** (1 / temperature)``, normalised;
        at temperature 0 the most likely ones."""
        training = self.training
        self.eval()
        outputs, state = self.run(self.stem(prompt.unsqueeze(1)))  # (T, 1, E)
        words: list[int] = []
        while len(words) < count:
            logits = self.head.logits(outputs[-1:]).flatten().float()  # (V,)
            if temperature == 0:
                word = logits.argmax(keepdim=True)
            else:
                # At most 0, so that a small temperature makes -inf at worst, and the largest 0.
                p = torch.softmax((logits - logits.max()).div(temperature), dim=0)
                word = torch.multinomial(p, 1, generator=generator)
            words.append(int(word))
            outputs, state = self.run(self.stem(word.unsqueeze(1)), state)
        self.train(training)
        return words


def _layer(config: ModelConfig, inputs: int, hidden: int) -> nn.Module:
    if not config.reversible:
        return Usual(config.model, inputs, hidden, config.weight_dropout)
    kind = RevGRU if config.model == "revgru" else RevLSTM
    layer = kind(inputs, hidden, weight_dropout=config.weight_dropout, **config.forgetting)
    _begin(layer)
    return layer


@torch.no_grad()
def _begin(layer: RevGRU | RevLSTM) -> None:
    """Let a reversible layer begin where the layer of torch.nn in its place does.

    A unit sees only H/2 others, so recurrent weights from ``U(-1/sqrt(H/2), 1/sqrt(H/2))`` give its
    pre-activations the variance that ``U(-1/sqrt(H), 1/sqrt(H))`` gives those of torch.nn. And with
    a bias of 0 a forget value would begin at ``a + (1 - a) / 2``, where it is 1/2 in torch.nn: the
    gate s has to begin at ``(1/2 - a) / (1 - a)``, that is with a bias of ``ln(1 - 2 a)``. At least
    with ``s = 1/4``, for the sake of gates that cannot go so low.
    """
    layer.get_parameter("weight_hh_l0").mul_(math.sqrt(2))
    if layer.forget != "fractional" or layer.max_forget_bits is None:
        return
    least = 2.0**-layer.max_forget_bits
    begin = max(1 / 4, (1 / 2 - least) / (1 - least))
    names = layer._cell.gate_names
    bias = layer.get_parameter("bias_l0").view(2, len(names), -1)  # (group, gate, H/2)
    for gate in ("z", "f", "p"):
        if gate in names:
            bias[:, names.index(gate)] += math.log(begin / (1 - begin))


def parameter_count(model: nn.Module) -> int:
    """Numbers that are learnt; those shared by two modules count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def paper_report(model: LanguageModel, words: Tensor, state: State = None) -> TapeReport | None:
    """What the paper's own buffer would hold for these words (T, N), measured with it: on the
    reference kernels, so that it takes a while. None where there is no tape, or none of the
    paper's."""
    if model.config.forget != "fractional":
        return None
    tapes = [layer for layer in model.layers if isinstance(layer, (RevGRU, RevLSTM))]
    if not tapes:
        return None
    for layer in tapes:
        layer.tape = "paper"
    try:
        with torch.enable_grad():
            model.run(model.stem(words), state)
        return model.tape_report()
    finally:
        for layer in tapes:
            layer.tape = "entropy"

"""The repeat and the memorisation task (the paper's section 3 and appendix B), and their models.

Letters in shapes: T tokens of a sequence, S time steps, N batch rows, H units.

Which step answers for which token, steps and tokens counted from 1:

    repeat       step       1    2    3   ...   T      T+1
                 input      x1   x2   x3  ...   xT     nothing
                 answer          x1   x2  ...   xT-1   xT

    memorise     step       1    2   ...  T     T+1   T+2   ...  2T
                 input      x1   x2  ...  xT    end   end   ...  end
                 answer                         xT    xT-1  ...  x1

A token is one of 8, as a one-hot vector. "nothing" is the vector of zeros. The end flag is a ninth
feature: 0 while there are tokens, 1 afterwards. In the repeat task the step that answers has
already read the next token, so the state has to carry a token for one step, and no further. In both
tasks the T answers are those of the last T steps; chance gets T/8 of them right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from revrnn import RevGRU, RevLSTM
from revrnn.recipes.errors import RecipeError

TOKENS = 8
"""Tokens there are; a power of two, and 3 bits each."""

BITS = 3
"""log2(TOKENS)."""


# ------------------------------------------------------------------------------------------ tasks


@dataclass(frozen=True)
class Task:
    """What a model reads and what it has to answer."""

    name: str
    features: int
    """Of the input."""
    inputs: Callable[[Tensor], Tensor]
    """Tokens (T, N) to input (S, N, features), float32."""
    answers: Callable[[Tensor], Tensor]
    """Tokens (T, N) to the answers of the last T steps (T, N)."""


def _one_hot(tokens: Tensor) -> Tensor:
    return functional.one_hot(tokens, TOKENS).float()  # (T, N, 8)


def _repeat_inputs(tokens: Tensor) -> Tensor:
    return functional.pad(_one_hot(tokens), (0, 0, 0, 0, 0, 1))  # (T + 1, N, 8)


def _memorise_inputs(tokens: Tensor) -> Tensor:
    length = len(tokens)
    inputs = functional.pad(_one_hot(tokens), (0, 1, 0, 0, 0, length))  # (2T, N, 9)
    inputs[length:, :, TOKENS] = 1
    return inputs


def _the_same(tokens: Tensor) -> Tensor:
    return tokens


def _reversed(tokens: Tensor) -> Tensor:
    return tokens.flip(0)


TASKS = {
    task.name: task
    for task in (
        Task("repeat", TOKENS, _repeat_inputs, _the_same),
        Task("memorise", TOKENS + 1, _memorise_inputs, _reversed),
    )
}


def draw(length: int, rows: int, seed: int) -> Tensor:
    """Tokens (T, N), each as likely as any other: the same for the same arguments."""
    return torch.randint(TOKENS, (length, rows), generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------- models

MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "revgru": (RevGRU, {}),
    "revlstm": (RevLSTM, {}),
    "nf-revgru": (RevGRU, {"forget": "none"}),
    "nf-revlstm": (RevLSTM, {"forget": "none"}),
}
"""By name: the kind of layer, and what is particular to it. nf: no forgetting."""


def check(model: str, hidden: int) -> None:
    """Raises a RecipeError if there is no such model."""
    if model not in MODELS:
        raise RecipeError(f"there is no model {model!r}: choose {', '.join(MODELS)}.")
    if hidden < 1:
        raise RecipeError(f"hidden must be 1 or more, got {hidden}.")
    if hidden % 2 and MODELS[model][0] in (RevGRU, RevLSTM):
        raise RecipeError(
            f"hidden must be even for a {model}, since its units form two groups, got {hidden}."
        )


class Model(nn.Module):
    """One recurrent layer, and the scores of the tokens read off its output."""

    def __init__(self, model: str, features: int, hidden: int) -> None:
        super().__init__()
        check(model, hidden)
        kind, particular = MODELS[model]
        self.rnn = kind(features, hidden, **particular)
        self.scores = nn.Linear(hidden, TOKENS)

    def forward(self, inputs: Tensor, answers: int) -> Tensor:
        """(S, N, features) to the scores of the last steps, (answers, N, 8)."""
        outputs, _ = self.rnn(inputs)  # (S, N, H)
        return cast(Tensor, self.scores(outputs[-answers:]))


@torch.no_grad()
def evaluate(model: Model, task: Task, tokens: Tensor, rows: int = 2000) -> tuple[float, float]:
    """On sequences (T, N): tokens answered rightly, on average a sequence, and the cross-entropy in
    nats a token. ``rows`` sequences are worked on at once."""
    training = model.training
    model.eval()
    right, total = 0, 0.0
    for part in tokens.split(rows, dim=1):
        scores = model(task.inputs(part), len(part)).flatten(0, 1)  # (T N, 8)
        answers = task.answers(part).flatten()
        right += int((scores.argmax(dim=1) == answers).sum())
        total += float(functional.cross_entropy(scores, answers, reduction="sum"))
    model.train(training)
    return right / tokens.shape[1], total / tokens.numel()

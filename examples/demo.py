"""Train a small RevLSTM and an nn.LSTM side by side, for about a minute, and compare them.

The task needs both remembering and forgetting. A sequence is made of records such as

    [ c a h e . . . ? c a h e . ? c a h e . . . . [ f b b d . . ? f b b d . .

"[" begins a record and four random letters follow. Then each symbol is drawn: usually a ".",
sometimes a "?", after which the letters come again, sometimes the "[" of the next record, whose
letters replace the old ones. The letters after a "?" can be predicted only by remembering them,
and all others are random. So the best possible loss is known, and so is that of the best model
without a memory.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import revrnn

LETTERS = 8
LETTERS_A_RECORD = 4
BEGIN, WAIT, ASK = LETTERS, LETTERS + 1, LETTERS + 2
SYMBOLS = LETTERS + 3
CHANCES = {BEGIN: 0.1, WAIT: 0.75, ASK: 0.15}

STEPS, BATCH = 120, 32
LOSSES_AVERAGED = 20


def records(rng: random.Random, length: int) -> tuple[list[int], list[float]]:
    """The symbols of a sequence, and how likely each was for somebody who knows the rules."""
    symbols: list[int] = []
    likely: list[float] = []
    letters: list[int] = []

    def add(new: list[int], each: float) -> None:
        symbols.extend(new)
        likely.extend([each] * len(new))

    while len(symbols) < length:
        kind = rng.choices(list(CHANCES), list(CHANCES.values()))[0] if letters else BEGIN
        add([kind], CHANCES[kind] if letters else 1.0)
        if kind == BEGIN:
            letters = [rng.randrange(LETTERS) for _ in range(LETTERS_A_RECORD)]
            add(letters, 1 / LETTERS)
        elif kind == ASK:
            add(letters, 1.0)
    return symbols[:length], likely[:length]


def make_batch(rng: random.Random) -> tuple[Tensor, float, float]:
    """Symbols (T+1, N), and the losses of the best model with and without a memory, in bits."""
    rows = [records(rng, STEPS + 1) for _ in range(BATCH)]
    symbols = torch.tensor([row for row, _ in rows]).t()
    likely = torch.tensor([row for _, row in rows]).t()[1:]
    best = -likely.log2()
    repeated = (symbols[1:] < LETTERS) & (likely == 1.0)
    forgetful = best + repeated * math.log2(LETTERS)
    return symbols, best.mean().item(), forgetful.mean().item()


class Model(nn.Module):
    """Symbols (T, N) to the logits of the next ones (T, N, SYMBOLS)."""

    def __init__(self, rnn: nn.Module, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, hidden)
        self.rnn = rnn
        self.head = nn.Linear(hidden, SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        out, _ = self.rnn(self.embedding(symbols))
        return self.head(out)


@dataclass
class Run:
    """A model in training."""

    model: Model
    losses: list[float] = field(default_factory=list)  # bits a symbol
    seconds: list[float] = field(default_factory=list)  # of each step

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def step(self, symbols: Tensor) -> None:
        start = time.perf_counter()
        logits = self.model(symbols[:-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), symbols[1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item() / math.log(2))

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses[-LOSSES_AVERAGED:])

    @property
    def milliseconds(self) -> float:
        return 1000 * statistics.median(self.seconds)


def train(seconds: float, hidden: int, seed: int) -> str:
    """Train for so long; returns the table."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    rnn = revrnn.RevLSTM(hidden, hidden, max_forget_bits=3)
    ours = Run(Model(rnn, hidden))
    theirs = Run(Model(nn.LSTM(hidden, hidden), hidden))
    runs = [ours, theirs]
    best: list[float] = []
    forgetful: list[float] = []
    start = time.monotonic()
    layout = "{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}"
    with tqdm(total=seconds, bar_format=layout, desc="training", disable=None) as bar:
        while (elapsed := time.monotonic() - start) < seconds:
            symbols, known, without_memory = make_batch(rng)
            best.append(known)
            forgetful.append(without_memory)
            runs.reverse()  # neither always goes first
            for run in runs:
                run.step(symbols)
            bar.n = min(elapsed, seconds)
            bar.set_postfix_str(f"loss {ours.loss:.3f}, best possible {known:.3f}", refresh=False)
            bar.refresh()
        bar.n = seconds
        bar.set_postfix_str(f"loss {ours.loss:.3f}")
    tape = rnn.tape_report()
    lines = [
        ("training steps", f"{len(ours.losses)}"),
        ("loss, bits a symbol", f"{ours.loss:.3f}"),
        ("  of nn.LSTM, same data and steps", f"{theirs.loss:.3f}"),
        ("  at the start", f"{ours.losses[0]:.3f}"),
        ("  best without a memory", f"{statistics.fmean(forgetful[-LOSSES_AVERAGED:]):.3f}"),
        ("  best possible", f"{statistics.fmean(best[-LOSSES_AVERAGED:]):.3f}"),
        ("tape, bits a unit a step", f"{tape.held_bits / tape.unit_steps:.3f}"),
        ("  ideal", f"{tape.ideal_bits / tape.unit_steps:.3f}"),
        ("  storing states in 32 bits takes", f"{tape.savings:.1f} times as much"),
        ("a training step, ms", f"{ours.milliseconds:.1f}"),
        ("  with nn.LSTM", f"{theirs.milliseconds:.1f}"),
        ("  ratio", f"{ours.milliseconds / theirs.milliseconds:.2f}"),
    ]
    width = max(len(name) for name, _ in lines)
    title = f"RevLSTM: {hidden} units, {STEPS} steps, batch {BATCH}, forgets at most 3 bits a step"
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in lines)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="to train for (default: 60)")
    parser.add_argument("--hidden", type=int, default=128, help="units, even (default: 128)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    options = parser.parse_args(arguments)
    if options.seconds <= 0:
        parser.error("--seconds must be positive")
    if options.hidden < 2 or options.hidden % 2:
        parser.error("--hidden must be a positive even number")
    print(train(options.seconds, options.hidden, options.seed))


if __name__ == "__main__":
    main()

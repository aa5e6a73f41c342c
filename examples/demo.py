"""Train a RevLSTM language model for a minute and a half, and show what it holds in memory.

The corpus is one that the package generates (src/revrnn/recipes/grammar.py): verbs agree with
subjects many words before, a tale's name comes back at its end and is worth nothing afterwards. So
both remembering and forgetting matter, and the best possible perplexity is known.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from revrnn import plots
from revrnn.diagnostics import live_bytes
from revrnn.recipes import corpora, training
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.language_model import LanguageModel
from revrnn.recipes.presets import preset

LENGTHS = (70, 700)
"""Time steps of the segments whose memory is compared: as in training, and ten times as long."""

ROUNDS = 7
"""Training steps of each model that are timed, in turns."""


def step(model: LanguageModel, words: Tensor) -> None:
    """A training step on words (T + 1, N), but for the optimiser's part."""
    loss, _ = model(words[:-1], words[1:])
    loss.backward()
    model.zero_grad(set_to_none=True)


def peak(model: LanguageModel, words: Tensor) -> int:
    """The most bytes of tensors alive at once in a step, weights not counted."""
    with live_bytes() as memory:
        step(model, words)
    return memory.peak


def seconds(models: Sequence[LanguageModel], words: Tensor) -> list[float]:
    """Medians of steps taken in turns."""
    taken: list[list[float]] = [[] for _ in models]
    for _ in range(ROUNDS):
        for model, times in zip(models, taken, strict=True):
            start = time.perf_counter()
            step(model, words)
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def compare(ours: LanguageModel, corpus: corpora.Corpus, batch: int) -> list[tuple[str, str]]:
    """Lines on memory and time of a training step, beside the same model with nn.LSTM."""
    theirs = LanguageModel(replace(ours.config, model="lstm", max_forget_bits=None)).train()
    ours.train()
    table = corpora.columns(corpus.train, batch)  # (T, N)
    lines = []
    for length in LENGTHS:
        words = table[: length + 1]
        own, other = peak(ours, words), peak(theirs, words)
        lines += [
            (f"a training step on {length} x {batch} words, memory", f"{own / 2**20:.1f} MiB"),
            ("  with nn.LSTM", f"{other / 2**20:.1f} MiB, {other / own:.1f} times as much"),
        ]
    own_time, other_time = seconds((ours, theirs), table[: LENGTHS[0] + 1])
    ratio = f"{own_time / other_time:.2f} times that with nn.LSTM"
    return [*lines, (f"a training step on {LENGTHS[0]} x {batch} words, time", ratio)]


def free_folder(base: Path) -> Path:
    """The first of base, base-2, base-3, ... that is not there."""
    others = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], others) if not path.exists())


def run(minutes: float, seed: int, out: Path) -> str:
    """Train, measure, draw; returns the table."""
    arguments = training.Arguments(**preset("demo-revlstm").changes, seed=seed)
    progress = training.train(arguments, training.Resources(out, max_minutes=minutes))
    trained = training.load(out)
    corpus = corpora.load(arguments.data)
    loss = training.evaluate(trained.model, corpus.valid, arguments.eval_batch, name="valid")
    best = corpus.entropy["valid"]
    rows = progress.rows
    tally = progress.tally
    if tally.tokens < 2 * arguments.batch * arguments.length and rows:
        held, ideal, savings = (rows[-1][n] for n in ("tape_bits", "ideal_bits", "savings"))
    else:
        held, ideal = tally.held_bits / tally.unit_steps, tally.ideal_bits / tally.unit_steps
        savings = tally.naive_bits / tally.held_bits
    lines = [
        ("epochs", f"{len(rows)} and {progress.position / 1000:.1f} thousand steps"),
        ("perplexity, validation text", f"{math.exp(loss):.3f}"),
        ("  best possible: that of the rules", f"{2**best:.3f}"),
        ("  of words drawn by frequency alone", f"{unigram(corpus):.1f}"),
        ("tape, bits a unit a step", f"{held:.3f}"),
        ("  ideal", f"{ideal:.3f}"),
        ("  tape / ideal", f"{held / ideal:.3f}"),
        ("  storing states in 32 bits takes", f"{savings:.1f} times as much"),
        *compare(trained.model, corpus, arguments.batch),
    ]
    width = max(len(name) for name, _ in lines)
    (hidden,) = arguments.sizes()
    title = (
        f"RevLSTM language model: {hidden} units, {len(corpus.vocabulary)} words, forgets at most "
        f"{arguments.max_forget_bits:g} bits a unit a step"
    )
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in lines)])


def unigram(corpus: corpora.Corpus) -> float:
    """The perplexity of the validation text for a model that knows how frequent each word is."""
    counts = torch.bincount(corpus.train, minlength=len(corpus.vocabulary)).double()
    return float((-(counts / counts.sum()).log()[corpus.valid]).mean().exp())


def draw(out: Path) -> list[Path]:
    """The plots of a run, if it has finished an epoch."""
    try:
        run = plots.Run.load(out)
    except ValueError:
        return []
    paths = [out / "curves.png", out / "savings.png"]
    plots.curves([run], paths[0])
    plots.savings([run], paths[1])
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.5, help="to train for (default: 1.5)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and segments (default: 1)")
    parser.add_argument(
        "--out", type=Path, help="run folder (default: runs/demo, or the first free runs/demo-N)"
    )
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be positive, got {options.minutes:g}")
    out = options.out or free_folder(Path("runs/demo"))
    print(f"training for {options.minutes:g} minutes on generated text, into {out}", flush=True)
    try:
        print(run(options.minutes, options.seed, out))
    except RecipeError as error:
        sys.exit(f"demo: {error}")
    for path in draw(out):
        print(f"plot: {path}")
    print(f"metrics, checkpoints, TensorBoard: {out}")
    print(f"let it write: revrnn lm generate {out} --prompt 'a tale of <juno>'")


if __name__ == "__main__":
    main()

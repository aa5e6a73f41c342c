"""An epoch of the paper's language models, and of those with torch.nn's layers, timed in turns.

    python -m benchmarks.language_model --data ptb                  a whole epoch of each: hours
    python -m benchmarks.language_model --data ptb --segments 30    its first segments

All models of a number of layers train on the same segments of text, one after the other in shuffled
order, each from its own weights: the presets' sizes, dropout, clipping and SGD. The reversible ones
are streamed, the others hold all states and logits. Given are the seconds of an epoch (in
proportion, if not all of it is run), the ratio of the median steps to torch.nn's and, in brackets,
the quartiles of the ratios within a segment; and what the tape holds. Rows go to
results/epochs.csv.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import revrnn
from benchmarks import _measure
from benchmarks._measure import Times
from revrnn.recipes import corpora, markdown, training
from revrnn.recipes.corpora import Corpus
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.language_model import LanguageModel, State
from revrnn.recipes.presets import preset

CSV = _measure.ROOT / "results" / "epochs.csv"
PRESETS = {"revgru": "ptb-revgru-{}l-2bit", "revlstm": "ptb-revlstm-{}l-3bit"}
"""Of the reversible models; the others are ptb-gru-1l and so on."""
COUNTERPARTS = {"revgru": "gru", "revlstm": "lstm", "gru": "gru", "lstm": "lstm"}


class Trainee:
    """A model in training, a segment at a time."""

    def __init__(self, arguments: training.Arguments, corpus: Corpus) -> None:
        self.arguments = arguments
        torch.manual_seed(training.seed_of("weights", arguments.seed))
        self.model = LanguageModel(arguments.model_config(len(corpus.vocabulary))).train()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=arguments.learning_rate, weight_decay=arguments.weight_decay
        )
        self.text = corpora.columns(corpus.train, arguments.batch)  # (T, N)
        self.position = self.done = 0
        self.state: State = None
        self.nats = self.held = self.ideal = self.naive = 0.0

    @property
    def steps(self) -> int:
        """Time steps of an epoch."""
        return len(self.text) - 1

    def segment(self) -> None:
        """The next segment; after the last one, the first."""
        length = training.segment_length(self.arguments, self.done)
        length = min(length, self.steps - self.position)
        words = self.text[self.position : self.position + length + 1]  # (C + 1, N)
        loss, state = self.model(words[:-1], words[1:], self.state)
        self.state = revrnn.truncation.detach(state)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.arguments.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.arguments.learning_rate * length / self.arguments.length
        self.optimizer.step()
        self.done += 1
        self.position += length
        if self.position == self.steps:
            self.position, self.state = 0, None
        self.nats += loss.item()
        report = self.model.tape_report()
        if report is not None:
            self.held += report.held_bits
            self.ideal += report.ideal_bits
            self.naive += report.naive_bits


@dataclass(frozen=True)
class Result:
    """Of one model."""

    name: str
    layers: int
    seconds: float
    """Of an epoch, in proportion to the segments that were run."""
    times: Times
    base: Times
    """Of the counterpart."""
    trainee: Trainee

    def cells(self) -> list[str]:
        ratio = self.times.ratio(self.base)
        taped = self.trainee.held > 0
        return [
            ", ".join(map(str, self.trainee.arguments.sizes())),
            self.name,
            f"{self.seconds:,.0f}",
            f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
            f"{math.exp(self.trainee.nats / self.trainee.done):.1f}",
            f"{self.trainee.naive / self.trainee.held:.1f}" if taped else "",
            f"{self.trainee.held / self.trainee.ideal:.3f}" if taped else "",
        ]

    def row(self) -> dict[str, object]:
        ratio, trainee = self.times.ratio(self.base), self.trainee
        return {
            **_measure.environment(),
            "data": trainee.arguments.data,
            "model": self.name,
            "layers": self.layers,
            "hidden": " ".join(map(str, trainee.arguments.sizes())),
            "max_forget_bits": trainee.arguments.max_forget_bits,
            "segments": trainee.done,
            "epoch_seconds": round(self.seconds, 1),
            "ratio": round(ratio.value, 4),
            "ratio_low": round(ratio.low, 4),
            "ratio_high": round(ratio.high, 4),
            "train_perplexity": round(math.exp(trainee.nats / trainee.done), 3),
            "held_over_ideal": round(trainee.held / trainee.ideal, 4) if trainee.held else None,
            "savings": round(trainee.naive / trainee.held, 3) if trainee.held else None,
        }


HEADER = (
    "hidden", "model", "s an epoch", "x torch.nn", "perplexity so far", "32-bit / tape",
    "tape / ideal",
)  # fmt: skip


def trainees(layers: int, data: str, hidden: str, corpus: Corpus) -> dict[str, Trainee]:
    found = {}
    for name in COUNTERPARTS:
        row = preset(PRESETS.get(name, f"ptb-{name}-{{}}l").format(layers))
        arguments = training.Arguments(**{**row.changes, "data": data, "hidden": hidden})
        found[name] = Trainee(arguments, corpus)
    return found


def segments_an_epoch(trainee: Trainee) -> int:
    """How many there are, for all models alike."""
    count = position = 0
    while position < trainee.steps:
        position += training.segment_length(trainee.arguments, count)
        count += 1
    return count


def run(layers: int, options: argparse.Namespace, corpus: Corpus) -> list[Result]:
    models = trainees(layers, options.data, options.hidden, corpus)
    whole = segments_an_epoch(models["gru"])
    count = min(options.segments or whole, whole)
    with tqdm(total=count * len(models), desc=f"{layers} layer(s)", disable=None) as bar:
        times = _measure.interleave(
            {name: trainee.segment for name, trainee in models.items()},
            count,
            warm_up=0,
            after_each=bar.update,
        )
    return [
        Result(
            name=name,
            layers=layers,
            seconds=sum(times[name].seconds) * whole / count,
            times=times[name],
            base=times[COUNTERPARTS[name]],
            trainee=trainee,
        )
        for name, trainee in models.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="ptb", help="ptb, wikitext2, demo or a folder (ptb)")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2], help="(1 2)")
    parser.add_argument("--segments", type=int, help="of the epoch; default: all of it")
    parser.add_argument("--hidden", default="", help="sizes of the layers; default: the paper's")
    parser.add_argument("--threads", type=int, default=2, help="(2)")
    parser.add_argument("--csv", type=Path, default=CSV, help=f"({CSV.name})")
    options = parser.parse_args(arguments)
    if options.segments is not None and options.segments < 1:
        parser.error(f"--segments must be 1 or more, got {options.segments}")
    torch.set_num_threads(options.threads)
    try:
        corpus = corpora.load(options.data)
        results = [part for layers in options.layers for part in run(layers, options, corpus)]
    except RecipeError as error:
        sys.exit(f"benchmarks.language_model: {error}")
    print(markdown.table(HEADER, [result.cells() for result in results]))
    _measure.append_csv(options.csv, [result.row() for result in results])


if __name__ == "__main__":
    main()

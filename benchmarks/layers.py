"""RevGRU and RevLSTM against torch.nn.GRU and torch.nn.LSTM: time, and the account of the tape.

    python -m benchmarks.layers              the table
    python -m benchmarks.layers --quick      the same from three runs each
    python -m benchmarks.layers --readme     also into README.md, docs/ and benchmarks/results/

Each layer runs on the same normal input of T steps, N rows and H features, with H hidden units and
the weights of its reset_parameters(). A *step* is a forward pass that returns all outputs and a
backward pass with gradients for the input and all weights; *forward* is one without gradients. All
layers of a shape run once a round, in shuffled order; given are medians, ratios of medians and, in
brackets, the quartiles of the ratios within a round.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from tqdm import tqdm

import revrnn
from benchmarks import _measure
from benchmarks._measure import Ratio, Times
from revrnn.diagnostics import TapeReport
from revrnn.recipes import markdown

FORGET_BITS = 3
CSV = _measure.RESULTS / "layers.csv"
README = _measure.ROOT / "README.md"
EXACTNESS = _measure.ROOT / "docs" / "exactness.md"


@dataclass(frozen=True)
class Shape:
    """The size of an input, and of the layer: the input has as many features as it has units."""

    steps: int
    batch: int
    hidden: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        try:
            steps, batch, hidden = map(int, text.split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"a shape is TxNxH, as in 70x20x650, got {text!r}"
            ) from None
        if min(steps, batch, hidden) < 1 or hidden % 2:
            raise argparse.ArgumentTypeError(
                f"a shape has three positive numbers, the last one even, got {text!r}"
            )
        return cls(steps, batch, hidden)

    def __str__(self) -> str:
        return f"{self.steps}x{self.batch}x{self.hidden}"

    def lengths(self) -> Tensor:
        """Ragged: from T/2 to T, evenly, in a shuffled order."""
        lengths = torch.linspace((self.steps + 1) // 2, self.steps, self.batch).round().long()
        lengths[-1] = self.steps
        return lengths[torch.randperm(self.batch, generator=torch.Generator().manual_seed(1))]


@dataclass(frozen=True)
class Model:
    """A layer of torch.nn, and the reversible one that takes its place."""

    name: str
    theirs: type[nn.RNNBase]
    ours: type[nn.Module]

    @property
    def their_name(self) -> str:
        return f"nn.{self.theirs.__name__}"


MODELS = (
    Model("RevGRU", nn.GRU, revrnn.RevGRU),
    Model("RevLSTM", nn.LSTM, revrnn.RevLSTM),
)

# What we aim at, as a part of torch.nn's time: of a step, by shape; of a forward pass, everywhere.
STEP_TARGETS = {
    (Shape(70, 20, 650), "RevGRU"): 0.75,
    (Shape(70, 20, 650), "RevLSTM"): 1.35,
    (Shape(70, 20, 1150), "RevGRU"): 0.55,
    (Shape(70, 20, 1150), "RevLSTM"): 1.35,
    (Shape(500, 16, 128), "RevGRU"): 0.50,
    (Shape(500, 16, 128), "RevLSTM"): 1.30,
    (Shape(13, 64, 300), "RevGRU"): 0.95,
    (Shape(13, 64, 300), "RevLSTM"): 1.40,
}
SHAPES = tuple(dict.fromkeys(shape for shape, _ in STEP_TARGETS))
FORWARD_TARGETS = {"RevGRU": 0.80, "RevLSTM": 1.15}
PACKED_TARGET = 1.0

BUSY = 0.25
"""A spread of times beyond which they say more about the machine than about the layers."""


@dataclass(frozen=True)
class Result:
    """One layer at one shape."""

    shape: Shape
    model: Model
    times: dict[str, Times]
    """By task: ``torch``, ``ours``, ``stored`` and ``packed`` are steps, ``torch forward`` and
    ``ours forward`` are not."""
    tape: TapeReport

    @property
    def step(self) -> Ratio:
        return self.times["ours"].ratio(self.times["torch"])

    @property
    def stored(self) -> Ratio:
        """``reversible=False``, against torch.nn."""
        return self.times["stored"].ratio(self.times["torch"])

    @property
    def forward(self) -> Ratio:
        return self.times["ours forward"].ratio(self.times["torch forward"])

    @property
    def packed(self) -> Ratio:
        """Ragged sequences, packed, against the padded batch."""
        return self.times["packed"].ratio(self.times["ours"])


def measure(shape: Shape, repeats: int, *, after_each: Callable[[], object]) -> list[Result]:
    """Both layers at one shape."""
    tasks: dict[str, Callable[[], object]] = {}
    tapes = {}
    for model in MODELS:
        torch.manual_seed(0)
        x = torch.randn(shape.steps, shape.batch, shape.hidden)
        packed = pack_padded_sequence(x, shape.lengths(), enforce_sorted=False)
        theirs = model.theirs(shape.hidden, shape.hidden)
        ours, stored = (
            model.ours(
                shape.hidden, shape.hidden, max_forget_bits=FORGET_BITS, reversible=reversible
            )
            for reversible in (True, False)
        )
        ours(x)
        tapes[model.name] = ours.tape_report()
        for name, task in {
            "torch": step(theirs, x),
            "ours": step(ours, x),
            "stored": step(stored, x),
            "packed": step(ours, packed),
            "torch forward": forward(theirs, x),
            "ours forward": forward(ours, x),
        }.items():
            tasks[f"{model.name} {name}"] = task
    times = _measure.interleave(tasks, repeats, after_each=after_each)
    return [
        Result(
            shape,
            model,
            {
                name.removeprefix(f"{model.name} "): value
                for name, value in times.items()
                if name.startswith(f"{model.name} ")
            },
            tapes[model.name],
        )
        for model in MODELS
    ]


TASKS = 6 * len(MODELS)


def step(rnn: nn.Module, x: Tensor | PackedSequence) -> Callable[[], object]:
    """Forward and backward: gradients of the input and of all weights."""
    leaf = x.data.detach().requires_grad_()
    x = x._replace(data=leaf) if isinstance(x, PackedSequence) else leaf
    wanted = [leaf, *rnn.parameters()]
    hidden = int(getattr(rnn, "hidden_size"))  # noqa: B009
    generator = torch.Generator().manual_seed(2)
    gradient = torch.randn(*leaf.shape[:-1], hidden, generator=generator)

    def run() -> object:
        out, _ = rnn(x)
        return torch.autograd.grad(
            out.data if isinstance(out, PackedSequence) else out, wanted, gradient
        )

    return run


def forward(rnn: nn.Module, x: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> object:
        return rnn(x)

    return run


# ---------------------------------------------------------------------------------------- tables


def time_table(results: Sequence[Result]) -> str:
    header = [
        "T x N x H",
        "layer",
        "torch.nn, ms",
        "step",
        "target",
        "states stored",
        "packed / padded",
        "forward",
        "target",
    ]
    rows = []
    for result in results:
        target = STEP_TARGETS.get((result.shape, result.model.name))
        rows.append(
            [
                str(result.shape).replace("x", " x "),
                result.model.name,
                f"{1000 * result.times['torch'].median:.1f}",
                _spread(result.step),
                "" if target is None else f"{target:.2f}",
                f"{result.stored.value:.2f}",
                f"{result.packed.value:.2f}",
                _spread(result.forward),
                f"{FORWARD_TARGETS[result.model.name]:.2f}",
            ]
        )
    return markdown.table(header, rows)


def tape_table(results: Sequence[Result]) -> str:
    header = [
        "T x N x H",
        "layer",
        "held, bits a unit a step",
        "ideal",
        "held / ideal",
        "32-bit states / held",
    ]
    rows = []
    for result in results:
        tape = result.tape
        rows.append(
            [
                str(result.shape).replace("x", " x "),
                result.model.name,
                f"{tape.held_bits / tape.unit_steps:.3f}",
                f"{tape.ideal_bits / tape.unit_steps:.3f}",
                f"{tape.overhead:.3f}",
                f"{tape.savings:.1f}",
            ]
        )
    return markdown.table(header, rows)


def account_table(results: Sequence[Result]) -> str:
    """Where the bits beyond the ideal are, a batch row."""
    header = ["T x N x H", "layer", "ideal", "tape", "lanes", "held - ideal", "held / ideal"]
    rows = []
    for result in results:
        (layer,) = result.tape.layers
        batch = result.shape.batch
        rows.append(
            [
                str(result.shape).replace("x", " x "),
                result.model.name,
                f"{layer.ideal_bits / batch:.0f}",
                f"{layer.tape_bits / batch:.0f}",
                f"{layer.lane_bits / batch:.0f}",
                f"{(layer.held_bits - layer.ideal_bits) / batch:.0f}",
                f"{layer.overhead:.4f}",
            ]
        )
    return markdown.table(header, rows)


def _spread(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def provenance(repeats: int) -> str:
    """One line on how a table came about."""
    about = _measure.environment()
    return (
        f"`python -m benchmarks.layers --readme`: medians of {repeats} runs on {about['cpu']}, "
        f"{about['threads']} threads, kernels {about['kernels']}, torch {about['torch']}, "
        f"Python {about['python']}, commit {about['commit']}, {str(about['date'])[:10]}."
    )


def csv_rows(results: Sequence[Result], repeats: int) -> list[dict[str, object]]:
    """A row a task."""
    about = _measure.environment()
    rows: list[dict[str, object]] = []
    for result in results:
        tape = result.tape
        for task, (base, target) in {
            "torch": ("torch", None),
            "ours": ("torch", STEP_TARGETS.get((result.shape, result.model.name))),
            "stored": ("torch", None),
            "packed": ("ours", PACKED_TARGET),
            "torch forward": ("torch forward", None),
            "ours forward": ("torch forward", FORWARD_TARGETS[result.model.name]),
        }.items():
            times = result.times[task]
            ratio = times.ratio(result.times[base])
            held = task == "ours"
            rows.append(
                {
                    **about,
                    "steps": result.shape.steps,
                    "batch": result.shape.batch,
                    "hidden": result.shape.hidden,
                    "layer": result.model.their_name
                    if task.startswith("torch")
                    else result.model.name,
                    "task": task,
                    "repeats": repeats,
                    "ms": f"{1000 * times.median:.3f}",
                    "ms_low": f"{1000 * _measure.quantile(times.seconds, 0.25):.3f}",
                    "ms_high": f"{1000 * _measure.quantile(times.seconds, 0.75):.3f}",
                    "base": base,
                    "ratio": f"{ratio.value:.4f}",
                    "ratio_low": f"{ratio.low:.4f}",
                    "ratio_high": f"{ratio.high:.4f}",
                    "target": "" if target is None else target,
                    "held_bits": tape.held_bits if held else "",
                    "ideal_bits": f"{tape.ideal_bits:.1f}" if held else "",
                    "naive_bits": tape.naive_bits if held else "",
                    "unit_steps": tape.unit_steps if held else "",
                }
            )
    return rows


def write_docs(results: Sequence[Result], repeats: int) -> None:
    line = provenance(repeats)
    _measure.rewrite_block(
        README, "benchmarks.layers", f"{time_table(results)}\n\n{tape_table(results)}\n\n{line}"
    )
    _measure.rewrite_block(EXACTNESS, "benchmarks.layers", f"{account_table(results)}\n\n{line}")


# ------------------------------------------------------------------------------------------ main


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=Shape.parse,
        default=list(SHAPES),
        metavar="TxNxH",
        help=f"steps x batch x hidden units (default: {' '.join(map(str, SHAPES))})",
    )
    parser.add_argument(
        "--repeats", type=int, help="rounds that count, after one that does not (default: 21)"
    )
    parser.add_argument("--quick", action="store_true", help="--repeats 3")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of torch and of our kernels (default: 2)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append a row a task to this file")
    parser.add_argument(
        "--readme",
        action="store_true",
        help="write the tables into README.md and docs/exactness.md, and the rows, unless --csv "
        "says otherwise, to benchmarks/results/layers.csv",
    )
    options = parser.parse_args(arguments)
    if options.repeats is None:
        options.repeats = 3 if options.quick else 21
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    if options.readme and options.csv is None:
        options.csv = CSV
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    results: list[Result] = []
    total = len(options.shapes) * TASKS * (1 + options.repeats)
    with tqdm(total=total, unit="run", disable=None) as bar:
        for shape in options.shapes:
            bar.set_description(str(shape))
            results += measure(shape, options.repeats, after_each=functools.partial(bar.update, 1))
    print("Time of a step and of a forward pass, as a part of torch.nn's (quartiles):\n")
    print(time_table(results))
    print(f"\nWhat a forward pass holds for its backward pass, F = {FORGET_BITS}:\n")
    print(tape_table(results))
    print(f"\n{provenance(options.repeats)}")
    spread = max(times.spread for result in results for times in result.times.values())
    if spread > BUSY:
        print(
            f"The quartiles of one task lie {spread:.0%} of its median apart: this machine was "
            "busy with other things, and the times are not to be relied on.",
            file=sys.stderr,
        )
    if options.csv is not None:
        _measure.append_csv(options.csv, csv_rows(results, options.repeats))
        print(f"Rows appended to {options.csv}")
    if options.readme:
        write_docs(results, options.repeats)
        print(f"Tables written to {README} and {EXACTNESS}")


if __name__ == "__main__":
    main()

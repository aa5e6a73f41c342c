"""What other kinds of forgetting cost: a training step of each, beside that of the plain layer.

    python -m benchmarks.variants            the table
    python -m benchmarks.variants --docs     also into docs/forgetting.md and benchmarks/results/

Layers with the same input of T steps, N rows and H features, H units and F = 3 where there is an F;
a step is forward and backward with gradients of input and all weights. All variants of a shape run
once a round, in shuffled order; given are ratios of medians and, in brackets, the quartiles of the
ratios within a round. A layer that chooses among F + 1 amounts has F + 1 columns of weights for
each gate that forgets: *weights* is the ratio of their number.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import revrnn
from benchmarks import _measure
from benchmarks._measure import Ratio, Times
from benchmarks.layers import Shape, step
from revrnn.recipes import markdown

CSV = _measure.RESULTS / "variants.csv"
DOCS = _measure.ROOT / "docs" / "forgetting.md"
SHAPES = (Shape(70, 20, 200), Shape(70, 20, 650), Shape(200, 16, 128))
KINDS = {"RevGRU": revrnn.RevGRU, "RevLSTM": revrnn.RevLSTM}
PLAIN = "fractional, 3 bits"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {"max_forget_bits": 3},
    "none": {"forget": "none"},
    "discrete, 1 bit": {"forget": "discrete", "max_forget_bits": 1},
    "discrete, 2 bits": {"forget": "discrete", "max_forget_bits": 2},
    "discrete, 3 bits": {"forget": "discrete", "max_forget_bits": 3},
    "hidden_dropout=0.3": {"max_forget_bits": 3, "hidden_dropout": 0.3},
    "zoneout=0.1": {"max_forget_bits": 3, "zoneout": 0.1},
}
TARGET = 1.3


@dataclass(frozen=True)
class Result:
    """One variant of one layer at one shape."""

    shape: Shape
    layer: str
    variant: str
    times: Times
    plain: Times
    weights: float
    """Their number, over that of the plain layer."""
    bits: float
    """Held, a unit a step."""

    @property
    def ratio(self) -> Ratio:
        return self.times.ratio(self.plain)


def measure(shape: Shape, repeats: int, *, after_each: functools.partial[Any]) -> list[Result]:
    """All variants of both layers at one shape."""
    torch.manual_seed(0)
    x = torch.randn(shape.steps, shape.batch, shape.hidden)
    modules = {
        (layer, variant): kind(shape.hidden, shape.hidden, **settings)
        for layer, kind in KINDS.items()
        for variant, settings in VARIANTS.items()
    }
    tasks = {f"{layer} {variant}": step(rnn, x) for (layer, variant), rnn in modules.items()}
    times = _measure.interleave(tasks, repeats, after_each=after_each)
    results = []
    for (layer, variant), rnn in modules.items():
        rnn(x)
        report = rnn.tape_report()
        results.append(
            Result(
                shape,
                layer,
                variant,
                times[f"{layer} {variant}"],
                times[f"{layer} {PLAIN}"],
                count(rnn) / count(modules[layer, PLAIN]),
                report.held_bits / report.unit_steps,
            )
        )
    return results


def count(rnn: nn.Module) -> int:
    return sum(parameter.numel() for parameter in rnn.parameters())


def table(results: Sequence[Result]) -> str:
    shapes = list(dict.fromkeys(result.shape for result in results))
    header = [
        "layer",
        "forgetting",
        "weights",
        *(str(shape).replace("x", " x ") for shape in shapes),
    ]
    rows = []
    for layer in KINDS:
        for variant in VARIANTS:
            own = [r for r in results if (r.layer, r.variant) == (layer, variant)]
            if variant == PLAIN:
                cells = [f"{1000 * result.times.median:.1f} ms" for result in own]
            else:
                cells = [f"{r.ratio.value:.2f} ({r.ratio.low:.2f}-{r.ratio.high:.2f})" for r in own]
            rows.append([layer, variant, f"{own[0].weights:.2f}", *cells])
    return markdown.table(header, rows)


def provenance(repeats: int) -> str:
    """One line on how a table came about."""
    about = _measure.environment()
    return (
        f"`python -m benchmarks.variants --docs`: medians of {repeats} runs on {about['cpu']}, "
        f"{about['threads']} threads, kernels {about['kernels']}, torch {about['torch']}, "
        f"commit {about['commit']}, {str(about['date'])[:10]}."
    )


def csv_rows(results: Sequence[Result], repeats: int) -> list[dict[str, object]]:
    about = _measure.environment()
    return [
        {
            **about,
            "steps": result.shape.steps,
            "batch": result.shape.batch,
            "hidden": result.shape.hidden,
            "layer": result.layer,
            "variant": result.variant,
            "repeats": repeats,
            "ms": f"{1000 * result.times.median:.3f}",
            "ratio": f"{result.ratio.value:.4f}",
            "ratio_low": f"{result.ratio.low:.4f}",
            "ratio_high": f"{result.ratio.high:.4f}",
            "target": TARGET,
            "weights": f"{result.weights:.4f}",
            "held_bits": f"{result.bits:.4f}",
        }
        for result in results
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.variants",
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
        "--repeats",
        type=int,
        default=21,
        help="rounds, after one that does not count (default: 21)",
    )
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append a row a variant to a file")
    parser.add_argument(
        "--docs",
        action="store_true",
        help="write the table into docs/forgetting.md, and the rows, unless --csv says otherwise, "
        "to benchmarks/results/variants.csv",
    )
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    if options.docs and options.csv is None:
        options.csv = CSV
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    results: list[Result] = []
    total = len(options.shapes) * len(KINDS) * len(VARIANTS) * (1 + options.repeats)
    with tqdm(total=total, unit="run", disable=None) as bar:
        for shape in options.shapes:
            bar.set_description(str(shape))
            results += measure(shape, options.repeats, after_each=functools.partial(bar.update, 1))
    print(f"Time of a training step, as a part of that with {PLAIN} (quartiles):\n")
    print(table(results))
    print(f"\n{provenance(options.repeats)}")
    if options.csv is not None:
        _measure.append_csv(options.csv, csv_rows(results, options.repeats))
        print(f"Rows appended to {options.csv}")
    if options.docs:
        text = f"{table(results)}\n\n{provenance(options.repeats)}"
        _measure.rewrite_block(DOCS, "benchmarks.variants", text)
        print(f"Table written to {DOCS}")


if __name__ == "__main__":
    main()

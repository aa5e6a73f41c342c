"""Memory and time of a training step against the length of the sequence.

    python -m benchmarks.memory

An embedding, one recurrent layer and a softmax over the vocabulary are trained for a step by every
method, each in a process of its own: the peak is what the process needed at most during the step
above what it had before, after a warm-up on 16 time steps, with the allocator as it is: what malloc
keeps back counts. With several rounds medians count, and the table shows the range of the peaks.
Prints a table, appends a CSV row a case, and draws the plot of all that the CSV file has of these
sizes.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from benchmarks._measure import (
    RESULTS,
    ROOT,
    append_csv,
    environment,
    rewrite_block,
)
from benchmarks._memory_case import MEBIBYTE, METHODS, Case
from revrnn.recipes import markdown

SEGMENTS = (32, 64, 128, 256)
"""Tried for the checkpointed nn.LSTM; the one with the lowest peak counts."""

LONG = 8192
"""From here on only the segment of 64 steps is tried, which is the best or close to it below."""


def run(case: Case) -> dict[str, object]:
    """One case in a fresh process."""
    command = [sys.executable, "-m", "benchmarks._memory_case", json.dumps(asdict(case))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{case} failed:\n{result.stderr}")
    found: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return found


def cases(options: argparse.Namespace) -> list[Case]:
    """All cases to run, a round of all methods before the next length."""
    found = []
    for steps in options.steps:
        for method in options.methods:
            case = Case(
                method,
                steps,
                batch=options.batch,
                hidden=options.hidden,
                embedding=options.hidden,
                vocabulary=options.vocabulary,
                threads=options.threads,
            )
            if method in ("nn.GRU", "nn.LSTM", "RevGRU drop-in", "RevLSTM drop-in"):
                if steps * options.batch * options.vocabulary * 12 > options.limit * 2**30:
                    continue  # logits, their logarithms and their gradient, 4 bytes each
                found.append(case)
            elif method == "nn.LSTM checkpointed":
                tried = options.segments or (SEGMENTS if steps < LONG else (64,))
                segments = [size for size in tried if size < steps]
                found += [replace(case, segment=size) for size in segments]
            else:
                found.append(case)
    return found


def best(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """A row a method and length: medians of the repeats, and the segment with the lowest peak."""
    groups: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["steps"], row["segment"]), []).append(row)
    found: dict[tuple[object, object], dict[str, object]] = {}
    for (method, steps, _), repeats in groups.items():
        row = dict(repeats[0])
        peaks = [int(str(repeat["peak"])) for repeat in repeats]
        row["peak"] = statistics.median(peaks)
        row |= {"rounds": len(peaks), "peak_low": min(peaks), "peak_high": max(peaks)}
        row["seconds"] = statistics.median(time for repeat in repeats for time in _times(repeat))
        known = found.get((method, steps))
        if known is None or float(str(row["peak"])) < float(str(known["peak"])):
            found[method, steps] = row
    return list(found.values())


def _times(row: dict[str, object]) -> list[float]:
    seconds = row["seconds"]
    assert isinstance(seconds, list)
    return seconds


def table(rows: Sequence[dict[str, object]]) -> str:
    """Peak and time of every method and length, beside plain nn.LSTM where that ran."""
    lstm = {row["steps"]: row for row in rows if row["method"] == "nn.LSTM"}
    lines = []
    for row in sorted(
        rows, key=lambda row: (int(str(row["steps"])), list(METHODS).index(str(row["method"])))
    ):
        peak, seconds = float(str(row["peak"])), float(str(row["seconds"]))
        base = lstm.get(row["steps"])
        less = f"1/{float(str(base['peak'])) / peak:.1f}" if base else ""
        slower = f"{seconds / float(str(base['seconds'])):.2f}" if base else ""
        name = str(row["method"])
        if name == "nn.LSTM checkpointed":
            name += f" every {row['segment']}"
        low, high = (float(str(row[key])) / MEBIBYTE for key in ("peak_low", "peak_high"))
        lines.append(
            [
                str(row["steps"]),
                name,
                f"{peak / MEBIBYTE:.0f}",
                f"{low:.0f}-{high:.0f}",
                less,
                f"{seconds:.2f}",
                slower,
            ]
        )
    header = ["T", "method", "peak MiB", "range", "of nn.LSTM", "s a step", "x nn.LSTM"]
    return markdown.table(header, lines)


SIZES = ("batch", "hidden", "embedding", "vocabulary", "forget_bits", "threads")


def comparable(rows: Sequence[dict[str, object]], path: Path) -> list[dict[str, object]]:
    """The latest row of every method and length in a CSV file, of those with the sizes of
    ``rows``: lengths that take long need not be run again for every plot."""
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    sizes = [str(rows[0][name]) for name in SIZES]
    found = {
        (row["method"], row["steps"]): dict[str, object](row)
        for row in read
        if [row[name] for name in SIZES] == sizes
    }
    return list(found.values())


def plot(rows: Sequence[dict[str, object]], path: Path) -> None:
    """Memory and time against T, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, StrMethodFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5.5), layout="constrained")
    for number, method in enumerate(METHODS):
        own = sorted(
            (row for row in rows if row["method"] == method), key=lambda row: int(str(row["steps"]))
        )
        if not own:
            continue
        steps = [int(str(row["steps"])) for row in own]
        style = {
            "marker": "os^Dvx+*"[number],
            "linestyle": "-" if "streamed" in method else "--",
            "color": f"C{number}",
            "label": method,
        }
        left.plot(steps, [float(str(row["peak"])) / MEBIBYTE for row in own], **style)
        right.plot(steps, [float(str(row["seconds"])) for row in own], **style)
    lengths = sorted({int(str(row["steps"])) for row in rows})
    for axes, label in ((left, "peak above base, MiB"), (right, "seconds a step")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator([float(steps) for steps in lengths]))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("time steps T")
        axes.set_ylabel(label)
        axes.grid(True, which="major", alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    first = rows[0]
    figure.suptitle(
        f"One training step: N={first['batch']}, H=E={first['hidden']}, V={first['vocabulary']}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[256, 1024, 4096, 32768], metavar="T"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(METHODS),
        choices=list(METHODS),
        metavar="NAME",
        help="of: " + ", ".join(METHODS),
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N")
    parser.add_argument("--hidden", type=int, default=256, metavar="H", help="also the embedding")
    parser.add_argument("--vocabulary", type=int, default=10_000, metavar="V")
    parser.add_argument(
        "--segments",
        type=int,
        nargs="+",
        metavar="K",
        help="steps a segment of the checkpointed nn.LSTM; the best of these is shown",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=1, help="fresh processes a case, in turn; medians count"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=8.0,
        metavar="GIB",
        help="leave out methods that keep all logits where those alone would exceed this",
    )
    parser.add_argument("--csv", type=Path, default=RESULTS / "memory.csv", metavar="FILE")
    parser.add_argument("--plot", type=Path, default=RESULTS / "memory.png", metavar="FILE")
    parser.add_argument(
        "--docs", metavar="BLOCK", help="write the table into this block of docs/memory.md"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    todo = [case for _ in range(options.rounds) for case in cases(options)]
    rows = []
    for case in (bar := tqdm(todo, unit="case")):
        bar.set_postfix_str(f"{case.method}, T={case.steps}")
        rows.append(run(case))
    found = best(rows)
    print(table(found))
    where = environment()
    append_csv(options.csv, [{**where, **row} for row in found])
    print(f"rows: {options.csv}")
    drawn = comparable(found, options.csv)
    if len({row["steps"] for row in drawn}) > 1:
        plot(drawn, options.plot)
        print(f"plot: {options.plot}")
    if options.docs:
        shown = shlex.join(["python", "-m", "benchmarks.memory", *(arguments or sys.argv[1:])])
        origin = (
            f"`{shown}`: {options.rounds} process(es) a case, medians, on {where['cpu']}, "
            f"{options.threads} threads, torch {where['torch']}, commit {where['commit']}, "
            f"{str(where['date'])[:10]}."
        )
        text = f"{table(found)}\n\n{origin}"
        rewrite_block(ROOT / "docs" / "memory.md", options.docs, text)


if __name__ == "__main__":
    main()

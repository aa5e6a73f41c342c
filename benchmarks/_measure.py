"""What every benchmark needs: interleaved medians, result rows that say where they come from, and
tables that a command writes into the docs itself."""

from __future__ import annotations

import csv
import gc
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from revrnn.recipes.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


# ---------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Times:
    """The seconds of one task, a run each; run i of every task belongs to the same round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The distance of the quartiles, as a part of the median."""
        return (quantile(self.seconds, 0.75) - quantile(self.seconds, 0.25)) / self.median

    def ratio(self, base: Times) -> Ratio:
        rounds = [a / b for a, b in zip(self.seconds, base.seconds, strict=True)]
        return Ratio(self.median / base.median, quantile(rounds, 0.25), quantile(rounds, 0.75))


@dataclass(frozen=True)
class Ratio:
    """How long a task takes in terms of another one."""

    value: float
    """Of the medians."""
    low: float
    """The lower and the upper quartile of the ratios within a round."""
    high: float


def quantile(values: Sequence[float], q: float) -> float:
    """With linear interpolation; ``q`` in [0, 1]."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def interleave(
    tasks: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warm_up: int = 1,
    after_each: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Run every task once a round, in an order shuffled anew (by a fixed seed) for each round.

    So whatever slows the machine for a while slows all tasks alike, and none always runs behind
    the same other one. The first ``warm_up`` rounds are not counted. ``after_each``: called after
    each run, for a progress bar.
    """
    shuffle = random.Random(0).shuffle
    order = list(tasks)
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    with _no_collection():
        for round_ in range(warm_up + repeats):
            gc.collect()
            shuffle(order)
            for name in order:
                start = perf_counter()
                tasks[name]()
                elapsed = perf_counter() - start
                if round_ >= warm_up:
                    seconds[name].append(elapsed)
                after_each()
    return {name: Times(tuple(values)) for name, values in seconds.items()}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from starting by itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ------------------------------------------------------------------------------------------ rows


def environment() -> dict[str, object]:
    """Where and with what a result was measured: the first columns of every row."""
    known = provenance()
    first = ("date", "commit", "revrnn", "kernels", "torch")
    return {
        **{name: known[name] for name in first},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **{name: value for name, value in known.items() if name not in first},
    }


def append_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Add rows to a CSV file, which is made if it is not there; its columns must be the same."""
    columns = list(rows[0])
    if path.exists():
        with path.open(newline="") as file:
            there = next(csv.reader(file), [])
        if there and there != columns:
            raise ValueError(f"{path} has other columns than the new rows: name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


# ---------------------------------------------------------------------------------------- tables


def rewrite_block(path: Path, name: str, text: str) -> None:
    """Replace what stands in a file between ``<!-- name -->`` and ``<!-- /name -->``."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no lines {begin.strip()} and {end}")
    path.write_text(f"{before}{begin}{text.strip()}\n{end}{after}")

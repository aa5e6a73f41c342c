"""The benchmarks at tiny sizes: that they run and what they write, not what they measure."""

import csv
import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmarks are not installed: they are run from the repository."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks._measure")


@pytest.fixture
def layers(measure: ModuleType) -> ModuleType:
    return importlib.import_module("benchmarks.layers")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-W", "default::UserWarning", "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_intervals_and_medians(measure: ModuleType) -> None:
    assert measure.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert measure.quantile([1.0, 2.0], 0.25) == 1.25
    assert measure.quantile([7.0], 0.75) == 7.0
    slow, fast = measure.Times((4.0, 2.0, 6.0)), measure.Times((2.0, 2.0, 2.0))
    ratio = slow.ratio(fast)
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 1.5, 2.5)
    assert slow.spread == 0.5


def test_every_task_runs_once_a_round(measure: ModuleType) -> None:
    runs: list[str] = []
    after: list[int] = []
    names = ["a", "b", "c"]
    times = measure.interleave(
        {name: lambda name=name: runs.append(name) for name in names},
        4,
        warm_up=2,
        after_each=lambda: after.append(len(runs)),
    )
    assert list(times) == names
    assert all(len(value.seconds) == 4 for value in times.values())
    assert after == list(range(1, 19))
    rounds = [runs[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(round_) == names for round_ in rounds)
    assert len({tuple(round_) for round_ in rounds}) > 1  # in different orders


def test_csv_rows_are_appended_and_columns_kept(measure: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    measure.append_csv(path, [{"a": 1, "b": "x, y"}])
    measure.append_csv(path, [{"a": 2, "b": ""}, {"a": 3, "b": "z"}])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{"a": "1", "b": "x, y"}, {"a": "2", "b": ""}, {"a": "3", "b": "z"}]
    with pytest.raises(ValueError, match="other columns"):
        measure.append_csv(path, [{"a": 1, "c": 2}])


def test_a_block_is_rewritten_and_nothing_else(measure: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- name -->\nold\n<!-- /name -->\nafter\n")
    for text in ("new\n", "newer"):
        measure.rewrite_block(path, "name", text)
        assert path.read_text() == f"before\n<!-- name -->\n{text.strip()}\n<!-- /name -->\nafter\n"
    with pytest.raises(ValueError, match="other"):
        measure.rewrite_block(path, "other", "text")


def test_layers_prints_a_table_and_writes_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for times in (1, 2):
        done = run(
            "benchmarks.layers", "--shapes", "5x3x4", "3x1x8", "--repeats", "2", "--csv", str(path)
        )
        assert done.returncode == 0, done.stderr
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == times * 2 * 2 * 6
    assert "| 5 x 3 x 4 | RevGRU  |" in done.stdout
    assert "| 3 x 1 x 8 | RevLSTM |" in done.stdout
    row = next(row for row in rows if row["task"] == "ours")
    assert float(row["ms"]) > 0
    assert int(row["held_bits"]) > float(row["ideal_bits"]) > 0
    assert row["cpu"]
    assert row["torch"]
    assert row["threads"] == "2"


@pytest.mark.filterwarnings("ignore:revrnn was installed without its C:UserWarning")
def test_layers_rewrites_the_tables_of_the_docs(
    layers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("README", "EXACTNESS"):
        page = tmp_path / f"{name}.md"
        shutil.copy(getattr(layers, name), page)
        monkeypatch.setattr(layers, name, page)
    shape = layers.Shape(4, 3, 6)
    results = layers.measure(shape, 1, after_each=lambda: None)
    layers.write_docs(results, 1)
    for name in ("README", "EXACTNESS"):
        page = (tmp_path / f"{name}.md").read_text()
        assert "| 4 x 3 x 6 | RevLSTM |" in page
        assert "70 x 20 x 650" not in page
        assert "python -m benchmarks.layers --readme" in page


def test_lengths_are_ragged(layers: ModuleType) -> None:
    lengths = layers.Shape(70, 20, 650).lengths()
    assert (int(lengths.min()), int(lengths.max())) == (35, 70)
    assert len(lengths.unique()) > 10
    assert layers.Shape(1, 1, 2).lengths().tolist() == [1]


def test_layers_says_what_its_options_do() -> None:
    done = run("benchmarks.layers", "--help")
    assert done.returncode == 0
    for option in ("--shapes", "--repeats", "--threads", "--csv", "--quick", "--readme"):
        assert option in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shapes", "70x20"],
        ["--shapes", "70x20x65"],
        ["--shapes", "0x20x64"],
        ["--repeats", "0"],
        ["--threads", "0"],
    ],
)
def test_layers_refuses_what_it_cannot_do(
    layers: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        layers.main(arguments)
    assert refusal.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_epochs_of_language_models_in_turns(tmp_path: Path) -> None:
    table = tmp_path / "epochs.csv"
    options = ["--data", "demo", "--segments", "2", "--hidden", "8", "--layers", "1"]
    options += ["--threads", "1", "--csv", str(table)]
    done = run("benchmarks.language_model", *options)
    assert done.returncode == 0, done.stderr
    assert "x torch.nn" in done.stdout
    with table.open(newline="") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["revgru", "revlstm", "gru", "lstm"]
    assert rows["lstm"]["ratio"] == rows["gru"]["ratio"] == "1.0"
    assert float(rows["revlstm"]["ratio"]) > 0
    assert float(rows["revlstm"]["savings"]) > 1
    assert not rows["gru"]["savings"]
    assert all(row["segments"] == "2" and row["cpu"] and row["date"] for row in rows.values())


def test_epochs_need_a_corpus(tmp_path: Path) -> None:
    done = run("benchmarks.language_model", "--data", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "there is no corpus and no folder" in done.stderr


def test_variants_beside_the_plain_layer(tmp_path: Path) -> None:
    table = tmp_path / "variants.csv"
    options = ["--shapes", "4x3x6", "5x2x4", "--repeats", "1", "--threads", "1"]
    done = run("benchmarks.variants", *options, "--csv", str(table))
    assert done.returncode == 0, done.stderr
    assert " 4 x 3 x 6 " in done.stdout
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 7  # shapes, layers, variants
    found = {(row["steps"], row["layer"], row["variant"]): row for row in rows}
    plain = found["4", "RevGRU", "fractional, 3 bits"]
    assert (float(plain["ratio"]), float(plain["weights"])) == (1.0, 1.0)
    assert float(found["4", "RevGRU", "discrete, 3 bits"]["weights"]) == 2.0
    assert float(found["5", "RevLSTM", "none"]["held_bits"]) == 0
    assert float(found["5", "RevLSTM", "zoneout=0.1"]["held_bits"]) > 0


def test_variants_are_written_into_the_docs(
    measure: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variants = importlib.import_module("benchmarks.variants")
    page = tmp_path / "page.md"
    shutil.copy(variants.DOCS, page)
    monkeypatch.setattr(variants, "DOCS", page)
    variants.main(
        ["--shapes", "4x3x6", "--repeats", "1", "--docs", "--csv", str(tmp_path / "rows.csv")]
    )
    text = page.read_text()
    assert "| layer   | forgetting " in text
    assert "4 x 3 x 6" in text
    assert "70 x 20 x 650" not in text
    with pytest.raises(SystemExit):
        variants.main(["--repeats", "0"])

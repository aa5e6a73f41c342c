"""The examples, and the code in README.md and docs/, at sizes that take seconds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from revrnn import kernels

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-W", "default::UserWarning", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def test_demo_trains_and_ends_with_a_table_and_plots(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run("examples/demo.py", "--minutes", "0.02", "--seed", "2", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    number = r"([\d.]+)"
    (reached,) = re.findall(f"perplexity, validation text +{number}$", done.stdout, re.M)
    (best,) = re.findall(f"best possible: .*  {number}$", done.stdout, re.M)
    (by_frequency,) = re.findall(f"frequency alone +{number}$", done.stdout, re.M)
    assert float(best) < float(reached)
    assert float(best) < float(by_frequency)
    tape = re.findall(f"tape / ideal +{number}$", done.stdout, re.M)
    assert 1 < float(tape[0]) < 1.03
    times = re.findall(f"with nn.LSTM .*, {number} times as much$", done.stdout, re.M)
    assert float(times[0]) > 1.5
    assert float(times[1]) > 10
    assert "time " in done.stdout
    assert str(folder) in done.stdout
    assert (folder / "last.pt").exists()


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--minutes", "nan"]])
def test_demo_refuses_what_it_cannot_do(arguments: list[str]) -> None:
    done = run("examples/demo.py", *arguments)
    assert done.returncode == 2
    assert f"must be positive, got {arguments[1]}" in done.stderr


def test_demo_overwrites_no_run(tmp_path: Path) -> None:
    before = tmp_path / "last.pt"
    before.write_bytes(b"a run")
    done = run("examples/demo.py", "--minutes", "0.02", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "holds a run already" in done.stderr
    assert before.read_bytes() == b"a run"


def test_drop_in_shows_what_is_kept() -> None:
    done = run("examples/drop_in.py", "--steps", "30", "--batch", "4", "--hidden", "32")
    assert done.returncode == 0, done.stderr
    theirs, ours = re.findall(r"^(?:Rev)?LSTM +keeps +([\d.]+) MiB$", done.stdout, re.M)
    assert float(theirs) > 10 * float(ours)


def test_the_code_of_the_readme_runs() -> None:
    layer, streaming = code_blocks("README.md")
    assert len(layer.splitlines()) <= 10
    done = run("-c", layer)
    assert done.returncode == 0, done.stderr
    assert "held/ideal" in done.stdout
    # The second block goes on from the first; fewer steps do here.
    assert "4097" in streaming
    done = run("-c", f"{layer}\n{streaming.replace('4097', '65')}\nprint(loss.item())")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0


@pytest.mark.skipif("cpu" not in kernels.available(), reason="minutes on the reference kernels")
def test_the_noise_is_what_the_docs_derive() -> None:
    (code,) = code_blocks("docs/exactness.md")
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert "prints 1.9e-04" in (ROOT / "docs/exactness.md").read_text()
    measured, predicted = map(float, re.findall(r"\d\.\de-\d\d", done.stdout))
    assert measured == pytest.approx(predicted, rel=0.1)

"""The examples, and the code in README.md and docs/, at sizes that take seconds."""

import importlib.util
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from revrnn import kernels

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-W", "default::UserWarning", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_demo_trains_and_ends_with_a_table() -> None:
    done = run("examples/demo.py", "--seconds", "2", "--hidden", "16", "--seed", "1")
    assert done.returncode == 0, done.stderr
    for line in ("loss, bits a symbol", "best possible", "tape, bits a unit a step", "nn.LSTM"):
        assert line in done.stdout


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--hidden", "7"], ["--hidden", "0"]])
def test_demo_refuses_what_it_cannot_do(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        demo.main(arguments)
    assert refusal.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_what_follows_a_question_in_the_demo_is_its_record(demo: ModuleType) -> None:
    symbols, likely = demo.records(random.Random(0), 2000)
    assert len(symbols) == len(likely) == 2000
    letters: list[int] = []
    asked = 0
    count = demo.LETTERS_A_RECORD
    for place in range(2000 - count):
        following = symbols[place + 1 : place + 1 + count]
        if symbols[place] == demo.BEGIN:
            letters = following
            assert likely[place + 1 : place + 1 + count] == [1 / demo.LETTERS] * count
        elif symbols[place] == demo.ASK:
            asked += 1
            assert following == letters
            assert likely[place + 1 : place + 1 + count] == [1.0] * count
    assert asked > 10


def test_the_demo_knows_its_entropy(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a long sequence it is what the rules say."""
    monkeypatch.setattr(demo, "STEPS", 5000)
    _, best, forgetful = demo.make_batch(random.Random(0))
    count, bits = demo.LETTERS_A_RECORD, math.log2(demo.LETTERS)
    begin, ask = demo.CHANCES[demo.BEGIN], demo.CHANCES[demo.ASK]
    drawn = -sum(p * math.log2(p) for p in demo.CHANCES.values())
    symbols = 1 + count * (begin + ask)  # for each one that is drawn
    assert best == pytest.approx((drawn + begin * count * bits) / symbols, rel=0.02)
    assert forgetful == pytest.approx((drawn + (begin + ask) * count * bits) / symbols, rel=0.02)


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

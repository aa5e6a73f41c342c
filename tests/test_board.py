"""TensorBoard's files, and a run that goes on without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboardX")

from revrnn.recipes.board import Board


def test_scalars_are_written(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", first_step=0)
    board.add("train/loss", 1.5, 0)
    board.add("train/unknown", float("nan"), 0)
    board.close()
    (file,) = (tmp_path / "board").iterdir()
    data = file.read_bytes()
    assert b"train/loss" in data
    assert b"train/unknown" not in data


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    board = Board(tmp_path / "file" / "board", first_step=0)
    board.add("loss", 1.0, 0)
    board.close()
    assert "nothing more is written for TensorBoard because of Not a directory" in (
        capsys.readouterr().err
    )


def test_a_full_disk_holds_nobody_up(tmp_path: Path) -> None:
    """With a limit on the size of files, in a process of its own, which must end too."""
    script = f"""
import resource, signal, threading, time
from pathlib import Path
from revrnn.recipes.board import Board
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
board = Board(Path({str(tmp_path)!r}) / "board", first_step=0)
worker = board._events._worker
worker._flush_secs = 0
while worker.is_alive():
    board.add("loss", 1.0, 0)
    time.sleep(0.001)
for step in range(1000):
    board.add("loss", 1.0, step)
board.close()
print("done")
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.strip() == "done", result.stderr
    assert result.stderr.count("nothing more is written for TensorBoard") == 1

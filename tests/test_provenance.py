"""Where results come from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from revrnn.recipes import provenance


def test_columns() -> None:
    found = provenance.provenance()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", found["date"])
    assert found["torch"] == torch.__version__
    assert found["cpu"]
    assert provenance.provenance() is found


def test_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    try:
        git("init")
    except FileNotFoundError:
        pytest.skip("no git")
    source = tmp_path / "src" / "module.py"
    source.parent.mkdir()
    source.write_text("1\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "README.md").write_text("text\n")
    git("add", ".")
    git("commit", "-m", "first")
    clean = provenance.commit(source.parent)
    assert re.fullmatch("[0-9a-f]{10}", clean)
    (tmp_path / "README.md").write_text("other text\n")
    assert provenance.commit(source.parent) == clean
    source.write_text("2\n")
    assert provenance.commit(source.parent) == f"{clean}+"
    # Nothing of the checkout is there, as in an environment within it.
    assert provenance.commit(tmp_path / "other") == ""


def test_no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert provenance.commit(tmp_path / "nowhere") == ""
    monkeypatch.setenv("PATH", "")
    assert provenance.commit(tmp_path) == ""

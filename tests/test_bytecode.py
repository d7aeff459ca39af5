"""Where Python keeps no bytecode, a start and ``hardpoint env`` say so, with a remedy that works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint.bytecode import missing_bytecode


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that has no bytecode, in a folder that can be written."""
    folder = tmp_path / "uncompiled"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return folder.name


def test_nothing_is_missed_that_the_first_start_writes(package: str) -> None:
    assert missing_bytecode(package) is None
    assert missing_bytecode("no_such_package") is None


def test_the_remedy_mends_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    problem = missing_bytecode(package)
    assert problem is not None
    assert "PYTHONDONTWRITEBYTECODE is set" in problem
    command = problem.partition("run once: ")[2].split()
    subprocess.run(command, check=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    assert missing_bytecode(package) is None


def test_a_folder_that_cannot_be_written_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: False)  # a test may run as root, who may write anywhere
    problem = missing_bytecode(package)
    assert problem is not None
    assert " cannot be written: each start" in problem
    assert "PYTHONPYCACHEPREFIX" in problem

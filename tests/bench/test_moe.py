"""``bench moe``: how evenly experts are spread."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint.cli.main import run


def bench(folder: Path, *flags: str) -> dict[str, Any]:
    assert run(["bench", "moe", *flags, "--json", str(folder / "found.json")]) == 0
    return {row["name"]: row["value"] for row in json.loads((folder / "found.json").read_text())["rows"]}


def test_many_ranks(tmp_path: Path) -> None:
    found = bench(tmp_path, "--layers", "1")
    assert found["first half, as loaded"] > 2
    assert found["first half, balanced"] <= 1.15
    assert found["second half, balanced again"] <= 1.15
    assert found["experts moved by the second half"] < found["experts moved by the first half"] / 4


def test_a_recorded_routing(tmp_path: Path) -> None:
    """Of two layers the second sends most tokens to expert 0."""
    even = np.arange(64).reshape(32, 2) % 8
    skewed = np.where(np.arange(64).reshape(32, 2) % 4 < 2, 0, even)
    np.save(tmp_path / "routing.npy", np.stack([even, skewed], 1).astype(np.int16))
    flags = ("--routing", str(tmp_path / "routing.npy"), "--ranks", "4", "--experts", "8", "--redundant", "4")
    found = bench(tmp_path, *flags)
    assert found["first half, as loaded"] > found["first half, balanced"] >= 1
    assert found["experts moved by the second half"] == 0, "both halves are alike"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read as a NumPy file"),
        (np.zeros((4, 2), np.int16), r"must hold integers"),
        (np.zeros((4, 2, 2), np.float32), r"holds float32 \[4, 2, 2\]"),
        (np.full((4, 2, 2), 300, np.int16), "names expert 300, and there are 256; give --experts"),
    ],
)
def test_bad_files(content: Any, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "routing.npy"
    if content is None:
        path.write_text("")
    else:
        np.save(path, content)
    assert run(["bench", "moe", "--routing", str(path)]) == 2
    assert re.search(said, capsys.readouterr().err)

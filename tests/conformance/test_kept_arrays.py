"""Covering arrays that later runs find in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.conformance import kept_arrays
from hardpoint.conformance.kept_arrays import Rows, folder, kept

MADE: list[str] = []


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, for arrays that take no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_arrays, "_WORTH_KEEPING", 0.0)
    MADE.clear()


def made(key: str) -> Rows:
    """The array of a key, from the cache or newly made."""

    def make() -> Rows:
        MADE.append(key)
        return [[len(key), 0], [0, 1]]

    return kept(key, make)


def test_an_array_is_made_once_for_what_it_covers() -> None:
    assert made("a") == made("a") == [[1, 0], [0, 1]]
    assert made("bc") == [[2, 0], [0, 1]]
    assert MADE == ["a", "bc"]


def test_arrays_that_are_made_in_no_time_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_arrays, "_WORTH_KEEPING", 60.0)
    assert made("a") == made("a")
    assert MADE == ["a", "a"]
    assert not folder().exists()


@pytest.mark.parametrize("damage", ["", "[]", '{"key": "b", "rows": [[9]]}', "\xff"])
def test_a_damaged_file_is_made_anew(damage: str) -> None:
    made("a")
    (path,) = folder().iterdir()
    path.write_bytes(damage.encode("latin-1"))
    assert made("a") == made("a") == [[1, 0], [0, 1]]
    assert MADE == ["a", "a"]


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path: Path) -> None:
    (tmp_path / "hardpoint").write_text("a file where the folder would be")
    assert made("a") == made("a")
    assert MADE == ["a", "a"]

"""No room of core imports one above it."""

from __future__ import annotations

from pathlib import Path

from tests.rooms import CORE, ORDER, arrows, drawing, floors, upward


def test_no_import_leads_upwards() -> None:
    assert upward(arrows(), floors()) == []


def test_every_room_has_a_floor() -> None:
    there = {path.stem for path in CORE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert there - {"__init__"} == set(floors())
    assert len(floors()) == sum(map(len, ORDER)), "a room has one floor"


def test_an_arrow_upwards_is_seen(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    for name, text in {
        "cellar/wine.py": "def sell():\n    from shop.till import count",
        "cellar/__init__.py": "",
        "till.py": "from shop import cellar\nimport shop.cellar.wine",
        "guide.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shop.till import count",
    }.items():
        (shop / name).parent.mkdir(parents=True, exist_ok=True)
        (shop / name).write_text(text)
    found = arrows(shop)
    assert found == {("cellar", "till"): {"cellar.wine"}, ("till", "cellar"): {"till"}}
    assert upward(found, {"cellar": 0, "till": 1, "guide": 0}) == [
        "cellar imports till of the same floor or above, in cellar.wine"
    ]


def test_the_drawing_has_every_arrow() -> None:
    lines = drawing({("cli", "bench"): {"cli.bench"}}).splitlines()
    assert lines[0] == "graph BT"
    assert lines[-1] == "  cli --> bench"

"""Choices for twelve devices that are not here, as the files in ``explained/`` have them."""

from __future__ import annotations

import pytest

from hardpoint.plugin_host import discover
from tests.platforms.explained import DEVICES, FOLDER, explained

LIKE_OTHERS = {"sapphire-rapids", "a100", "b200", "mi355x", "rx7900xtx", "max1550"}
"""Compared at night."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in LIKE_OTHERS else ()) for name in DEVICES]
)
def test_what_runs_there(name: str) -> None:
    """After an intended change: ``python -m tests.platforms.explained``."""
    assert explained(discover().devices()[name]) == (FOLDER / f"{name}.txt").read_text()


def test_every_file_is_compared() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(DEVICES)

"""The pages' pictures: vector graphics that say what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
CODE = [*(DOCS.parent / "core" / "src").rglob("*.py"), *(DOCS.parent / "plugin_api" / "src").rglob("*.py")]
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
_OTHERS = {"PyTorch", "FlashInfer"}


def test_the_architecture_is_four_screens_with_four_pictures() -> None:
    """Text of two screens, and half a screen for each picture."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"!\[[^\]]+\]\(pictures/(\w+\.svg)\)", text) == [
        "plug.svg",
        "request.svg",
        "weight.svg",
        "pages.svg",
    ]
    assert len(text.splitlines()) <= 120


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_names_in_pictures_are_those_of_code(picture: Path) -> None:
    words = " ".join(text.strip() for text in ElementTree.parse(picture).getroot().itertext())
    code = "\n".join(path.read_text(encoding="utf-8") for path in CODE)
    classes = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", words)) - _OTHERS
    functions = set(re.findall(r"\b[a-z]+_[a-z_]+\b", words))
    flags = set(re.findall(r"--[a-z-]+", words))
    unknown = {name for name in classes | functions if not re.search(rf"\b(class|def) {name}\b", code)}
    unknown |= {flag for flag in flags if not re.search(rf"{flag}\b|\b{flag[2:].replace('-', '_')}:", code)}
    assert not unknown

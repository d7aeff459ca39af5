"""The start-up pages quote errors as the code words them, and name flags, presets and implementations that exist."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "platforms").glob("*.md"))
_LONG = 18
"""Characters of a message that name it: shorter parts occur anywhere."""


@functools.cache
def messages(folder: Path) -> set[str]:
    """The strings below ``folder``, with a null byte in place of each value that is filled in."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def is_quoted(quote: str, message: str) -> bool:
    """Whether ``quote`` shows ``message``: whole parts of it, or parts of it between dots."""
    parts = [part for part in message.split("\0") if len(part) >= _LONG]
    if any(part in quote for part in parts):
        return True
    fragments = [part.strip() for part in quote.split("...") if part.strip()]
    return max(map(len, fragments)) >= _LONG and all(part in message for part in fragments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_errors_are_quoted_as_the_code_words_them(page: Path) -> None:
    known = messages(ROOT / "plugins" / page.stem / "src") | messages(ROOT / "core" / "src" / "hardpoint")
    quotes = re.findall(r"^\| `([^`]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quotes) >= 5
    assert not [quote for quote in quotes if not any(is_quoted(quote, message) for message in known)]


def test_a_message_that_the_code_lacks_is_noticed() -> None:
    assert is_quoted("cpu.threads must be 0 (all cores) to ...", "cpu.threads must be 0 (all cores) to \0, got \0")
    assert is_quoted("X='7' hides every device (1 x Y)", "\0=\0 hides every device (\0 x \0)")
    assert not is_quoted("cpu.threads must be 1 (all cores) to ...", "cpu.threads must be 0 (all cores) to \0, got \0")
    assert not is_quoted("not it", "anything but")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_presets_exist(page: Path) -> None:
    manifest = tomllib.loads(next((ROOT / "plugins" / page.stem / "src").glob("*/hardpoint.toml")).read_text())
    named = re.findall(r"--device (\w+)` \(or ([^)]*)\)", page.read_text(encoding="utf-8"))
    presets = {preset for first, others in named for preset in [first, *re.findall(r"`(\w+)`", others)]}
    assert bool(presets) == (page.stem != "cpu")
    assert presets <= {device["name"] for device in manifest["device"]}

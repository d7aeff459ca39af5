"""The words that the documentation avoids: a table of the page of terms lists them, with the field's own.

And pronouns in place of a sentence's subject, in the code's texts too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from hardpoint.cli.main import COMMANDS, run
from hardpoint.plugin_host import discover

ROOT = Path(__file__).resolve().parents[2]
TERMS = ROOT / "docs" / "what_each_engine_calls_this.md"
CHANGES = ROOT / "docs" / "changes_in_api_0_2.md"
"""Names the old names."""
PRONOUN = re.compile(r"\b(?:What|Who|Whoever|Whatever|Whichever|Those)\b")


def private_words() -> list[str]:
    """The first column of the table under "Words that our documents avoid"."""
    table = TERMS.read_text(encoding="utf-8").partition("| not | but |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def pages() -> Iterator[tuple[str, str]]:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        if path not in (TERMS, CHANGES):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def guides() -> Iterator[tuple[str, str]]:
    """All pages that users read, a paragraph each."""
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")]:
        for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT)), paragraph


def sources() -> Iterator[tuple[str, str]]:
    """Texts in the code of the packages and of the tests (docstrings, help, errors) that may have such a sentence."""
    for folder in ("plugin_api/src", "core/src", "plugins", "tests", "scripts", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if PRONOUN.search(source) and "build" not in path.relative_to(ROOT).parts and path != Path(__file__):
                for node in ast.walk(ast.parse(source)):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of the plugin API; a text after a name counts as one, too."""
    for path in sorted((ROOT / "plugin_api" / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", str(node.value.value)


def helps(capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, str]]:
    for name in COMMANDS:
        assert run([name, "--help"]) == 0
        yield f"hardpoint {name} --help", capsys.readouterr().out
    for record in discover(quiet=True).records:
        for key in record.manifest.config if record.manifest else ():
            yield f"--{record.name}.{key.name}", key.help


def private_words_in(texts: Iterable[tuple[str, str]]) -> list[str]:
    words = private_words()
    assert len(words) >= 8
    pattern = re.compile(rf"\b({'|'.join(words)})s?\b", re.IGNORECASE)
    return [f"{where}: {hit[0]}" for where, text in texts for hit in pattern.finditer(" ".join(text.split()))]


def vague_subjects_in(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Sentences, questions apart, that begin with a pronoun in place of a noun."""
    pattern = re.compile(rf"(?:^|(?<=[.!:;])\s){PRONOUN.pattern}[^.?!]*+(?!\?)")
    return [f"{where}: {hit[0]}" for where, text in texts for hit in pattern.finditer(" ".join(text.split()))]


def test_pages_avoid_private_words() -> None:
    assert private_words_in(pages()) == []


def test_docstrings_of_the_plugin_api_avoid_private_words() -> None:
    assert private_words_in(docstrings()) == []


def test_help_texts_avoid_private_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert private_words_in(helps(capsys)) == []


def test_sentences_have_nouns_for_subjects() -> None:
    assert vague_subjects_in(guides()) == []
    assert vague_subjects_in(sources()) == []


@pytest.mark.parametrize(
    "text", ["It runs. What is left\nends.", "Those of a step.", "Kept: who asks, gets. Whoever asks."]
)
def test_a_vague_subject_is_found(text: str) -> None:
    assert len(vague_subjects_in([("here", text)])) == 1


@pytest.mark.parametrize("text", ["It runs. What is left?", "It holds what is left.", "The layers: those of a step."])
def test_other_sentences_may_have_pronouns(text: str) -> None:
    assert vague_subjects_in([("here", text)]) == []


def test_a_private_word_is_found() -> None:
    text = "Steps are recorded\n    graphs."
    assert private_words_in([("here", text)]) == ["here: recorded graphs"]

"""Every command and block of the pages for authors runs, in the order of reading, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hardpoint.authoring.api_reference import render
from hardpoint.cli.main import run as hardpoint
from hardpoint.conformance.certificate import KIT_VERSION
from hardpoint_plugin_api import Feature
from tests.docs.runner import Reader
from tests.support.environment import Environment

DOCS = Path(__file__).resolve().parents[2] / "docs"


PAGES = ("first_ten_minutes.md", "write_a_plugin.md", "coming_from_vllm.md", "what_each_engine_calls_this.md")


@pytest.mark.parametrize("page", PAGES)
def test_a_reader_can_follow(page: str, tmp_path: Path) -> None:
    """In processes that begin with torch imported: a page starts up to forty."""
    folder = tmp_path / "reader"
    folder.mkdir()
    with Environment.create(tmp_path / "environment").forking() as environment:
        assert Reader(environment, folder).follow(DOCS / page)


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_a_reader_can_follow_in_processes_of_a_shells_own(page: str, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    assert Reader(Environment.create(tmp_path / "environment"), folder).follow(DOCS / page)


def test_the_reference_is_up_to_date() -> None:
    assert (DOCS / "contract.md").read_text(encoding="utf-8") == render(), "run: make reference"


def test_the_front_page_shows_what_explain_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines, in its order, where the CPU's plugin alone is installed and no certificate counts."""
    page = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"`hardpoint explain demo` prints .*?```text\n(.*?)```", page, re.DOTALL)
    shown = [" ".join(line.split()) for line in block.splitlines() if line.strip(" .")]
    monkeypatch.chdir(tmp_path)
    assert hardpoint(["explain", "demo", "--plugins", "cpu", "--certificates", str(tmp_path)]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in printed if line in shown] == shown


def test_the_tutorial_names_every_feature() -> None:
    page = (DOCS / "write_a_plugin.md").read_text(encoding="utf-8")
    assert not [feature for feature in Feature if f"`{feature}`" not in page]


def test_the_version_of_the_kits_rules_is_todays() -> None:
    page = (DOCS / "capabilities.md").read_text(encoding="utf-8")
    assert f"Today's rules are version {KIT_VERSION}," in page


LIES = [
    ("bash", "false\n", "failed"),
    ("bash", "true\nfalse\ntrue\n", "failed"),
    ("python", "import no_such_module\n", "No module named"),
    ("console", "$ echo one two\none three\n", "should print"),
    ("console", "$ echo one\n", "should print"),
    ("console", "$ echo one\none\n$ echo two\nthree\n", "should print"),
    ("console", "$ false\n", "exits with 1"),
    ('console fails="yes"', "$ true\n", "exits with 0"),
    ('toml shows="there.toml"', "b = 2\n", "does not hold"),
    ("toml", "b = \n", "Invalid value"),
    ("ruby", "puts 1\n", "no rule for blocks of 'ruby'"),
]


@pytest.mark.parametrize(("info", "source", "message"), LIES)
def test_a_lie_is_noticed(info: str, source: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f'```toml title="there.toml"\na = 1\n```\n\n```{info}\n{source}```\n')
    reader = Reader(Environment.create(tmp_path / "environment"), tmp_path)
    with pytest.raises((AssertionError, ValueError), match=message):
        reader.follow(page)


def test_the_truth_is_accepted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nmkdir deeper\ncd deeper\n```\n"
        '```toml title="sub/a.toml"\na = 1\nb = 2\n```\n'
        '1. In a list:\n\n   ```toml shows="sub/a.toml"\n   b = 2\n   ```\n'
        "```console\n$ pwd\n.../deeper\n$ cat sub/a.toml\na = 1\n...\n```\n"
        "```python\nassert open('sub/a.toml').read() == 'a = 1\\nb = 2\\n'\n```\n"
        "```toml\nc = 3\n```\n```text\nanything\n```\n"
    )
    reader = Reader(Environment.create(tmp_path / "environment"), tmp_path)
    assert reader.follow(page) == 6

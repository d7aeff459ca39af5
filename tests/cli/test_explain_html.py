"""The page of ``hardpoint explain --html``: parsed as a browser would, and compared with the table."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hardpoint.cli.explain_html import page
from hardpoint.cli.main import run

VOID = {"meta"}


class Reader(HTMLParser):
    """Collects the text and the attributes; raises AssertionError for a tag that is not closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] != ["style"] else ""


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def row_of(**changes: object) -> dict[str, object]:
    row = {"family": "linear", "of": None, "workload": "n=1", "range": "any", "chosen": "best", "plugin": "acme"}
    return {**row, "certified": "no", "rule": "priority", "rejected": [], **changes}


def test_every_text_is_escaped() -> None:
    evil = "<script>alert('&')</script>"
    reason = {"code": "x", "message": evil, "wanted": evil, "supported": evil, "fix": evil}
    rejected = [{"name": evil, "plugin": evil, "reasons": [reason]}]
    rows = [row_of(family=evil, of=evil, workload=evil, range=evil, chosen=evil, plugin=evil, rejected=rejected)]
    reader = read(page(evil, {"digest": evil, "rows": rows}))
    assert "script" not in reader.tags
    assert reader.text.count(evil) >= 14


def test_uses_that_are_served_alike_are_one_entry() -> None:
    rows = [row_of(workload=f"n={n}", range=r, chosen=c) for n in (1, 2) for r, c in (("1-8", "few"), ("9+", "many"))]
    reader = read(page("t", {"digest": "d", "rows": [*rows, row_of(workload="n=3", not_asked="no library")]}))
    assert reader.tags.count("details") == 2
    assert "tokens: 1-8" in reader.text
    assert "tokens: 9+" in reader.text
    assert all(f"n={n}" in reader.text for n in (1, 2, 3))
    assert "best?" in reader.text
    assert "no library" in reader.text


def test_the_page_has_all_that_json_has_and_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hardpoint_cpu")
    file = tmp_path / "explain.html"
    assert run(["explain", "--platform", "cpu", "--html", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert run(["explain", "--platform", "cpu", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    html = file.read_text(encoding="utf-8")
    reader = read(html)
    for row in table["rows"]:
        assert row["chosen"] in reader.text
        for loser in row["rejected"]:
            assert all(reason["message"] in reader.text for reason in loser["reasons"])
    assert table["digest"] in reader.text
    assert not {"script", "link", "img", "iframe"} & set(reader.tags)
    assert all(str(value).startswith("#") for name, value in reader.attributes if name in ("href", "src"))
    assert not re.search(r"url\(|@import", html)


def test_a_file_that_cannot_be_written_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "--html", "/absent/page.html"]) == 2
    assert "--html: cannot write /absent/page.html: No such file" in capsys.readouterr().err

"""Pictures of the measurements' tables: they show today's tables, and a number is read as it is meant."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from scripts.plot_tables import PAGES, PICTURES, Panel, draw, read, render


def table(*lines: str) -> list[str]:
    return [lines[0], "|---" * lines[0].count("|"), *lines[1:]]


def test_pictures_show_todays_tables() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES.glob("*.md")}
    pages, pictures = render(texts)
    kept = {path: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert pages == texts, "run: make reference"
    assert pictures == kept, "run: make reference"


def test_a_changed_number_changes_the_picture() -> None:
    page = Path("a.md")
    before, after = (f"# A b\n\n| run | tokens/s |\n|---|---|\n| a | {n} |\n| b | 7 |\n" for n in (5, 6))
    linked, pictures = render({page: before})
    assert linked[page] == f"{before}\n![The table above as bars](../pictures/measurements/a-a-b.svg)\n"
    assert render(linked) == (linked, pictures)
    assert render({page: after})[1] != pictures
    assert {path.name for path in render({page: before + before})[1]} == {"a-a-b.svg", "a-a-b-2.svg"}


def test_columns_are_panels_and_units_are_told_apart() -> None:
    chart = read(
        table(
            "| | speed | time | PARTS |",
            "| **a** | 1,234.5 (12 of 99) | 1, 2 ms | 3 |",
            "| `b` | 980, 990; 1,000 by hand | 3 us | 4 |",
            "| c | none | 5 ms | 5 |",
        )
    )
    assert chart.labels == ("a", "b", "c")
    assert chart.panels == (
        Panel("speed", ((1234.5,), (980, 990, 1000), ())),
        Panel("time, ms", ((1, 2), (), (5,))),
    )


def test_contenders_stand_below_each_other() -> None:
    chart = read(table("| | hardpoint | vLLM | ratio | goal |", "| b=1 | 4 | 2 | 2.0 | 1.5 |"))
    assert chart.labels == ("hardpoint", "vLLM")
    assert chart.panels == (Panel("b=1", ((4,), (2,))),)


def test_bars_that_could_not_be_seen_are_left_out() -> None:
    assert not read(table("| | n |", "| a | 1 |", "| b | 101 |")).panels
    assert not read(table("| | n |", "| a | text |", "| b | 2 |")).panels
    assert not read(table("| | n |", "| a | 1, 2, 3, 4, 5 |", "| b | 2 |")).panels


def test_bars_are_as_long_as_numbers_say() -> None:
    root = ElementTree.fromstring(draw(read(table("| | n & m |", "| <a> | 10 |", "| vLLM | 5 |"))))
    bars = {rect.get("class"): float(rect.get("width", "")) for rect in root.findall(".//{*}rect") if rect.get("x")}
    assert bars["ours"] == 2 * bars["reference"]
    assert "<a>" in [text.text for text in root.findall(".//{*}text")]

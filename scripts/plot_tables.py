"""Draw the tables under docs/measurements as bar charts, and put each picture below its table.

    python scripts/plot_tables.py

The table is the only source: each number that begins a cell, or follows a semicolon or ", " in it, is a bar. A panel is
a column; where the columns are contenders (engines, before and after) it is a row, so that they stand below each
other. A panel has one unit and begins at zero. Left out are panels with numbers for less than half of their labels, and
those whose smallest bar could not be seen; a table without any panel has no picture.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "measurements"
PICTURES = ROOT / "docs" / "pictures" / "measurements"

_TABLE = re.compile(
    r"^\|.*\n\|[-| :]+\|\n(?:\|.*\n)+(?:\n!\[[^\]]*\]\(\.\./pictures/measurements/.*\)\n)?", re.MULTILINE
)
_VALUE = re.compile(r"(-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?)(?:-\d+)?(?: ?(\S+))?")
_UNITS = {"s", "ms", "us", "%", "MB", "MiB", "GB", "GiB", "GB/s", "TB/s", "GFLOP/s", "GOP/s", "tokens/s"}
_REFERENCE = re.compile(r"\b(vLLM|llama\.cpp|Transformers|goal|before|peer|without|cuBLAS|CUTLASS|plain read)\b")
_CONTENDER = re.compile(rf"{_REFERENCE.pattern}|\b(hardpoint|after|now|with|held|peak|waiting)\b|Triton")
_NO_RESULT = {"PARTS", "failed", "runs", "seeds", "sequences per step", "unsupported"}
"""Columns that say how something was measured."""

_SEEN = 100
"""The largest bar of a panel is at most this many times the smallest."""

_MOST = 4
"""Numbers in a cell that can be told apart as bars."""

_WIDTH, _LINE, _BAR, _CHAR = 860, 18, 12, 6.3


@dataclass(frozen=True)
class Panel:
    """The numbers of one unit in one column: ``bars[i]`` holds those of row i, which may be none."""

    title: str
    bars: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Chart:
    """The plot of one table: a label for each row, and its panels."""

    labels: tuple[str, ...]
    panels: tuple[Panel, ...]


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    pages, pictures = render({page: page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))})
    for stale in set(PICTURES.glob("*.svg")) - set(pictures):
        stale.unlink()
    for path, text in {**pages, **pictures}.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(pictures)} pictures in {PICTURES.relative_to(ROOT)}")


def render(pages: dict[Path, str]) -> tuple[dict[Path, str], dict[Path, str]]:
    """The texts of ``pages`` with a link below each table that is drawn, and the pictures, by path."""
    linked, pictures = {}, {}
    for page, text in pages.items():
        names: Counter[str] = Counter()

        def with_picture(found: re.Match[str], page: Path = page, text: str = text, names: Counter[str] = names) -> str:
            lines = [line for line in found[0].splitlines() if line.startswith("|")]
            chart = read(lines)
            table = "\n".join(lines) + "\n"
            if not chart.panels:
                return table
            name = f"{page.stem}-{_section(text[: found.start()])}"
            names[name] += 1
            picture = PICTURES / f"{name}{'' if names[name] == 1 else f'-{names[name]}'}.svg"
            pictures[picture] = draw(chart)
            return f"{table}\n![The table above as bars](../pictures/measurements/{picture.name})\n"

        linked[page] = _TABLE.sub(with_picture, text)
    return linked, pictures


def _section(before: str) -> str:
    """A file name for the section that ``before`` ends in, so that other sections' pictures keep theirs."""
    headings = re.findall(r"^#+ (.*)$", before, re.MULTILINE) or ["table"]
    return "-".join(re.findall(r"[a-z0-9]+", headings[-1].lower())[:6])


def read(lines: list[str]) -> Chart:
    """The chart of a Markdown table, whose first column holds the labels. Lines 0 and 1 are its header."""
    header, *rows = ([_plain(cell) for cell in line.strip().strip("|").split("|")] for line in [lines[0], *lines[2:]])
    labels, titles = [row[0] for row in rows], header[1:]
    cells = [[list(_values(cell)) for cell in row[1:]] for row in rows]
    contenders = [i for i, title in enumerate(titles) if _CONTENDER.search(title)]
    if len(contenders) >= 2:
        if "ratio" in titles:  # then the goal is one of ratios
            contenders = [i for i in contenders if titles[i] != "goal"]
        labels, titles = [titles[i] for i in contenders], labels
        columns = [[row[i] for i in contenders] for row in cells]
    else:
        kept = [i for i, title in enumerate(titles) if title not in _NO_RESULT]
        titles, columns = [titles[i] for i in kept], [[row[i] for row in cells] for i in kept]
    panels = [panel for title, column in zip(titles, columns, strict=True) for panel in _panels(title, column)]
    return Chart(tuple(labels), tuple(panels))


def _panels(title: str, column: list[list[tuple[float, str]]]) -> Iterator[Panel]:
    """A panel for each unit of the numbers in ``column``, which holds a list for each label."""
    for unit in dict.fromkeys(unit for cell in column for _, unit in cell):
        bars = tuple(tuple(value for value, its in cell if its == unit) for cell in column)
        positive = [value for cell in bars for value in cell if value > 0]
        enough = sum(map(bool, bars)) >= max(2, len(column) / 2)
        seen = positive and max(positive) <= _SEEN * min(positive) and max(map(len, bars)) <= _MOST
        if enough and seen:
            yield Panel(f"{title}, {unit}" if title and unit else title or unit, bars)


def _plain(cell: str) -> str:
    """A cell's text without Markdown's marks."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", cell).strip()


def _values(cell: str) -> Iterator[tuple[float, str]]:
    """The numbers of a cell, each with the last unit that follows it or a later one: 1, 2 ms is 1 ms and 2 ms."""
    found = []
    for part in re.split(r"; |, | / ", re.sub(r"\([^)]*\)", "", cell)):
        value = _VALUE.match(part.strip())
        if not value:
            break
        found.append((float(value[1].replace(",", "")), value[2] if value[2] in _UNITS else ""))
    unit = next((unit for _, unit in reversed(found) if unit), "")
    return ((value, own or unit) for value, own in found)


def draw(chart: Chart) -> str:
    """The chart as SVG, ``_WIDTH`` wide: as many panels beside each other as there is room for, then the next line."""
    kept = [i for i in range(len(chart.labels)) if any(panel.bars[i] for panel in chart.panels)]
    heights = {i: max(_LINE, _BAR * max(len(panel.bars[i]) for panel in chart.panels) + 6) for i in kept}
    labels = _WIDTH * 0.35
    per_line = min(len(chart.panels), 5)
    width = (_WIDTH - labels) / per_line
    titles = [_lines(panel.title, width - 8) for panel in chart.panels]
    head = 12 + 12 * max(map(len, titles))
    block = head + sum(heights.values()) + 8
    shapes = []
    for number, panel in enumerate(chart.panels):
        line, place = divmod(number, per_line)
        top, left = line * block, labels + place * width
        room = width - 58  # for the number behind the longest bar
        largest = max(map(max, filter(None, panel.bars)))
        for j, text in enumerate(titles[number]):
            shapes.append(f'<text class="title" x="{left:.0f}" y="{top + 14 + 12 * j}">{text}</text>')
        y = top + head
        for i in kept:
            label = chart.labels[i]
            if place == 0:
                shapes.append(f'<text x="4" y="{y + 12}">{_lines(label, labels - 12, most=1)[0]}</text>')
            kind = "reference" if _REFERENCE.search(label) and "now" not in label else "ours"
            for j, value in enumerate(panel.bars[i]):
                bar = max(1.0, room * max(0.0, value) / largest)
                at = y + 2 + j * _BAR
                shapes.append(
                    f'<rect class="{kind}" x="{left:.0f}" y="{at}" width="{bar:.1f}" height="{_BAR - 2}"/>'
                    f'<text class="number" x="{left + bar + 4:.1f}" y="{at + 9}">{value:,.10g}</text>'
                )
            y += heights[i]
    lines = -(-len(chart.panels) // per_line)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {lines * block}" role="img">\n'
        "<style>text { font: 11px sans-serif; fill: #1c1c1c } text.title { font-weight: bold } "
        "text.number { font-size: 10px; fill: #444444 } rect.ours { fill: #3566b0 } rect.reference { fill: #b5b5b5 } "
        "rect.page { fill: #ffffff }</style>\n"
        f'<rect class="page" width="{_WIDTH}" height="{lines * block}"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _lines(text: str, width: float, most: int = 2) -> list[str]:
    """``text`` in at most ``most`` lines of some ``width`` pixels, escaped for XML; a cut is marked."""
    lines = textwrap.wrap(text, int(width / _CHAR), max_lines=most, placeholder=" …") or [""]
    return [escape(line) for line in lines]


if __name__ == "__main__":
    main()

"""``hardpoint explain --html``: the table of choices as one page, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

Row = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --win: #2a7d4f; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
code { font-size: .92em; } nav a { margin-right: 1em; } h2 { margin-top: 2.2em; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5em 0; padding: .4em .8em; }
summary { cursor: pointer; } .bar { display: flex; gap: 2px; margin: .4em 0; }
.bar span { flex: 1; background: var(--soft); border-left: 4px solid var(--win); padding: .2em .6em; }
.bar small, .soft { opacity: .7; display: block; } table { border-collapse: collapse; width: 100%; margin: .6em 0; }
th, td { text-align: left; vertical-align: top; padding: .3em .6em; border-bottom: 1px solid var(--line); }
"""

_INTRO = (
    "Each line is one use of a layer, an op or a kernel, and names the chosen implementation. Where several share it, "
    "each serves a range of tokens per step. Open a line to see every candidate that was not chosen, and why. A "
    "question mark: the implementation could not be asked whether it supports the use."
)


def page(title: str, table: Mapping[str, Any]) -> str:
    """The whole page for ``SelectionTable.to_json``; every text of it is escaped."""
    families: dict[str, dict[tuple[str, str, int], list[Row]]] = {}
    for row in table["rows"]:
        use = (str(row["of"] or ""), str(row["workload"]), int(row.get("stage", 0)))
        families.setdefault(row["family"], {}).setdefault(use, []).append(row)
    links = "".join(f'<a href="#{_text(family)}">{_text(family)}</a>' for family in families)
    sections = "".join(_section(family, uses) for family, uses in families.items())
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{_text(title)}</h1>\n<p>{_text(_INTRO)}</p>\n"
        f"<p>Selection digest <code>{_text(table['digest'])}</code></p>\n<nav>{links}</nav>\n{sections}</body></html>\n"
    )


def _section(family: str, uses: Mapping[tuple[str, str, int], Sequence[Row]]) -> str:
    """A family, with one entry for uses that differ in nothing but their workload."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (of, workload, stage), rows in uses.items():
        head = f"<b>{_text(' '.join(filter(None, (family, of))))}</b>"
        head += f" (stage {stage})" if "stage" in rows[0] else ""
        alike.setdefault((head, _ranges(rows), _losers(rows)), []).append(workload)
    entries = []
    for (head, ranges, losers), workloads in alike.items():
        number = f" &times; {len(workloads)}" if len(workloads) > 1 else ""
        listed = "".join(f"<div class=soft><code>{_text(w)}</code></div>" for w in workloads if w)
        entries.append(f"<details><summary>{head}{number}{ranges}</summary>{listed}{losers}</details>\n")
    return f'<h2 id="{_text(family)}">{_text(family)}</h2>\n{"".join(entries)}'


def _ranges(rows: Iterable[Row]) -> str:
    """The selected contributions, each with its range of tokens."""
    parts = []
    for row in rows:
        mark = "?" if "not_asked" in row else ""
        notes = [f"rule: {row['rule']}", f"certified: {row['certified']}"]
        notes += [row[key] for key in ("measured", "not_asked") if key in row]
        parts.append(
            f"<span><small>tokens: {_text(row['range'])}</small><b>{_text(row['chosen'])}{mark}</b> "
            f"({_text(row['plugin'])})<small>{_text('; '.join(notes))}</small></span>"
        )
    return f"<div class=bar>{''.join(parts)}</div>"


def _losers(rows: Sequence[Row]) -> str:
    """Every candidate that serves no range, each with its reasons; the rows of a use have the same."""
    lines = []
    for loser in rows[0]["rejected"]:
        reasons = "".join(_reason(reason) for reason in loser["reasons"])
        lines.append(f"<tr><td>{_text(loser['name'])} ({_text(loser['plugin'])})</td><td>{reasons}</td></tr>")
    if not lines:
        return "<p>There is no other candidate.</p>"
    return f"<table><tr><th>not chosen</th><th>why</th></tr>{''.join(lines)}</table>"


def _reason(reason: Mapping[str, str]) -> str:
    text = _text(reason["message"])
    if "wanted" in reason or "supported" in reason:
        wanted, supported = (_text(reason.get(key, "-")) for key in ("wanted", "supported"))
        text += f"<small class=soft>wanted: {wanted}; supported: {supported}</small>"
    if "fix" in reason:
        text += f"<small class=soft>fix: <code>{_text(reason['fix'])}</code></small>"
    return f"<div>{text}</div>"


def _text(value: object) -> str:
    return escape(str(value))

"""``hardpoint explain``: the implementation chosen for each part of a model, the rule that chose it, and the reasons
against the others."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from hardpoint.cli.explain_html import page
from hardpoint.config import EngineConfig
from hardpoint.terminal.engine_options import EngineCommand
from hardpoint.terminal.output import check_writable, print_json, print_table, write_text

_LINES = 60
"""Lines of the summary where all fits."""
_FEWEST_NOTES = 5
"""Reasons that are shown however long the table is."""
_HEADS = ("for", "tokens", "chosen", "certified", "rule")
_GAP = "  "
_LEAST_NAME = 9
"""Columns of a name that is cut, at least."""
_LEAST_USEFUL = (
    {"platform", "not-asked-for"},
    {"arch", "batch-invariant", "device-feature", "dtype", "kv-dtype", "layout", "phase", "spec", "tokens"},
    {"comes-after", "replaced"},
)
"""Codes of reasons that tell little: of other hardware, of other requests, and of candidates that come later."""


@click.command(cls=EngineCommand, short_help="Show which implementation serves what, and why not the others.")
@click.option(
    "--device",
    metavar="PRESET",
    help="Answer for a device that this machine lacks, such as zen4. A wrong name lists the known ones.",
)
@click.option("--all", "show_all", is_flag=True, help="Show every workload, and every reason against every candidate.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--html", "html_file", metavar="FILE", help="Write everything as one web page. -: to stdout.")
def explain(config: EngineConfig, device: str | None, show_all: bool, as_json: bool, html_file: str | None) -> None:
    """Show which implementation would serve each part of MODEL, and why not the others. Loads no weights.

    There is a line for each family and kind of layer, op or matrix, and for each range of tokens where several
    implementations share it. Below it stand the reasons that a user can act on, or that follow from the workload; --all
    shows every workload and every reason. For hardware that is not here, "?" marks an implementation that could not be
    asked whether it supports the workload.
    """
    from hardpoint.engine.explain import explain as ask

    check_writable("--html", html_file)
    table = ask(config, device).to_json()
    if html_file is not None:
        write_text(html_file, page(f"hardpoint explain {config.model} on {device or 'this machine'}", table))
        if html_file != "-":
            click.echo(f"written: {html_file}", err=True)
        return
    if as_json:
        print_json(table)
        return
    rows: Any = table["rows"]
    notes: Any = table["notes"]
    if show_all:
        print_table(
            ["for", "uses", "tokens", "chosen", "certified", "rule", "not chosen, and why"],
            [
                [subject, count, *rest]
                for (subject, *rest), count in Counter(
                    (_subject(row), row["range"], _chosen(row), row["certified"], _rule(row), _losers(row))
                    for row in rows
                ).items()
            ],
        )
    else:
        for line in _summary(rows, _width()):
            click.echo(line)
    for note in notes:
        click.echo(note)
    click.echo(f"selection digest {table['digest']}")


def _summary(rows: list[dict[str, Any]], width: int | None) -> list[str]:
    """The table with a line for each subject and range of tokens, and the reasons that are of use.

    Lines that are longer than ``width`` are cut, if there is one.
    """
    plans: dict[tuple[str, str, int], list[tuple[str, str, str, str]]] = {}
    for row in rows:
        line = (row["range"], _chosen(row), row["certified"], row["rule"])
        plans.setdefault((_title(row), row["workload"], row.get("stage", 0)), []).append(line)
    alike: dict[tuple[str, tuple[tuple[str, str, str, str], ...]], list[int]] = {}
    for (title, _, stage), lines in plans.items():
        alike.setdefault((title, tuple(lines)), []).append(stage)
    all_stages = {row.get("stage", 0) for row in rows}
    cells = [_HEADS]
    for (title, served), uses in alike.items():
        where = "" if set(uses) == all_stages else f" (stage {', '.join(map(str, sorted(set(uses))))})"
        cells.append((f"{title}{where}" if len(uses) == 1 else f"{title} x{len(uses)}{where}", *served[0]))
        cells += [("", *line) for line in served[1:]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        chosen, beyond = _HEADS.index("chosen"), sum(widths) + len(_GAP) * (len(widths) - 1) - width
        widths[chosen] -= max(0, min(beyond, widths[chosen] - _LEAST_NAME))
    table = [
        _GAP.join(_cut(cell, size).ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    notes = list(dict.fromkeys(note for row in rows for note in _notes(row)))
    room = max(_FEWEST_NOTES, _LINES - len(table) - 4)
    more = [f"{len(notes) - room} more reasons"] if len(notes) > room else []
    return [
        *table,
        "",
        *(_cut(note, width) for note in notes[:room]),
        *more,
        "all reasons: --all; for programs: --json",
    ]


def _notes(row: dict[str, Any]) -> Iterator[str]:
    """A note on one row: what was measured or not asked, and why the nearest other was not chosen."""
    title = _title(row)
    if "not_asked" in row:
        yield f"? {title}: {row['chosen']} was not asked whether it supports this: {row['not_asked']}"
    if "measured" in row:
        yield f"{title}: {row['chosen']}: {row['measured']}"
    for loser in row["rejected"]:
        if _use(loser) == len(_LEAST_USEFUL):
            reason = max(loser["reasons"], key=lambda reason: "fix" in reason)
            fix = f"; fix: {reason['fix']}" if "fix" in reason else ""
            yield f"{title}: not {loser['name']}: {reason['message']}{fix}"


def _use(loser: dict[str, Any]) -> int:
    """How much the reasons against a candidate tell: as much as the one that tells least."""
    return min(
        next((level for level, codes in enumerate(_LEAST_USEFUL) if reason["code"] in codes), len(_LEAST_USEFUL))
        for reason in loser["reasons"]
    )


def _title(row: dict[str, Any]) -> str:
    return f"{row['family']} {row['of']}" if row["of"] else str(row["family"])


def _width() -> int | None:
    """Columns of a line; None where nothing is to be cut: the output is no terminal, and COLUMNS says nothing."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else None


def _cut(text: str, width: int | None) -> str:
    """The first line of ``text``, or as much of it as fits, and three dots; without a width all lines, as one."""
    if width is None:
        return " ".join(text.split())
    line = text.partition("\n")[0]
    return line if line == text and len(line) <= width else line[: max(width - 3, 0)].rstrip() + "..."


def _subject(row: dict[str, Any]) -> str:
    """Family and name, and the workload's plain fields; nested ones (a layer's arguments) stand in --json."""
    fields = re.split(r"(?<!,) (?=\w+=)", row["workload"])
    title = _title(row) + (f" (stage {row['stage']})" if "stage" in row else "")
    return "\n".join([title, *(f"  {field}" for field in fields if field and "(" not in field)])


def _rule(row: dict[str, Any]) -> str:
    return "\n".join(filter(None, [row["rule"], row.get("measured", "").replace(", ", "\n")]))


def _chosen(row: dict[str, Any]) -> str:
    return f"{row['chosen']} ({row['plugin']})" + ("?" if "not_asked" in row else "")


def _losers(row: dict[str, Any]) -> str:
    """The losers and why."""
    lines = []
    for loser in row["rejected"]:
        lines.append(f"{loser['name']} ({loser['plugin']})")
        for reason in loser["reasons"]:
            lines.append(f"  {reason['message']}")
            if "wanted" in reason or "supported" in reason:
                lines.append(f"    wanted {reason.get('wanted', '-')} | supported {reason.get('supported', '-')}")
            if "fix" in reason:
                lines.append(f"    fix: {reason['fix']}")
    return "\n".join(lines)

"""``hardpoint explain``: who would serve what, by which rule, and every reason against the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from typing import Any

import click

from hardpoint.cli.options import EngineCommand
from hardpoint.cli.output import print_json, print_table
from hardpoint.config import EngineConfig


@click.command(cls=EngineCommand, short_help="Show which implementation serves what, and why not the others.")
@click.option("--device", metavar="PRESET", help="Answer for hardware that is not here, such as a plugin's preset.")
@click.option("--all", "show_all", is_flag=True, help="Leave nothing out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, which leaves nothing out.")
def explain(config: EngineConfig, device: str | None, show_all: bool, as_json: bool) -> None:
    """Show which implementation would serve each part of MODEL, and why not the others. Loads no weights.

    What plugins of other platforms have for those is counted, and reasons that a row shares with the one above it are
    not repeated; --all shows everything.
    """
    from hardpoint.engine.explain import explain as ask

    table = ask(config, device).to_json()
    if as_json:
        print_json(table)
        return
    rows: Any = table["rows"]
    elsewhere = frozenset() if show_all else _of_other_platforms(rows)
    uses = Counter(
        (_subject(row), row["range"], _chosen(row), row["certified"], _rule(row), _losers(row, elsewhere))
        for row in rows
    )
    shown = [[subject, count, *rest] for (subject, *rest), count in uses.items()]
    print_table(
        ["for", "uses", "tokens", "chosen", "certified", "rule", "not chosen, and why"],
        shown if show_all else _without_repetition(shown),
    )
    click.echo(f"selection digest {table['digest']}")


def _subject(row: dict[str, Any]) -> str:
    """Family and name, and the workload's plain fields; nested ones (a layer's arguments) stand in --json."""
    title = f"{row['family']} {row['of']}" if row["of"] else str(row["family"])
    fields = re.split(r"(?<!,) (?=\w+=)", row["workload"])
    return "\n".join([title, *(f"  {field}" for field in fields if field and "(" not in field)])


def _rule(row: dict[str, Any]) -> str:
    return "\n".join(filter(None, [row["rule"], row.get("measured", "").replace(", ", "\n")]))


def _chosen(row: dict[str, Any]) -> str:
    return f"{row['chosen']} ({row['plugin']})"


def _without_repetition(rows: list[list[Any]]) -> list[list[Any]]:
    """The rows, with reasons of several lines as a word where those of the row above are the same."""
    above = [None, *(row[-1] for row in rows)]
    return [
        [*row[:-1], "as above"] if row[-1] == before and "\n" in row[-1] else row
        for row, before in zip(rows, above, strict=False)
    ]


def _of_other_platforms(rows: list[dict[str, Any]]) -> frozenset[str]:
    """The plugins that offer a platform, but not the one that was chosen."""
    platform = next(row for row in rows if row["family"] == "platform")
    return frozenset(loser["plugin"] for loser in platform["rejected"]) - {platform["plugin"]}


def _losers(row: dict[str, Any], elsewhere: Collection[str] = ()) -> str:
    """The losers and why; what those plugins have for other platforms is a number."""
    lines = []
    hidden = [
        loser
        for loser in row["rejected"]
        if loser["plugin"] in elsewhere and any(reason["code"] == "platform" for reason in loser["reasons"])
    ]
    for loser in row["rejected"]:
        if loser in hidden:
            continue
        lines.append(f"{loser['name']} ({loser['plugin']})")
        for reason in loser["reasons"]:
            lines.append(f"  {reason['message']}")
            if "wanted" in reason or "supported" in reason:
                lines.append(f"    wanted {reason.get('wanted', '-')} | supported {reason.get('supported', '-')}")
            if "fix" in reason:
                lines.append(f"    fix: {reason['fix']}")
    if hidden:
        are = "is for another platform" if len(hidden) == 1 else "are for other platforms"
        lines.append(f"{len(hidden)} more {are} (--all shows {'it' if len(hidden) == 1 else 'them'})")
    return "\n".join(lines)

"""``hardpoint explain``: who would serve what, by which rule, and every reason against the others."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import click

from hardpoint.cli.options import EngineCommand
from hardpoint.cli.output import print_json, print_table
from hardpoint.config import EngineConfig


@click.command(cls=EngineCommand, short_help="Show which implementation serves what, and why not the others.")
@click.option("--device", metavar="PRESET", help="Answer for hardware that is not here, such as a plugin's preset.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(config: EngineConfig, device: str | None, as_json: bool) -> None:
    """Show which implementation would serve each part of MODEL, and why not the others. Loads no weights."""
    from hardpoint.engine.explain import explain as ask

    table = ask(config, device).to_json()
    if as_json:
        print_json(table)
        return
    rows: Any = table["rows"]
    uses = Counter(
        (_subject(row), row["range"], _chosen(row), row["certified"], row["rule"], _losers(row)) for row in rows
    )
    print_table(
        ["for", "uses", "tokens", "chosen", "certified", "rule", "not chosen, and why"],
        [[subject, count, *rest] for (subject, *rest), count in uses.items()],
    )
    click.echo(f"selection digest {table['digest']}")


def _subject(row: dict[str, Any]) -> str:
    """Family and name, and the workload's plain fields; nested ones (a layer's arguments) stand in --json."""
    title = f"{row['family']} {row['of']}" if row["of"] else str(row["family"])
    fields = re.split(r"(?<!,) (?=\w+=)", row["workload"])
    return "\n".join([title, *(f"  {field}" for field in fields if field and "(" not in field)])


def _chosen(row: dict[str, Any]) -> str:
    return f"{row['chosen']} ({row['plugin']})"


def _losers(row: dict[str, Any]) -> str:
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

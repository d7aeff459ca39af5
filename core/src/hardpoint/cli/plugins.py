"""``hardpoint plugins``: what is installed, what it offers, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from hardpoint.cli.plugin_authors import api_diff, api_reference, new
from hardpoint.cli.plugin_operators import doctor, lock, verify
from hardpoint.plugin_host import PluginRecord, discover
from hardpoint.terminal.output import print_json, print_table


@click.group(short_help="List plugins; check, lock, write and compare them.")
def plugins() -> None:
    """Plugins are code that runs in this process; listing them runs none of it."""


for command in (lock, verify, doctor, new, api_diff, api_reference):
    plugins.add_command(command)


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_plugins(as_json: bool) -> None:
    """List every installed plugin, with what is wrong with it and how to mend it."""
    rows = [describe(record) for record in discover(quiet=True).records]
    if as_json:
        print_json(rows)
        return
    print_table(
        ["plugin", "version", "distribution", "API", "status", "contributes", "note", "fix"],
        [
            [
                *(row[key] for key in ("name", "version", "distribution", "api", "status")),
                _counts(row),
                row["note"],
                row["fix"],
            ]
            for row in rows
        ],
    )


def _counts(row: dict[str, Any]) -> str:
    """``op 12, attention 1``."""
    return ", ".join(f"{family} {count}" for family, count in Counter(c["family"] for c in row["contributes"]).items())


def describe(record: PluginRecord) -> dict[str, Any]:
    """One plugin as plain data."""
    manifest = record.manifest
    return {
        "name": record.name,
        "version": record.version,
        "distribution": record.distribution,
        "editable": record.editable,
        "api": str(manifest.api) if manifest else None,
        "status": "ready" if record.is_usable else record.status,  # imported or not: no engine runs here
        "contributes": [
            {"family": c.family, "of": c.of, "name": c.name, "summary": c.summary}
            for c in (manifest.contributions if manifest else ())
        ],
        "note": record.reason.message if record.reason else None,
        "fix": record.reason.fix if record.reason else None,
    }

"""``hardpoint bench``: one subcommand per benchmark, found without importing them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import cast

import click

from hardpoint.bench.command import as_command
from hardpoint.bench.plot import check_plot, write_plot
from hardpoint.bench.registry import BenchResult, find
from hardpoint.terminal.lazy import Lazy, LazyGroup
from hardpoint.terminal.output import check_writable, print_json, print_table, write_text


def _command(name: str, entry: Lazy) -> click.Command:
    """A benchmark's function, with its own options, as a command that prints, saves and plots its result."""
    function = cast(Callable[..., BenchResult], entry.load())

    @click.option("--plot", "plot_file", metavar="FILE", help="Save a picture of the result (PNG).")
    @click.option("--json", "json_file", metavar="FILE", help="Save the result as JSON; - is stdout.")
    def run(json_file: str | None, plot_file: str | None, **options: object) -> None:
        check_writable("--json", json_file)
        if plot_file is not None:
            check_plot("--plot", plot_file)
        result = function(**options)
        if json_file not in (None, "-"):  # files first: who reads stdout may have gone
            write_text(json_file, json.dumps(result.to_json(), indent=2) + "\n")
        if plot_file is not None:
            write_plot(result, plot_file)
        if json_file == "-":
            print_json(result.to_json())
        else:
            _print(result)

    return as_command(name, function, run)


def _print(result: BenchResult) -> None:
    columns = ["", "value", "unit", "share", "roofline", "of roofline", "peer", "of peer", "note"]
    rows = [
        [
            r.name,
            r.value,
            r.unit,
            _percent(r.share),
            r.roofline,
            _percent(r.of_roofline),
            r.peer,
            _percent(r.of_peer),
            r.note,
        ]
        for r in result.rows
    ]
    print_table(columns, rows, title=result.name)
    for label, text in (("roofline", result.roofline), ("peer", result.peer)):
        if text:
            click.echo(f"{label}: {text}")
    click.echo(", ".join(f"{key} {value}" for key, value in result.environment.items()))


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


bench = LazyGroup(
    "bench",
    {name: Lazy(entry.target, entry.summary) for name, entry in find().items()},
    _command,
    help="Measure speed, beside the hardware's limit and another engine.",
    no_args_is_help=True,
)

"""Tables and JSON, as the commands print them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence

import click

from hardpoint_plugin_api import ConfigError

_UNBOUNDED = 2**20
"""Columns; no row has as many."""


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "", err: bool = False
) -> None:
    """Print ``rows`` as a table, on stderr with ``err``. None is an empty cell; a float has four digits.

    A terminal's table is as wide as the terminal. Elsewhere COLUMNS says the width, and without it every row is whole.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[_cell(value) for value in row] for row in rows]
    stream = sys.stderr if err else sys.stdout
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold")
        lines = [line for row in cells for line in row[number].splitlines()]
        table.columns[number].min_width = min(max(map(len, [column, *lines])), 12)
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(file=stream, highlight=False)
    if not stream.isatty():
        columns = os.environ.get("COLUMNS", "")
        console.width = int(columns) if columns.isdecimal() and int(columns) else _UNBOUNDED
    if title:
        console.print(Text(title, style="table.title"))
    with console.capture() as printed:
        console.print(table, crop=False)  # a column too narrow for its name makes the table wider than asked for
    stream.write("\n".join(line.rstrip() for line in printed.get().split("\n")))


def print_json(data: object) -> None:
    """Print ``data`` as JSON."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def check_writable(flag: str, path: str | None) -> None:
    """Raise ConfigError where ``write_text`` could not write to what ``flag`` named; leaves the disk as it is."""
    if path == "":
        raise ConfigError(f"{flag} is empty; give the name of a file, or - for stdout")
    if path in (None, "-"):
        return
    try:
        is_new = not os.path.lexists(path)
        if not is_new and os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            return  # a pipe, which is opened once
        with open(path, "a", encoding="utf-8"):
            pass
        if is_new:
            os.remove(path)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write {path}: {error.strerror}") from error


def make_folder(flag: str, path: str | None) -> None:
    """Make the folder that ``flag`` named, if any. Raises ConfigError where nothing can be written to it."""
    if path is None:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot make the folder {path!r}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{flag}: cannot write to the folder {path!r}")


def write_text(path: str, text: str) -> None:
    """Write ``text`` to the file a flag named; ``-`` is stdout. Raises ConfigError where that cannot be done."""
    if path == "-":
        click.echo(text, nl=False)
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)

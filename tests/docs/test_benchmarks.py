"""docs/benchmarks.md names every benchmark, and no flag that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import click

from hardpoint.bench.registry import find
from hardpoint.cli.bench import bench
from hardpoint.cli.tune import linear
from hardpoint.terminal.lazy import HELP_OPTIONS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_every_benchmark_is_there() -> None:
    assert set(re.findall(r"^\| `([a-z][a-z0-9]*)` \|", PAGE, re.MULTILINE)) == set(find())


def test_every_flag_exists() -> None:
    context = click.Context(bench, help_option_names=HELP_OPTIONS)
    commands = [bench.get_command(context, name) for name in find()]
    commands.append(linear)
    known = {flag for command in commands if command for param in command.get_params(context) for flag in param.opts}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known

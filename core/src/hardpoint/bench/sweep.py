"""Another benchmark at every point of a grid of its flags; what is finished is kept in a file, and not run again."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import click

from hardpoint.bench.command import as_command
from hardpoint.bench.registry import BenchResult, BenchRow, Curve, benchmark, environment, find
from hardpoint.terminal.lazy import HELP_OPTIONS
from hardpoint.terminal.output import check_writable
from hardpoint_plugin_api import ConfigError, UnknownNameError

Point = dict[str, str]
"""A value for each flag that varies, without its dashes."""


@click.argument("name", metavar="BENCHMARK")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--vary",
    multiple=True,
    required=True,
    metavar="FLAG=V,V,...",
    help="Flag of the benchmark and its values; repeatable. The grid has all combinations.",
)
@click.option(
    "--file",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of finished points, one a line. A second run adds the missing points.",
)
@click.option("--show", multiple=True, metavar="ROW", help="Rows to print and plot.  [default: each point's first]")
@benchmark("sweep", "Another benchmark over a grid of its flags; goes on where it stopped.")
def sweep(name: str, flags: tuple[str, ...], vary: tuple[str, ...], file: Path, show: tuple[str, ...]) -> BenchResult:
    """Run BENCHMARK at every point of the grid that --vary spans, with FLAGS (after --) the same at each.

    \b
    hardpoint bench sweep serve --file grid.jsonl --vary concurrency=1,8,64 --vary input-len=64,512 -- --requests 50

    Every finished point is a line of the file. A second run of the same command does the points that are missing; with
    other FLAGS, versions or on another machine it is refused, for its points could not be compared.
    """
    grid = _grid(vary)
    head = {"benchmark": name, "flags": list(flags), "environment": dict(environment())}
    run = _runner(name, flags)
    for point in grid:
        run(point, False)
    check_writable("--file", str(file))
    done = _read(file, head)
    rows: list[BenchRow] = []
    for point in grid:
        if _key(point) not in done:
            click.echo(f"hardpoint: {name} at {_words(point)}", err=True)
            result = run(point, True)
            assert result is not None
            done[_key(point)] = result.to_json()
            _append(file, head, {"point": point, "result": done[_key(point)]})
        rows += [_row(point, row) for row in _shown(done[_key(point)], show)]  # refuses --show at the first point
    results = [(point, done[_key(point)]) for point in grid]
    roofline, peer = (_common(key, results, file) for key in ("roofline", "peer"))
    return BenchResult(f"sweep {name}", tuple(rows), roofline, peer, curves=_curves(results, grid, show))


def _grid(vary: Sequence[str]) -> list[Point]:
    """Every combination of values, the first flag's changing slowest. Raises ConfigError."""
    values: dict[str, list[str]] = {}
    for text in vary:
        flag, equals, listed = text.partition("=")
        flag = flag.removeprefix("--")
        chosen = [value for value in listed.split(",") if value]
        if not flag or not equals or not chosen:
            raise ConfigError(f"--vary {text} names no flag and values; write it as concurrency=1,8,64")
        if flag in values:
            raise ConfigError(f"--vary {text}: {flag} varies already; give all its values at once")
        values[flag] = list(dict.fromkeys(chosen))
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _arguments(command: click.Command, point: Point) -> list[str]:
    """The flags of a point; those that take no value are varied over true and false. Raises ConfigError."""
    opposites: dict[str, list[str]] = {}
    for param in command.get_params(click.Context(command, help_option_names=HELP_OPTIONS)):
        if isinstance(param, click.Option) and param.is_flag:
            opposites |= dict.fromkeys(param.opts, param.secondary_opts[:1])
            opposites |= dict.fromkeys(param.secondary_opts, param.opts[:1])
    found: list[str] = []
    for name, value in point.items():
        flag = f"--{name}"
        if flag not in opposites:
            found += [flag, value]
        elif value in ("true", "false"):
            found += [flag] if value == "true" else opposites[flag]  # one without an opposite is left out
        else:
            raise ConfigError(f"--vary {name}={value}: {flag} takes no value; vary it as {name}=true,false")
    return found


def _runner(name: str, flags: Sequence[str]) -> Callable[[Point, bool], BenchResult | None]:
    """A function that parses a benchmark's arguments at a point and, if told so, runs it. Raises UnknownNameError."""
    known = {each: entry for each, entry in find().items() if each != "sweep"}
    if name not in known:
        raise UnknownNameError("benchmark", name, known)
    module, _, attribute = known[name].target.partition(":")
    function = cast(Callable[..., BenchResult], getattr(importlib.import_module(module), attribute))

    def call(point: Point, really: bool) -> BenchResult | None:
        def measured(**options: object) -> BenchResult | None:
            return function(**options) if really else None

        command = as_command(name, function, measured)
        arguments = [*flags, *_arguments(command, point)]
        result = command.main(arguments, f"hardpoint bench {name}", standalone_mode=False)
        return cast("BenchResult | None", result)

    return call


def _read(file: Path, head: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The results in ``file`` by point. Raises ConfigError where it was made otherwise than ``head`` says."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        if lines and not _is_json(lines[-1]):
            lines.pop()  # a run that was killed while it wrote
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        entries = [json.loads(line) for line in lines]
        found, points = (entries[0], entries[1:]) if entries else (head, [])
        changed = [key for key in head if found[key] != head[key]]
        results = {_key(entry["point"]): entry["result"] for entry in points}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--file {file} holds no sweep: {error!r}; name a new file") from None
    if changed:
        differences = "; ".join(f"{key}: {found[key]} there, {head[key]} now" for key in changed)
        raise ConfigError(f"--file {file} was made otherwise ({differences}); repeat that sweep, or name a new file")
    return results


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _append(file: Path, head: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    try:
        is_new = not file.exists() or not file.stat().st_size
        with file.open("a", encoding="utf-8") as lines:
            for line in (head, entry) if is_new else (entry,):
                lines.write(json.dumps(line) + "\n")
    except OSError as error:
        raise ConfigError(f"--file {file} cannot be written: {error.strerror}") from error


def _key(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


def _words(point: Point) -> str:
    return ", ".join(f"{flag} {value}" for flag, value in point.items())


def _shown(result: Mapping[str, Any], show: Sequence[str]) -> list[dict[str, Any]]:
    rows = {row["name"]: row for row in result["rows"]}
    for name in show:
        if name not in rows:
            raise UnknownNameError("row in --show:", name, rows)
    return [rows[name] for name in show or list(rows)[:1]]


def _common(key: str, results: Sequence[tuple[Point, Mapping[str, Any]]], file: Path) -> str:
    """The values of column ``key`` at all points, or where to find each point's value."""
    texts = {result[key] for _, result in results}
    return texts.pop() if len(texts) == 1 else f"another one at each point, which {file} names"


def _row(point: Point, row: Mapping[str, Any]) -> BenchRow:
    fields = {key: row[key] for key in ("value", "unit", "roofline", "peer", "better", "share", "note")}
    return BenchRow(f"{_words(point)}: {row['name']}", **fields)


def _curves(
    results: Sequence[tuple[Point, Mapping[str, Any]]], grid: Sequence[Point], show: Sequence[str]
) -> tuple[Curve, ...]:
    """Each row over the first flag, a curve for each combination of the others."""
    flag = next(iter(grid[0]))
    curves: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    for point, result in results:
        others = _words({key: value for key, value in point.items() if key != flag})
        for row in _shown(result, show):
            curves.setdefault((row["name"], row["unit"], others), []).append((point[flag], row["value"]))
    return tuple(
        Curve(
            f"{name}, {others}" if others else name,
            f"--{flag}",
            unit,
            tuple(_numbers([x for x, _ in points])),
            tuple(y for _, y in points),
        )
        for (name, unit, others), points in curves.items()
    )


def _numbers(texts: Sequence[str]) -> Sequence[float] | Sequence[str]:
    try:
        return [float(text) for text in texts]
    except ValueError:
        return texts

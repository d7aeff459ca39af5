"""A benchmark's result as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.bench.registry import BenchResult, BenchRow, Curve
from hardpoint.extras import require_extra
from hardpoint_plugin_api import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_plot(flag: str, path: str) -> None:
    """Raise ConfigError where ``write_plot`` could not write ``path``, which ``flag`` named, before all is measured."""
    if not path.endswith(".png"):
        raise ConfigError(f"{flag} {path}: a plot is a PNG; give a name that ends in .png")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: its folder is not there; make it, or name a file elsewhere")
    require_extra("plot", flag)


def write_plot(result: BenchResult, path: str) -> None:
    """Draw ``result`` to a PNG at ``path``: its curves, or where it has none, a bar for each row, by unit.

    Raises ConfigError where the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves: dict[tuple[str, str], list[Curve]] = {}
    for curve in result.curves:
        curves.setdefault((curve.x_label, curve.y_label), []).append(curve)
    units: dict[str, list[BenchRow]] = {}
    for row in () if curves else result.rows:
        units.setdefault(row.unit, []).append(row)
    num_panels = max(1, len(curves) + len(units))
    figure = Figure(figsize=(9, 0.8 + 3.6 * num_panels), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"hardpoint bench {result.name}")
    panels: list[Axes] = list(figure.subplots(num_panels, squeeze=False)[:, 0])
    for panel, ((x_label, y_label), group) in zip(panels, curves.items(), strict=False):
        _draw_curves(panel, group, x_label, y_label)
    for panel, (unit, rows) in zip(panels[len(curves) :], units.items(), strict=False):
        _draw_rows(panel, rows, unit)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}") from error


def _draw_curves(panel: Axes, curves: list[Curve], x_label: str, y_label: str) -> None:
    for curve in curves:
        panel.plot(curve.x, curve.y, label=curve.name, marker="o" if len(curve.x) < 30 else None)
    numbers = [x for curve in curves for x in curve.x if isinstance(x, float | int) and x > 0]
    if numbers and max(numbers) > 50 * min(numbers):
        panel.set_xscale("log")
    panel.set(xlabel=x_label, ylabel=y_label)
    panel.grid(alpha=0.3)
    panel.legend()


def _draw_rows(panel: Axes, rows: list[BenchRow], unit: str) -> None:
    names = [row.name for row in rows]
    panel.barh(names, [row.value for row in rows], color="tab:blue", label="measured")
    for label, marker, values in (
        ("roofline", "|", {row.name: row.roofline for row in rows if row.roofline is not None}),
        ("peer", "d", {row.name: row.peer for row in rows if row.peer is not None}),
    ):
        if values:
            panel.scatter(
                list(values.values()), list(values), marker=marker, s=90, color="black", label=label, zorder=3
            )
    panel.invert_yaxis()
    panel.set_xlabel(unit)
    panel.legend()

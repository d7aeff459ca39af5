"""Benchmarks by name, and what they return.

A benchmark is a function in a module of this package, decorated with ``@benchmark(name, summary)``; click options may
follow, and one that has a parameter ``config`` gets an EngineConfig, made of the flags of ``hardpoint generate``.
Listing reads those decorators from the source text, so that it imports none of the modules.
"""

from __future__ import annotations

import ast
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import importlib_metadata

F = TypeVar("F", bound=Callable[..., "BenchResult"])
HERE = Path(__file__).parent


@dataclass(frozen=True)
class BenchRow:
    """One measured value, the best that the hardware allows (``roofline``) and another program's (``peer``).

    All three are in ``unit``; ``share`` is the value's part of a whole that the benchmark divides up.
    """

    name: str
    value: float
    unit: str
    roofline: float | None = None
    peer: float | None = None
    better: Literal["lower", "higher"] = "lower"
    share: float | None = None
    note: str = ""

    @property
    def of_roofline(self) -> float | None:
        """How near the value is to the roofline: 1 is on it."""
        return self._ratio(self.roofline)

    @property
    def of_peer(self) -> float | None:
        """How the value compares with the peer's: above 1 is better than it."""
        return self._ratio(self.peer)

    def _ratio(self, other: float | None) -> float | None:
        if not other or not self.value:
            return None
        return other / self.value if self.better == "lower" else self.value / other


@dataclass(frozen=True)
class Curve:
    """Points to be plotted; curves with the same labels share axes."""

    name: str
    x_label: str
    y_label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class BenchResult:
    """Everything that a benchmark measured. ``peer`` and ``roofline`` say what those columns hold.

    ``curves`` are what a plot shows; without any it shows the rows.
    """

    name: str
    rows: tuple[BenchRow, ...]
    roofline: str = ""
    peer: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: environment())
    curves: tuple[Curve, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Everything as plain data, ratios included."""
        ratios = [{"of_roofline": row.of_roofline, "of_peer": row.of_peer} for row in self.rows]
        return asdict(self) | {"rows": [asdict(row) | more for row, more in zip(self.rows, ratios, strict=True)]}


@dataclass(frozen=True)
class BenchmarkEntry:
    """Where a benchmark is: found without importing it."""

    name: str
    summary: str
    target: str


def benchmark(name: str, summary: str) -> Callable[[F], F]:
    """Declare a function a benchmark. Both arguments must be literals: ``find`` reads them from the source."""
    return lambda function: function


def find(folder: Path = HERE, package: str = "hardpoint.bench") -> dict[str, BenchmarkEntry]:
    """Return every benchmark declared in the modules of ``folder``, by name. Two of one name are a bug."""
    found: dict[str, BenchmarkEntry] = {}
    for file in sorted(folder.glob("*.py")):
        source = file.read_text(encoding="utf-8")
        if "@benchmark(" not in source or file.name == Path(__file__).name:
            continue
        for node in ast.parse(source).body:
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", None) == "benchmark":
                    name, summary = map(ast.literal_eval, decorator.args)
                    assert name not in found, f"two benchmarks are called {name!r}"
                    assert isinstance(node, ast.FunctionDef)
                    found[name] = BenchmarkEntry(name, summary, f"{package}.{file.stem}:{node.name}")
    return found


def environment() -> dict[str, str]:
    """The environment of a result: machine, devices, interpreter, and the packages that do the work.

    Devices are those of every installed platform, whichever the benchmark uses; asking makes no device context.
    """
    from hardpoint.plugin_host import discover
    from hardpoint.selection.platform_choice import detect
    from hardpoint_plugin_api import Reason

    plugins = discover(quiet=True)
    answers = [detect(plugins, offer) for offer in plugins.offers("platform")]
    devices = [f"{answer[1].count} x {answer[1].name}" for answer in answers if not isinstance(answer, Reason)]
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "devices": ", ".join(devices),
        "cpus": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": importlib_metadata.version("torch"),
        **{record.distribution: record.version for record in plugins.records if record.is_usable},
    }

"""In what tiles the experts' matmuls run: as measured for one device and shape, or else by the table ``experts``.

Measured tilings stand in JSON files in the folders of tuning tables (tables.py); the first folder that has such a file
counts: one for each number of experts, width, device and element of weights,
``E=128,N=768,device_name=NAME,dtype=bfloat16.json``, where N is the experts' width and NAME the device's name with
underscores for spaces, matched exactly. Such a file is ``{"schema": 1, "tilings": {"PAIRS": {"rows": 16, "w13":
{"columns": 64, "depth": 128, "num_warps": 4, "num_stages": 4}, "w2": {...}}, ...}}``, PAIRS being a number of pairs of
a token and an expert in a step; of a step's neighbours the nearer, by ratio, is taken.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from hardpoint.kernels.tables import FOLDER, NO_OPTIONS, Options, Table, checked, table, table_of
from hardpoint.logs import log_once
from hardpoint_plugin_api import BuildContext, ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MatmulShape:
    """Columns of a tile, and how far along the summed axis one round goes. With a gate a tile has twice the columns.

    ``described`` has weights read through tensor descriptors: in hardware where devices can, slowly elsewhere.
    """

    columns: int
    depth: int
    num_warps: int
    num_stages: int
    described: bool = False
    options: Options = NO_OPTIONS


@dataclass(frozen=True)
class Tiling:
    """Rows of a tile, which both matmuls share, and the rest for each."""

    rows: int
    w13: MatmulShape
    w2: MatmulShape


HEIGHTS = (16, 32, 64, 128)
"""Rows that tiles may have."""


@dataclass(frozen=True)
class LayerShape:
    """The key of tiles, beside the number of pairs. ``itemsize`` is that of activations, ``element`` the weights'.

    ``by_round`` says that each round's products are scaled before they are added, which takes twice the registers.
    """

    experts: int
    width: int
    hidden: int
    itemsize: int
    element: str
    by_round: bool = False


@dataclass(frozen=True)
class TilingRule:
    """A tiling as the tuning table ``experts`` says it.

    Where ``least_columns`` is not 0 and a matmul has few programs, its tiles are narrowed, down to as many columns.
    """

    rows: int
    w13: MatmulShape
    w2: MatmulShape
    least_columns: int = 0

    def tiling(self, pairs: int, layer: LayerShape) -> Tiling:
        """The tiling for a step of so many pairs."""
        active = min(pairs, layer.experts)
        shapes = ((self.w13, layer.width), (self.w2, layer.hidden))
        return Tiling(self.rows, *(self._narrowed(shape, active * columns) for shape, columns in shapes))

    def _narrowed(self, shape: MatmulShape, columns_of_all: int) -> MatmulShape:
        columns = shape.columns
        while 0 < self.least_columns < columns and columns_of_all < columns * _ENOUGH_PROGRAMS:
            columns //= 2
        return shape if columns == shape.columns else replace(shape, columns=columns)


_ENOUGH_PROGRAMS = 256
"""So many keep large devices busy with what is read once."""

RuleTable = Table[TilingRule]

_FACTS: Mapping[str, type] = {"rows": int, "itemsize": int, "element": str, "by_round": bool}


def rule_table(ctx: BuildContext) -> RuleTable:
    """The tuning table of the context's device. Raises ConfigError for a file that is not right."""
    found = table_of(ctx, "experts", TilingRule, _FACTS)
    if high := [rule.use.rows for rule in found.rules if rule.use.rows > HEIGHTS[-1]]:
        raise ConfigError(f"tuning table experts: tiles may have {HEIGHTS[-1]} rows at most, got {high[0]}")
    return found


@cache
def _portable_rules() -> RuleTable:
    return table("experts", TilingRule, tuple(_FACTS.items()))


def by_rule(pairs: int, layer: LayerShape, rules: RuleTable | None = None) -> Tiling:
    """Tiles about as high as an expert has rows on average. ``rules`` are a device's, by default core's."""
    return of_height(-(-pairs // layer.experts), pairs, layer, rules)


def of_height(rows: int, pairs: int, layer: LayerShape, rules: RuleTable | None = None) -> Tiling:
    """The tiles of steps in which an expert has ``rows`` rows on average."""
    known = rules or _portable_rules()
    found = known.find(rows=rows, itemsize=layer.itemsize, element=layer.element, by_round=layer.by_round)
    return found.tiling(pairs, layer)


class TilingTable:
    """The tilings of one layer's shape on one device, by the number of pairs of a step.

    ``most_rows`` is the most rows that any of its tiles has.
    """

    most_rows = HEIGHTS[-1]

    def __init__(self, tuned: Mapping[int, Tiling], layer: LayerShape, rules: RuleTable | None = None) -> None:
        self._tuned, self._layer, self._rules = dict(sorted(tuned.items())), layer, rules
        self._known: dict[int, Tiling] = {}

    @classmethod
    def of(cls, ctx: BuildContext, layer: LayerShape) -> TilingTable:
        """The tiles of the first folder with a file for this layer; without one an empty table, which is logged once.

        Raises ConfigError for a file that is not right.
        """
        name = file_name(ctx.device.name, layer)
        path = next((folder / name for folder in (*ctx.tuning_folders, FOLDER) if (folder / name).is_file()), None)
        if path is None:
            message = (
                f"experts run in tiles that follow a rule: none are tuned for this shape and device ({name}), "
                "which hardpoint tune experts does"
            )
            log_once(logger, logging.INFO, name, message, scope=ctx.resources)
        return cls({} if path is None else read(path), layer, rule_table(ctx))

    def of_pairs(self, pairs: int) -> Tiling:
        """The tiling for a step of so many pairs."""
        if pairs not in self._known:
            nearest = min(self._tuned, key=lambda n: max(n / pairs, pairs / n), default=None)
            self._known[pairs] = by_rule(pairs, self._layer, self._rules) if nearest is None else self._tuned[nearest]
        return self._known[pairs]


def file_name(device: str, layer: LayerShape) -> str:
    """The name of the file for a layer's shape on a device."""
    shape = f"E={layer.experts},N={layer.width}"
    return f"{shape},device_name={device.replace(' ', '_')},dtype={layer.element}.json"


@lru_cache
def read(path: Path) -> dict[int, Tiling]:
    """The tilings of a file by numbers of pairs. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != 1:
            raise ValueError(f"schema {data['schema']} is not 1")
        found = {
            int(pairs): checked(entry, Tiling, f"tuned tiles {path}: {pairs} pairs")
            for pairs, entry in data["tilings"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"tuned tiles {path}: {error!r}; see the module's docstring, or delete the file") from error
    high = [tiling.rows for tiling in found.values() if tiling.rows > TilingTable.most_rows]
    if high or not found:
        wanted = f"some tilings of at most {TilingTable.most_rows} rows"
        raise ConfigError(f"tuned tiles {path}: expected {wanted}, got {high or 'none'}")
    return found


def write(path: Path, tilings: Mapping[int, Tiling]) -> None:
    """Write a file of tilings by numbers of pairs."""
    entries = {str(pairs): asdict(tiling) for pairs, tiling in sorted(tilings.items())}
    path.write_text(json.dumps({"schema": 1, "tilings": entries}, indent=2) + "\n", encoding="utf-8")

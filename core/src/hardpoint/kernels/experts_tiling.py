"""In what tiles the experts' matmuls run: as measured for one device and shape, or else by rule.

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
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from hardpoint.kernels.tables import FOLDER, checked
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


def by_rule(pairs: int, layer: LayerShape) -> Tiling:
    """Tiles about as high as an expert has rows on average."""
    rows_each = pairs / layer.experts
    return of_height(next((rows for rows in HEIGHTS if rows_each <= 1.5 * rows), HEIGHTS[-1]), pairs, layer)


def of_height(rows: int, pairs: int, layer: LayerShape) -> Tiling:
    """Tiles of ``rows``. Where there are few of them they are narrow, so that there are enough."""
    if layer.itemsize == 4:
        shape = MatmulShape(32, 32, 4, 2)
        return Tiling(min(rows, 32), shape, shape)
    if rows == 16 and layer.element == "float4_e2m1":  # measured on an H100, docs/measurements/h100.md
        shape = MatmulShape(64, 128, 4, 3)  # of 8 warps, some would have no product of 16 by 16
        return Tiling(rows, shape, shape)
    if rows == 16:
        active = min(pairs, layer.experts)
        widths = (layer.width, layer.hidden)
        return Tiling(rows, *(MatmulShape(_columns_of_few(active, n), 128, 4, 4) for n in widths))
    if rows == 32:
        return Tiling(rows, MatmulShape(64, 64, 4, 4), MatmulShape(128, 64, 4, 4))
    columns = 64 if layer.by_round else 128
    num_warps = rows // 16
    return Tiling(rows, MatmulShape(columns, 64, num_warps, 4), MatmulShape(2 * columns, 64, num_warps, 4))


_ENOUGH_PROGRAMS = 256
"""So many keep large devices busy with what is read once."""


def _columns_of_few(active: int, columns: int) -> int:
    return next((n for n in (64, 32) if active * columns >= n * _ENOUGH_PROGRAMS), 16)


class TilingTable:
    """The tilings of one layer's shape on one device, by the number of pairs of a step.

    ``most_rows`` is the most rows that any of its tiles has.
    """

    most_rows = HEIGHTS[-1]

    def __init__(self, tuned: Mapping[int, Tiling], layer: LayerShape) -> None:
        self._tuned, self._layer = dict(sorted(tuned.items())), layer
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
        return cls({} if path is None else read(path), layer)

    def of_pairs(self, pairs: int) -> Tiling:
        """The tiling for a step of so many pairs."""
        if pairs not in self._known:
            nearest = min(self._tuned, key=lambda n: max(n / pairs, pairs / n), default=None)
            self._known[pairs] = by_rule(pairs, self._layer) if nearest is None else self._tuned[nearest]
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

"""Which of cuBLASLt's algorithms were measured to be faster than the library's own choice, by device and shape.

A JSON file in the directory ``tuned`` for each kind of device and version of the library:
``device_name=NAME,cublaslt=130100.json``, where NAME is the device's name with underscores for spaces, matched exactly.
It is ``{"schema": 1, "algorithms": {"bfloat16 6144x4096": {"8192": "HEX", "16384": null}}}``: by dtype and N x K of a
weight and by M, rows of activations, the 64 bytes of a ``cublasLtMatmulAlgo_t``, or null where the library's choice is
as fast.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hardpoint_cuda.cublaslt import Algorithm
from hardpoint_plugin_api import ConfigError

DIRECTORY = Path(__file__).with_name("tuned")

Table = Mapping[int, Algorithm | None]
"""The algorithms of one weight's shape, by rows of activations."""


def path_of(device: str, version: int, directory: Path = DIRECTORY) -> Path:
    """The file for a device and a version of the library."""
    return directory / f"device_name={device.replace(' ', '_')},cublaslt={version}.json"


def key_of(dtype: str, n: int, k: int) -> str:
    """The file's key of a weight's shape."""
    return f"{dtype} {n}x{k}"


@cache
def read(path: Path) -> Mapping[str, Table]:
    """The tables of a file, by shape; none where there is no file. Raises ConfigError for one that is not right."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        if content["schema"] != 1:
            raise ValueError(f"schema {content['schema']!r} is not 1")
        return {key: _table(rows) for key, rows in content["algorithms"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no table of algorithms: {error!r}; delete or restore it") from error


def write(path: Path, tables: Mapping[str, Table]) -> None:
    """Add ``tables`` to a file, in place of those of the same shapes."""
    shown = {
        key: {str(m): algorithm and algorithm.hex() for m, algorithm in sorted(table.items())}
        for key, table in sorted({**read(path), **tables}.items())
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "algorithms": shown}, indent=1) + "\n")
    read.cache_clear()


def nearest(table: Table, m: int) -> Algorithm | None:
    """That of the number of rows that is nearest to ``m`` by ratio."""
    return table[min(table, key=lambda rows: max(rows / m, m / rows))]


def _table(rows: Mapping[str, str | None]) -> Table:
    table = {int(m): None if text is None else bytes.fromhex(text) for m, text in rows.items()}
    if not table or any(algorithm is not None and len(algorithm) != 64 for algorithm in table.values()):
        raise ValueError("each shape needs numbers of rows, and each algorithm 64 bytes")
    return table

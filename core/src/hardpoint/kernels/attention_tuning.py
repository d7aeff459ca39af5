"""Settings of Triton's attention that change its speed alone, and their tables: tuning/attention_*.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from hardpoint.kernels.tables import NO_OPTIONS, Options, Rule, Table, table_of
from hardpoint_plugin_api import BuildContext


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: ``rows`` of queries and heads, and as many keys as take ``key_bytes``; powers of two."""

    rows: int
    key_bytes: int
    num_warps: int
    num_stages: int
    options: Options = NO_OPTIONS

    def num_keys(self, block_d: int, itemsize: int) -> int:
        """Keys of one tile."""
        return min(128, max(16, self.key_bytes // (block_d * itemsize)))


@dataclass(frozen=True)
class DecodeTuning:
    """Constants of decode attention.

    ``programs``: about how many programs long contexts are split over, two or so for each processor of a large device;
    ``min_chunk``: the fewest tokens of a split, or a tile of keys where that is more. ``tiles.rows``: the most query
    heads of one program.
    """

    programs: int
    min_chunk: int
    tiles: Tiles


@dataclass(frozen=True)
class PrefillTuning:
    """Constants of prefill attention: tiles (the queries that one program of the kernel computes), smallest first.

    A step is cut by the largest tiles that still give it ``programs`` programs, enough to fill the device, and that
    are no larger than the queries of its longest request.
    """

    programs: int
    tiles: tuple[Tiles, ...]

    def tiling(self, longest: int, rows: int) -> int:
        """The number of the tiles for a step of ``rows``, of which one request has ``longest``."""
        number = 0
        while number + 1 < len(self.tiles) and (
            self.tiles[number].rows < longest and rows >= self.programs * self.tiles[number + 1].rows
        ):
            number += 1
        return number


class Tables(NamedTuple):
    """Both kernels' tables."""

    decode: Table[DecodeTuning]
    prefill: Table[PrefillTuning]

    @classmethod
    def of(cls, ctx: BuildContext) -> Self:
        """The settings for the context's device. Raises ConfigError for an invalid file."""
        return cls(
            table_of(ctx, "attention_decode", DecodeTuning, _DECODE_FACTS),
            table_of(ctx, "attention_prefill", PrefillTuning, _PREFILL_FACTS),
        )

    @classmethod
    def fixed(
        cls,
        decode: DecodeTuning,
        prefill: PrefillTuning,
        wide_decode: DecodeTuning | None = None,
        wide_prefill: PrefillTuning | None = None,
    ) -> Self:
        """The same constants in every step; others where products are in float32."""
        narrow = {"wide": False}
        return cls(
            Table("attention_decode", [Rule((), narrow, decode), Rule((), {}, wide_decode or decode)]),
            Table("attention_prefill", [Rule((), narrow, prefill), Rule((), {}, wide_prefill or prefill)]),
        )


_DECODE_FACTS: Mapping[str, type] = {"wide": bool, "quantized_cache": bool, "kv_heads": int, "decodes": int}
_PREFILL_FACTS: Mapping[str, type] = {"wide": bool, "quantized_cache": bool}

DECODE = DecodeTuning(256, 128, Tiles(rows=32, key_bytes=16384, num_warps=4, num_stages=3))
WIDE_DECODE = DecodeTuning(256, 128, Tiles(rows=32, key_bytes=8192, num_warps=4, num_stages=3))
PREFILL = PrefillTuning(
    256,
    (
        Tiles(rows=16, key_bytes=16384, num_warps=4, num_stages=3),
        Tiles(rows=64, key_bytes=16384, num_warps=4, num_stages=3),
        Tiles(rows=128, key_bytes=16384, num_warps=8, num_stages=3),
    ),
)
WIDE_PREFILL = PrefillTuning(256, (Tiles(rows=32, key_bytes=8192, num_warps=8, num_stages=3),))
"""The base of what is tried; the tables' rules for devices that nobody measured say the same."""


def _decode(programs: int = 256, min_chunk: int = 128, **changes: Any) -> Tables:
    tuning = DecodeTuning(programs, min_chunk, replace(DECODE.tiles, **changes))
    return Tables.fixed(tuning, PREFILL, WIDE_DECODE, WIDE_PREFILL)


def _prefill(rows: int, **changes: Any) -> Tables:
    tiles = next(tiles for tiles in PREFILL.tiles if tiles.rows == rows)
    tuning = PrefillTuning(256, (replace(tiles, **changes),))
    return Tables.fixed(DECODE, tuning, WIDE_DECODE, WIDE_PREFILL)


VARIANTS: Mapping[str, Tables] = {
    "decode 2 stages": _decode(num_stages=2),
    "decode 4 stages": _decode(num_stages=4),
    "decode 8 KiB": _decode(key_bytes=8192, num_stages=4),
    "decode 8 KiB, 2 warps": _decode(key_bytes=8192, num_warps=2),
    "decode 8 KiB, 3 stages": _decode(key_bytes=8192),
    "decode 8 KiB of 32": _decode(min_chunk=32, key_bytes=8192, num_stages=4),
    "decode 8 KiB of 64": _decode(min_chunk=64, key_bytes=8192, num_stages=4),
    "decode 4 stages of 64": _decode(min_chunk=64, num_stages=4),
    "decode 4 stages, 8 warps": _decode(num_stages=4, num_warps=8),
    "decode 8 KiB, 6 stages": _decode(key_bytes=8192, num_stages=6),
    "decode 2 warps": _decode(num_warps=2),
    "decode 2 warps, 2 stages": _decode(num_warps=2, num_stages=2),
    "decode 32 KiB, 2 stages": _decode(key_bytes=32768, num_stages=2),
    "decode 32 KiB, 8 warps": _decode(key_bytes=32768, num_warps=8),
    "decode over 128": _decode(programs=128),
    "decode over 512": _decode(programs=512),
    "decode over 512 of 256": _decode(programs=512, min_chunk=256),
    "decode of 256": _decode(min_chunk=256),
    "decode of 1024": _decode(min_chunk=1024),
    "decode of 1024, 32 KiB, 8 warps": _decode(min_chunk=1024, key_bytes=32768, num_warps=8),
    "prefill 64": _prefill(64),
    "prefill 64, 2 stages": _prefill(64, num_stages=2),
    "prefill 64, 8 KiB": _prefill(64, key_bytes=8192),
    "prefill 64, 32 KiB, 2 stages": _prefill(64, key_bytes=32768, num_stages=2),
    "prefill 128": _prefill(128),
    "prefill 128, 2 stages": _prefill(128, num_stages=2),
    "prefill 128, 32 KiB, 2 stages": _prefill(128, key_bytes=32768, num_stages=2),
    "prefill 128, 32 KiB": _prefill(128, key_bytes=32768),
}
"""Worth trying on a device that no table was measured on."""

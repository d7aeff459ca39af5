"""Tunings of Triton's latent attention that the attention benchmark tries: tuning/latent_*.toml holds those in use."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.kernels.attention_tuning import DecodeTuning, PrefillTuning, Tables, Tiles

_DECODE = Tiles(rows=64, key_bytes=32768, num_warps=8, num_stages=2)
_PREFILL = Tiles(rows=64, key_bytes=16384, num_warps=8, num_stages=3)


def _decode(rows: int, kib: int, warps: int, stages: int, programs: int = 256, min_chunk: int = 128) -> Tables:
    tuning = DecodeTuning(programs, min_chunk, Tiles(rows, kib * 1024, warps, stages))
    return Tables.fixed(tuning, PrefillTuning(256, (_PREFILL,)))


def _prefill(rows: int, kib: int, warps: int, stages: int) -> Tables:
    return Tables.fixed(DecodeTuning(256, 128, _DECODE), PrefillTuning(256, (Tiles(rows, kib * 1024, warps, stages),)))


VARIANTS: Mapping[str, Tables] = {
    **{
        f"decode {rows} rows, {kib} KiB, {warps} warps, {stages} stages": _decode(rows, kib, warps, stages)
        for rows, kib, warps, stages in (
            (16, 16, 4, 3),
            (16, 32, 4, 2),
            (16, 32, 4, 4),
            (16, 64, 4, 2),
            (16, 32, 8, 3),
            (32, 32, 4, 2),
            (32, 32, 8, 3),
            (64, 16, 4, 3),
            (64, 16, 8, 4),
            (64, 32, 4, 2),
            (64, 32, 8, 3),
            (64, 64, 8, 1),
            (64, 64, 8, 2),
            (64, 128, 8, 1),
        )
    },
    "decode over 132": _decode(64, 64, 8, 2, programs=132),
    "decode over 528": _decode(64, 64, 8, 2, programs=528),
    "decode of 512": _decode(64, 64, 8, 2, min_chunk=512),
    **{
        f"prefill {rows} rows, {kib} KiB, {warps} warps, {stages} stages": _prefill(rows, kib, warps, stages)
        for rows, kib, warps, stages in (
            (16, 32, 4, 3),
            (64, 16, 4, 3),
            (64, 32, 8, 2),
            (64, 32, 8, 3),
            (64, 64, 8, 1),
            (64, 64, 8, 2),
            (64, 128, 8, 1),
        )
    },
}

"""Times ways to cut products of 8-bit elements on an accelerator, beside torch's own, rounding, and a plain read.

``python -m tests.kernels.sweep_8bit`` prints for each shape of Llama-3.1-8B's and each number of rows: what serves now,
with activations that come rounded; the same with rounding (in the product for one and two rows, before it for more);
rounding alone; torch; and the best cuts. ``--element int8`` is the other one. Speeds are of the weight's bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import click
import torch

from hardpoint.dtypes import dtype_name
from hardpoint.kernels.gemm import GemmConfiguration, gemm, gemm_configuration
from hardpoint.kernels.gemv import Scales
from hardpoint.kernels.quantize import quantize_rows
from hardpoint.kernels.skinny import SkinnyConfiguration, skinny, skinny_configuration
from hardpoint_plugin_api import QuantSpec, Scale
from tests.kernels.sweeping import WEIGHT_BYTES, compile_beside, microseconds, plain_read

_SHAPES = ("6144x4096", "4096x4096", "28672x4096", "4096x14336", "128256x4096")
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_SHARED = 226 << 10
"""Bytes of a multiprocessor of sm_90 that a program may have."""

Cut = SkinnyConfiguration | GemmConfiguration
Weight = tuple[torch.Tensor, Scales]


@click.command()
@click.option("--element", type=click.Choice(list(_DTYPES)), default="fp8")
@click.option("--rows", multiple=True, type=int, default=_ROWS, help="Rows of activations; may be repeated.")
@click.option("--shape", multiple=True, default=_SHAPES, help="NxK; may be repeated.")
@click.option("--best", default=3, help="How many of the best cuts are printed.")
def main(element: str, rows: tuple[int, ...], shape: tuple[str, ...], best: int) -> None:
    """Print the times."""
    variants = [(element, num_rows, cut) for num_rows in rows for cut in _cuts(num_rows)]
    distinct = list({(element, _alike(num_rows), cut): None for element, num_rows, cut in variants})
    ran = {key for key, good in zip(distinct, compile_beside(_build, distinct), strict=True) if good}
    print(f"{len(ran)} of {len(distinct)} variants run", flush=True)
    for n, k in ((int(n), int(k)) for n, k in (text.split("x") for text in shape)):
        weights = [_weight(element, n, k) for _ in range(WEIGHT_BYTES // (n * k) + 2)]
        read = microseconds(lambda weight: plain_read(weight[0]), weights)
        print(f"{element} {n}x{k}: {read:8.2f} us {n * k / read / 1e3:6.0f} GB/s  a plain read", flush=True)
        for num_rows in rows:
            cuts = [cut for cut in _cuts(num_rows) if (element, _alike(num_rows), cut) in ran]
            for name, time in _times(element, num_rows, n, k, weights, cuts, best):
                speed = f"{n * k / time / 1e3:6.0f} GB/s {read / time:5.0%}"
                print(f"{element} {n}x{k} rows {num_rows}: {time:8.2f} us {speed}  {name}", flush=True)


def _times(
    element: str, num_rows: int, n: int, k: int, weights: list[Weight], cuts: list[Cut], best: int
) -> Iterator[tuple[str, float]]:
    x = torch.randn(num_rows, k, device="cuda", dtype=torch.bfloat16)
    spec = QuantSpec(dtype_name(_DTYPES[element]), scales=(Scale("float32", (1, -1)),), static=False)
    codes, values = quantize_rows(x, spec=spec)
    one = torch.ones((), device="cuda")

    def with_rounding(weight: Weight) -> torch.Tensor:
        if num_rows <= 2:
            return skinny(x, weight[0], None, x.dtype, None, weight[1], round_x=True)
        return _product(skinny_configuration(num_rows, n), *quantize_rows(x, spec=spec), weight)

    def by_torch(weight: Weight, values: torch.Tensor, values_t: torch.Tensor) -> torch.Tensor:
        if element == "int8":
            return torch._int_mm(codes, weight[0].t()) * values * values_t
        return torch._scaled_mm(codes, weight[0].t(), values, values_t, out_dtype=x.dtype)

    named: list[tuple[str, Callable[[Weight], object]]] = [
        (f"now {cut}", partial(_product, cut, codes, values))
        for cut in (skinny_configuration(num_rows, n), gemm_configuration(num_rows, n, 1))
    ]
    named += [("skinny with rounding", with_rounding), ("rounding", lambda _: quantize_rows(x, spec=spec))]
    if element == "fp8" or num_rows > 16:
        named += [
            ("torch", lambda weight: by_torch(weight, values, weight[1].values.t())),
            ("torch with one scale", lambda weight: by_torch(weight, one, one)),
        ]
    for name, call in named:
        yield name, microseconds(call, weights)
    times = {cut: microseconds(partial(_product, cut, codes, values), weights) for cut in cuts}
    for cut in sorted(cuts, key=times.__getitem__)[:best]:
        yield f"best {cut}", times[cut]


def _weight(element: str, n: int, k: int) -> Weight:
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(16).to(_DTYPES[element])
    return weight, Scales(torch.rand(n, 1, device="cuda"))


def _product(cut: Cut, codes: torch.Tensor, values: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(cut, SkinnyConfiguration):
        return skinny(codes, weight[0], None, torch.bfloat16, Scales(values), weight[1], configuration=cut)
    return gemm(codes, weight[0], None, torch.bfloat16, Scales(values), weight[1], configuration=cut)


def _cuts(num_rows: int) -> Iterator[Cut]:
    yield from _skinny_cuts(num_rows)
    if num_rows >= 16:
        yield from _tile_cuts(num_rows)


def _skinny_cuts(num_rows: int) -> Iterator[SkinnyConfiguration]:
    x_tiles = _alike(num_rows) // 8
    depths = ((3, 2), (4, 1), (6, 1), (8, 1)) if num_rows <= 8 else ((4, 1), (6, 1))
    for weight_tiles, num_warps, (num_stages, steps) in itertools.product((2, 4, 8), (4, 8), depths):
        cut = SkinnyConfiguration(x_tiles, weight_tiles, num_warps, num_stages, steps)
        block = 512 * num_warps * steps * (x_tiles + weight_tiles)
        if x_tiles * weight_tiles <= 32 and block * (num_stages - 1) <= _SHARED:
            yield cut


def _tile_cuts(num_rows: int) -> Iterator[GemmConfiguration]:
    """Up to 64 rows also as 64, of which most are none: that is what matrix units take of both operands in memory."""
    heights = (num_rows, 64) if num_rows < 64 else (64, 128) if num_rows == 128 else (64,)
    for block_m, block_n, block_k, num_stages in itertools.product(heights, (32, 64, 128), (128, 256), (4, 6)):
        cut = GemmConfiguration(block_m, block_n, block_k, 4, num_stages)
        if (block_m + block_n) * block_k * (num_stages - 1) <= _SHARED:
            yield cut


def _alike(num_rows: int) -> int:
    """The number of rows whose cuts are those of ``num_rows``."""
    return next(most for most in (8, 16, 32, 64, 128) if num_rows <= most)


def _build(variant: tuple[str, int, Cut]) -> None:
    element, num_rows, cut = variant
    codes = torch.zeros(num_rows, 4096, device="cuda").to(_DTYPES[element])
    _product(cut, codes, torch.ones(num_rows, 1, device="cuda"), _weight(element, 256, 4096))


if __name__ == "__main__":
    main()

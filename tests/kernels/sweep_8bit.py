"""Times ways to cut products of 8-bit elements on an accelerator, beside torch's own, rounding, and a plain read.

``python -m tests.kernels.sweep_8bit --rows 1 --rows 32 --shape 6144x4096 --shape 4096x4096 --shape 28672x4096 --shape
4096x14336`` takes the layers of Llama-3.1-8B; without options there are more rows, and its head. It prints for each
number of rows what the kernels that round take; and for each shape: what each kernel takes now, with activations that
come rounded; what serves, with rounding before it; rounding alone; torch; and the best cuts, of each kind where there
are several. ``--element int8`` is the other one. Speeds are of the weight's bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import click
import torch

from hardpoint.dtypes import dtype_name
from hardpoint.kernels.activation import act_and_mul, act_and_mul_quantized
from hardpoint.kernels.gemm import GemmConfiguration, gemm, gemm_configuration
from hardpoint.kernels.gemv import Scales
from hardpoint.kernels.norm import add_rms_norm_quantized
from hardpoint.kernels.quantize import quantize_rows
from hardpoint.kernels.skinny import SkinnyConfiguration, skinny, skinny_configuration
from hardpoint_plugin_api import QuantSpec, Scale
from tests.kernels.sweeping import WEIGHT_BYTES, compile_beside, microseconds, plain_read

_SHAPES = ("6144x4096", "4096x4096", "28672x4096", "4096x14336", "128256x4096")
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_SHARED = 226 << 10
"""Bytes of a multiprocessor of sm_90 that a program may have."""

_INPUTS = 64
"""Of kernels that round, in turn."""

Cut = SkinnyConfiguration | GemmConfiguration
Weight = tuple[torch.Tensor, Scales]


@click.command()
@click.option("--element", type=click.Choice(list(_DTYPES)), default="fp8")
@click.option("--rows", multiple=True, type=int, default=_ROWS, help="Rows of activations; may be repeated.")
@click.option("--shape", multiple=True, default=_SHAPES, help="NxK; may be repeated.")
@click.option("--best", default=3, help="How many of the best cuts are printed.")
def main(element: str, rows: tuple[int, ...], shape: tuple[str, ...], best: int) -> None:
    """Print the times."""
    variants = list(dict.fromkeys((element, cut) for num_rows in rows for cut in _cuts(num_rows)))
    ran = {cut for (_, cut), good in zip(variants, compile_beside(_build, variants), strict=True) if good}
    print(f"{len(ran)} of {len(variants)} variants run", flush=True)
    for num_rows in rows:
        for name, time in _rounding(element, num_rows):
            print(f"{element} rows {num_rows}: {time:8.2f} us  {name}", flush=True)
    for n, k in ((int(n), int(k)) for n, k in (text.split("x") for text in shape)):
        weights = [_weight(element, n, k) for _ in range(WEIGHT_BYTES // (n * k) + 2)]
        read = microseconds(lambda weight: plain_read(weight[0]), weights)
        print(f"{element} {n}x{k}: {read:8.2f} us {n * k / read / 1e3:6.0f} GB/s  a plain read", flush=True)
        for num_rows in rows:
            cuts = [cut for cut in dict.fromkeys(_cuts(num_rows)) if cut in ran]
            for name, time in _times(element, num_rows, n, k, weights, cuts, best):
                speed = f"{n * k / time / 1e3:6.0f} GB/s {read / time:5.0%}"
                print(f"{element} {n}x{k} rows {num_rows}: {time:8.2f} us {speed}  {name}", flush=True)


def _times(
    element: str, num_rows: int, n: int, k: int, weights: list[Weight], cuts: list[Cut], best: int
) -> Iterator[tuple[str, float]]:
    x = torch.randn(num_rows, k, device="cuda", dtype=torch.bfloat16)
    spec = _spec(element)
    codes, values = quantize_rows(x, spec=spec)
    one = torch.ones((), device="cuda")

    def with_rounding(weight: Weight) -> torch.Tensor:
        return _product(gemm_configuration(num_rows, n, 1), *quantize_rows(x, spec=spec), weight)

    def by_torch(weight: Weight, values: torch.Tensor, values_t: torch.Tensor) -> torch.Tensor:
        if element == "int8":
            return torch._int_mm(codes, weight[0].t()) * values * values_t
        return torch._scaled_mm(codes, weight[0].t(), values, values_t, out_dtype=x.dtype)

    named: list[tuple[str, Callable[[Weight], object]]] = [
        (f"now {cut}", partial(_product, cut, codes, values))
        for cut in (skinny_configuration(num_rows, n), gemm_configuration(num_rows, n, 1))
    ]
    named += [("with rounding", with_rounding), ("rounding", lambda _: quantize_rows(x, spec=spec))]
    if element == "fp8" or num_rows > 16:
        named += [
            ("torch", lambda weight: by_torch(weight, values, weight[1].values.t())),
            ("torch with one scale", lambda weight: by_torch(weight, one, one)),
        ]
    for name, call in named:
        yield name, microseconds(call, weights)
    times = {cut: microseconds(partial(_product, cut, codes, values), weights) for cut in cuts}
    kinds = itertools.groupby(sorted(cuts, key=_kind), key=_kind)
    shown = [cut for _, same in kinds for cut in sorted(same, key=times.__getitem__)[:best]]
    for cut in sorted(shown, key=times.__getitem__):
        yield f"best {cut}", times[cut]


def _kind(cut: Cut) -> tuple[bool, bool, bool]:
    return isinstance(cut, GemmConfiguration), getattr(cut, "turned", False), getattr(cut, "apart", True)


def _spec(element: str) -> QuantSpec:
    return QuantSpec(dtype_name(_DTYPES[element]), scales=(Scale("float32", (1, -1)),), static=False)


def _rounding(element: str, num_rows: int) -> Iterator[tuple[str, float]]:
    """Times of kernels that round rows, each with other numbers, so that none are in the nearest cache."""
    spec = _spec(element)

    def rows_of(columns: int) -> list[torch.Tensor]:
        return [torch.randn(num_rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(_INPUTS)]

    for n in (4096, 14336):
        yield f"quantize_rows {n}", microseconds(lambda x: quantize_rows(x, spec=spec), rows_of(n))
    for n in (3072, 14336):
        yield f"act_and_mul {n}", microseconds(lambda x: act_and_mul(x, activation="silu"), rows_of(2 * n))
        call = partial(act_and_mul_quantized, activation="silu", spec=spec)
        yield f"act_and_mul_quantized {n}", microseconds(call, rows_of(2 * n))
    n, residual = 4096, rows_of(4096)[0]
    normed = [(x, torch.ones(n, device="cuda", dtype=torch.bfloat16)) for x in rows_of(n)]

    def norm(x: tuple[torch.Tensor, torch.Tensor]) -> object:
        return add_rms_norm_quantized(x[0], residual, x[1], eps=1e-6, spec=spec)

    yield f"add_rms_norm_quantized {n}", microseconds(norm, normed)


def _weight(element: str, n: int, k: int) -> Weight:
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(16).to(_DTYPES[element])
    return weight, Scales(torch.rand(n, 1, device="cuda"))


def _product(cut: Cut, codes: torch.Tensor, values: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(cut, SkinnyConfiguration):
        return skinny(codes, weight[0], None, torch.bfloat16, Scales(values), weight[1], configuration=cut)
    return gemm(codes, weight[0], None, torch.bfloat16, Scales(values), weight[1], configuration=cut)


def _cuts(num_rows: int) -> Iterator[Cut]:
    if num_rows <= 32:
        yield from _skinny_cuts(num_rows)
    yield from _turned_cuts(num_rows)
    yield from _tile_cuts(num_rows)


def _skinny_cuts(num_rows: int) -> Iterator[SkinnyConfiguration]:
    """16 or 32 rows of the weight to a program, with more and longer blocks on their way than serve now."""
    x_tiles = max(1, _power(num_rows) // 8)
    depths = ((2, 6, 1), (2, 8, 1), (2, 4, 2), (2, 6, 2), (4, 4, 1), (4, 6, 1), (4, 8, 1), (4, 4, 2), (4, 6, 2))
    for weight_tiles, num_stages, steps in depths if num_rows <= 8 else depths[4:6]:
        yield SkinnyConfiguration(x_tiles, weight_tiles, 4, num_stages, steps)
    if num_rows <= 8:
        yield SkinnyConfiguration(x_tiles, 8, 4, 3, 2)
        yield SkinnyConfiguration(x_tiles, 2, 8, 6)
        yield SkinnyConfiguration(x_tiles, 4, 8, 3)


def _turned_cuts(num_rows: int) -> Iterator[GemmConfiguration]:
    """64 rows of the weight, or of its parts, times all of x: as many programs as there are multiprocessors, or more.

    The loads in flight fit a multiprocessor once, or up to four times.
    """
    rows = _power(num_rows)
    for parts in (1, 2, 4, 8):
        block_m = max(rows, 16 // parts)
        if block_m * parts > 64:
            continue
        for block_k, programs in itertools.product((128, 256, 512), (1, 2, 3, 4)):
            stages = min(_SHARED // programs // ((64 + block_m * parts) * block_k), 10)
            if stages >= 3 and parts * block_k < 4096:  # the latter's blocks do not end where 14,336 columns do
                yield GemmConfiguration(block_m, 64 // parts, block_k, 4, stages, turned=True, parts=parts)
    if rows <= 64:
        block_m = max(rows, 16)
        yield GemmConfiguration(block_m, 128, 128, 8, 5, turned=True)
        yield GemmConfiguration(block_m, 128, 256, 8, 3, turned=True)
        yield GemmConfiguration(block_m, 64, 256, 4, 4, turned=True, apart=False)


def _tile_cuts(num_rows: int) -> Iterator[GemmConfiguration]:
    """Rows of x as 64, of which most may be none; with sums apart and without, which shows what they cost."""
    if num_rows <= 16:
        yield GemmConfiguration(16, 64, 128, 4, 4)
    if num_rows <= 8:
        yield from (GemmConfiguration(64, 64, 256, 4, 3), GemmConfiguration(64, 128, 128, 4, 4))
        yield GemmConfiguration(64, 128, 256, 4, 3)
        return
    tiles = (
        (64, 32, 256, 4),
        (64, 32, 256, 6),
        (64, 64, 256, 3),
        (64, 64, 256, 6),
        (64, 128, 128, 4),
        (64, 128, 256, 3),
    )
    for block_m, block_n, block_k, stages in tiles:
        yield GemmConfiguration(block_m, block_n, block_k, 4, stages)
    yield GemmConfiguration(64, 32, 256, 4, 6, apart=False)
    yield GemmConfiguration(64, 64, 256, 4, 6, apart=False)
    yield GemmConfiguration(64, 128, 128, 4, 4, apart=False)
    if num_rows == 128:
        yield from (GemmConfiguration(128, 64, 128, 8, 4), GemmConfiguration(128, 128, 128, 8, 3))


def _power(num_rows: int) -> int:
    """The least power of two that is no less."""
    return 1 << (num_rows - 1).bit_length()


def _build(variant: tuple[str, Cut]) -> None:
    """Compiles what all numbers of rows share, and all shapes whose sizes are multiples of a cut's."""
    element, cut = variant
    codes = torch.zeros(8, 4096, device="cuda").to(_DTYPES[element])
    _product(cut, codes, torch.ones(8, 1, device="cuda"), _weight(element, 256, 4096))


if __name__ == "__main__":
    main()

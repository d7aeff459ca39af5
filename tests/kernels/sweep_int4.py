"""Times ways to cut the product with 4-bit weights on an accelerator, beside a plain read and torch's bfloat16 matmul.

``python -m tests.kernels.sweep_int4`` prints for each shape and number of rows the time and the bytes of weight per
second of what is chosen now and of the best cuts. Weights are as ``--quantization int4`` makes them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import click
import torch

from hardpoint.kernels.int4_tuning import Int4Configuration, int4_configuration
from hardpoint.kernels.weight_only import int4_matmul
from tests.kernels.sweeping import WEIGHT_BYTES, compile_beside, microseconds, plain_read

SHAPES = ("6144x4096", "4096x4096", "28672x4096", "4096x14336")
"""N x K of Llama-3.1-8B's projections."""

_ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
_TILE = 256
_SHARED_BYTES = 227 << 10
"""Of a multiprocessor, for one program: that of a Hopper."""


@click.command()
@click.option("--rows", multiple=True, type=int, default=_ROWS, help="Rows of activations; may be repeated.")
@click.option("--shape", "shapes", multiple=True, default=SHAPES, help="NxK; may be repeated.")
@click.option("--group", default=64, help="Columns that share a scale.")
@click.option("--zero-point/--no-zero-point", default=True, help="Whether groups have zero points.")
@click.option("--best", default=3, help="How many of the best cuts are printed.")
def main(rows: tuple[int, ...], shapes: tuple[str, ...], group: int, zero_point: bool, best: int) -> None:
    """Print the times."""
    sizes = [(int(n), int(k)) for n, k in (text.split("x") for text in shapes)]
    cuts = {
        num_rows: dict.fromkeys([*(int4_configuration(num_rows, n, 2) for n, _ in sizes), *_cuts(num_rows)])
        for num_rows in rows
    }
    variants = [(num_rows, cut) for num_rows, some in cuts.items() for cut in some]
    build = functools.partial(_compile, sizes, group, zero_point)
    works = dict(zip(variants, compile_beside(build, variants), strict=True))
    for n, k in sizes:
        weights = [_weights(n, k, group, zero_point) for _ in range(WEIGHT_BYTES * 2 // (n * k) + 2)]
        nbytes = sum(part.numel() * part.element_size() for part in weights[0].values())
        read = microseconds(lambda w: plain_read(w["weight"]), weights)
        full = weights[0]["weight"].numel() * 4 / read
        print(f"{n}x{k}: {read:8.2f} us {full / 1e3:7.0f} GB/s  plain read", flush=True)
        plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(WEIGHT_BYTES // (2 * n * k) + 2)]
        for num_rows in rows:
            x = torch.randn(num_rows, k, device="cuda").bfloat16()
            times = {
                cut: microseconds(functools.partial(_product, x, group, cut), weights)
                for cut in cuts[num_rows]
                if works[num_rows, cut]
            }
            chosen = int4_configuration(num_rows, n, 2)
            lines = [(f"{cut}", times[cut]) for cut in sorted(times, key=times.__getitem__)[:best]]
            if chosen in times:
                lines.insert(0, (f"chosen {chosen}", times[chosen]))
            for name, time in lines:
                speed = nbytes / time
                share = f"{speed / full:4.0%} of a plain read"
                print(f"{n}x{k} rows {num_rows}: {time:8.2f} us {speed / 1e3:7.0f} GB/s {share}  {name}", flush=True)
            time = microseconds(functools.partial(torch.nn.functional.linear, x), plain)
            print(f"{n}x{k} rows {num_rows}: {time:8.2f} us  torch, bfloat16", flush=True)


def _product(x: torch.Tensor, group: int, cut: Int4Configuration, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return int4_matmul(x, weights, None, group, 8, cut)


def _compile(
    sizes: list[tuple[int, int]], group: int, zero_point: bool, variant: tuple[int, Int4Configuration]
) -> None:
    num_rows, cut = variant
    for n, k in sizes:
        x = torch.randn(num_rows, k, device="cuda").bfloat16()
        _product(x, group, cut, _weights(n, k, group, zero_point))


def _weights(n: int, k: int, group: int, zero_point: bool) -> dict[str, torch.Tensor]:
    parts = max(1, _TILE // group)
    weights = {
        "weight": torch.randint(
            -(2**31), 2**31, (n // 16, k // _TILE, 16, _TILE // 8), device="cuda", dtype=torch.int32
        ),
        "weight_scale": torch.rand(k // group // parts, n, parts, device="cuda").bfloat16(),
    }
    if zero_point:
        weights["weight_zero_point"] = torch.randint(0, 16, (k // _TILE, n, 4), device="cuda").bfloat16() / -64
    return weights


_SPLIT = ((2, 3), (2, 4), (4, 3), (4, 4), (8, 2), (8, 3))
"""Warps and stages. 4096 columns are 16 tiles: each of 2 warps has 8 of them, each of 8 has two."""


def _cuts(num_rows: int) -> Iterator[Int4Configuration]:
    """Tiles worth a try: with their registers, 4 or 5 programs of 4 warps share a multiprocessor."""
    least = 1 << (num_rows - 1).bit_length()
    if least <= 16:
        for block_n, (num_warps, num_stages) in itertools.product((16, 32), _SPLIT):
            stage = num_warps * _TILE * (block_n // 2 + 2 * least)
            if (num_stages - 1) * stage <= _SHARED_BYTES:
                yield Int4Configuration(least, block_n, num_warps, num_stages, split=True)
    for block_m in (least,) if 16 <= least <= 64 else (64, 128) if least > 64 else ():
        for (block_n, num_warps), num_stages in itertools.product(((64, 4), (128, 8), (128, 4)), (3, 4)):
            stage = _TILE * (block_n // 2 + 2 * block_m)
            if num_stages * stage <= _SHARED_BYTES and block_m * block_n <= 64 * 32 * num_warps:
                for pieces in (1, 2, 4) if block_m * block_n < 128 * 128 else (1,):
                    yield Int4Configuration(block_m, block_n, num_warps, num_stages, pieces=pieces)


if __name__ == "__main__":
    main()

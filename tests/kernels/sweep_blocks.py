"""Times ways to cut the product with weights in GGUF's blocks on an accelerator, beside a plain read and torch's
matmul.

``python -m tests.kernels.sweep_blocks`` prints for each type, shape and number of rows the time of what is chosen now
and of the best cuts, and the share of a plain read of the same bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import click
import torch

from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.kernels.block_tiles import BlockTiles
from hardpoint.kernels.block_tuning import BlockCut, block_cut
from hardpoint.kernels.block_weights import block_matmul, block_numbers
from hardpoint.numerics import quantize_weight
from tests.kernels.sweep_int4 import SHAPES
from tests.kernels.sweeping import WEIGHT_BYTES, compile_beside, microseconds, plain_read

_ROWS = (1, 8, 32, 256)
_Packed = dict[str, torch.Tensor]


@click.command()
@click.option("--rows", multiple=True, type=int, default=_ROWS, help="Rows of activations; may be repeated.")
@click.option("--shape", "shapes", multiple=True, default=SHAPES, help="NxK; may be repeated.")
@click.option("--type", "types", multiple=True, default=("Q4_K", "Q6_K"), help="GGUF's type; may be repeated.")
@click.option("--best", default=3, help="How many of the best cuts are printed.")
def main(rows: tuple[int, ...], shapes: tuple[str, ...], types: tuple[str, ...], best: int) -> None:
    """Print the times."""
    sizes = [(int(n), int(k)) for n, k in (text.split("x") for text in shapes)]
    cuts = {number: dict.fromkeys([*(_chosen(number, n) for n, _ in sizes), *_cuts(number)]) for number in rows}
    variants = [(name, number, cut) for name in types for number, some in cuts.items() for cut in some]
    works = dict(zip(variants, compile_beside(functools.partial(_compile, sizes[0]), variants), strict=True))
    for name, (n, k) in itertools.product(types, sizes):
        tiles, one = _weights(name, n, k)
        nbytes = sum(part.numel() * part.element_size() for part in one.values())
        weights = [{slot: part.clone() for slot, part in one.items()} for _ in range(WEIGHT_BYTES // nbytes + 2)]
        read = microseconds(lambda packed: plain_read(packed["weight"]), weights)
        full = one["weight"].numel() * 4 / read
        print(f"{name} {n}x{k}: {nbytes * 8 / n / k:.2f} bits a number, plain read {full / 1e3:.0f} GB/s", flush=True)
        numbers = functools.partial(block_numbers, tiles=tiles, dtype=torch.bfloat16)
        print(f"{name} {n}x{k}: {microseconds(numbers, weights):8.2f} us, numbers of the whole weight", flush=True)
        plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(WEIGHT_BYTES // (2 * n * k) + 2)]
        for number in rows:
            x = torch.randn(number, k, device="cuda").bfloat16()
            times = {
                cut: microseconds(functools.partial(_product, x, tiles, cut), weights)
                for cut in cuts[number]
                if works[name, number, cut]
            }
            chosen = _chosen(number, n)
            lines = [(f"{cut}", times[cut]) for cut in sorted(times, key=times.__getitem__)[:best]]
            if chosen in times:
                lines.insert(0, (f"chosen {chosen}", times[chosen]))
            for title, time in lines:
                share = f"{nbytes / time / full:4.0%} of a plain read"
                print(f"{name} {n}x{k} rows {number}: {time:8.2f} us {share}  {title}", flush=True)
            time = microseconds(functools.partial(torch.nn.functional.linear, x), plain)
            print(f"{name} {n}x{k} rows {number}: {time:8.2f} us  torch, bfloat16", flush=True)


def _product(x: torch.Tensor, tiles: BlockTiles, cut: BlockCut, packed: _Packed) -> torch.Tensor:
    return block_matmul(x, packed, None, tiles, cut)


def _chosen(num_rows: int, n: int) -> BlockCut:
    return block_cut(num_rows, n, 2)


def _compile(size: tuple[int, int], variant: tuple[str, int, BlockCut]) -> None:
    name, num_rows, cut = variant
    tiles, packed = _weights(name, *size)
    _product(torch.randn(num_rows, size[1], device="cuda").bfloat16(), tiles, cut, packed)


def _weights(name: str, n: int, k: int) -> tuple[BlockTiles, _Packed]:
    spec = SPECS[name].spec
    tiles = BlockTiles(spec, k, torch.bfloat16)
    return tiles, tiles.packed(quantize_weight(torch.randn(n, k, device="cuda") * 0.02, spec))


def _cuts(num_rows: int) -> Iterator[BlockCut]:
    """Cuts worth a try."""
    block_m = min(64, 1 << (num_rows - 1).bit_length())
    for (block_n, num_warps), num_stages in itertools.product(
        ((16, 1), (32, 2), (64, 4), (128, 8), (128, 4)), (2, 3, 4)
    ):
        if block_m * block_n > 64 * 32 * num_warps or (block_m >= 32 and block_n < 64):
            continue
        for pieces in (1, 2, 4, 8) if num_rows <= 16 else (1, 4):
            for numbers_first in (False,) if num_rows < 16 else (False, True):
                yield BlockCut(block_m, block_n, num_warps, num_stages, pieces, numbers_first)


if __name__ == "__main__":
    main()

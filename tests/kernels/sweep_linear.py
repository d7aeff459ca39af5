"""Times ways to cut products of plain weights on an accelerator, beside torch's own matmul and a plain read.

``python -m tests.kernels.sweep_linear`` prints for each shape of Qwen3-0.6B's and Llama-3.1-8B's, and each number of
rows: torch's time, that of what each kernel chooses by itself now, and the best cuts. With ``--behind-norm`` each
product stands behind a norm of its activations, both launched early, as in a model's decodes: cuts rank otherwise then.
Weights alternate, so that none is read from a cache; calls are recorded once and replayed. Speeds are of the weight's
bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import click
import torch

from hardpoint.kernels.gemm import GemmConfiguration, gemm, gemm_configuration
from hardpoint.kernels.gemv import GemvConfiguration, gemv, gemv_configuration
from hardpoint.kernels.norm import rms_norm
from hardpoint.kernels.skinny import SkinnyConfiguration, skinny, skinny_configuration
from tests.kernels.sweeping import WEIGHT_BYTES, compile_beside, launch_early, microseconds, plain_read

_SHAPES = (
    "4096x1024",
    "1024x2048",
    "6144x1024",
    "1024x3072",
    "151936x1024",
    "6144x4096",
    "4096x4096",
    "28672x4096",
    "4096x14336",
    "128256x4096",
)
_ROWS = (2, 4, 8, 16, 32, 64)
_SHARED = 208 << 10
"""Bytes of a multiprocessor of sm_90, for one program or two."""

Cut = GemvConfiguration | SkinnyConfiguration | GemmConfiguration


@click.command()
@click.option("--rows", multiple=True, type=int, default=_ROWS, help="Rows of activations; may be repeated.")
@click.option("--shape", multiple=True, default=_SHAPES, help="NxK; may be repeated.")
@click.option("--best", default=3, help="How many of the best cuts are printed.")
@click.option("--behind-norm", is_flag=True, help="Time a norm and a product behind it, launched early.")
def main(rows: tuple[int, ...], shape: tuple[str, ...], best: int, behind_norm: bool) -> None:
    """Print the times."""
    build = _build_early if behind_norm else _build
    shapes = [(int(n), int(k)) for n, k in (text.split("x") for text in shape)]
    tried = {(num_rows, size): [*_chosen(num_rows, *size), *_cuts(num_rows)] for num_rows in rows for size in shapes}
    variants = list(dict.fromkeys(cut for cuts in tried.values() for cut in cuts))
    ran = {cut for cut, good in zip(variants, compile_beside(build, variants), strict=True) if good}
    print(f"{len(ran)} of {len(variants)} variants run", flush=True)
    if behind_norm:
        launch_early()
    for n, k in shapes:
        count = min(64, WEIGHT_BYTES // (2 * n * k) + 2)
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        read = microseconds(plain_read, weights)
        print(f"{n}x{k}: {read:8.2f} us {2 * n * k / read / 1e3:6.0f} GB/s  a plain read", flush=True)
        for num_rows in rows:
            cuts = [cut for cut in dict.fromkeys(tried[num_rows, (n, k)]) if cut in ran]
            for name, time in _times(num_rows, n, k, weights, cuts, best, behind_norm):
                speed = f"{2 * n * k / time / 1e3:6.0f} GB/s {read / time:5.0%}"
                print(f"{n}x{k} rows {num_rows}: {time:8.2f} us {speed}  {name}", flush=True)


def _times(
    num_rows: int, n: int, k: int, weights: list[torch.Tensor], cuts: list[Cut], best: int, behind_norm: bool
) -> Iterator[tuple[str, float]]:
    x = torch.randn(num_rows, k, device="cuda", dtype=torch.bfloat16)
    one = torch.ones(k, device="cuda", dtype=torch.bfloat16)

    def call(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        return product(rms_norm(x, one, eps=1e-6) if behind_norm else x, weight)

    yield "torch", microseconds(partial(call, torch.nn.functional.linear), weights)
    times = {cut: microseconds(partial(call, partial(_product, cut)), weights) for cut in cuts}
    yield from ((f"now {cut}", times[cut]) for cut in _chosen(num_rows, n, k) if cut in times)
    yield from ((f"best {cut}", times[cut]) for cut in sorted(cuts, key=times.__getitem__)[:best])


def _product(cut: Cut, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product: Callable[..., torch.Tensor] = gemv if isinstance(cut, GemvConfiguration) else gemm
    if isinstance(cut, SkinnyConfiguration):
        product = skinny
    return product(x, weight, None, torch.bfloat16, configuration=cut)


def _chosen(num_rows: int, n: int, k: int) -> list[Cut]:
    """The present tiles of each kernel that may serve."""
    cuts: list[Cut] = (
        [] if num_rows == 1 else [skinny_configuration(num_rows, n, 2, 2), gemm_configuration(num_rows, n, 2)]
    )
    return [gemv_configuration(num_rows, n, 2 * k), *cuts] if num_rows <= 4 else cuts


def _cuts(num_rows: int) -> Iterator[Cut]:
    if num_rows <= 4:
        yield from _vector_cuts(num_rows)
    if num_rows > 1:
        yield from _skinny_cuts(num_rows)
        yield from _tile_cuts(num_rows)


def _vector_cuts(num_rows: int) -> Iterator[GemvConfiguration]:
    rows = 1 << (num_rows - 1).bit_length()
    unrolled = (1, 2) if rows == 1 else (1,)
    for block_n, num_warps, unroll in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), unrolled):
        if rows * block_n <= 32:
            yield GemvConfiguration(rows, block_n, num_warps, unroll)


def _skinny_cuts(num_rows: int) -> Iterator[SkinnyConfiguration]:
    """All rows of x in a program, and half of them; what is on its way, as one program has room for or two."""
    if num_rows <= 16:
        for steps, num_stages, early in ((1, 9, 0), (1, 9, 4), (2, 5, 0), (2, 5, 2)):
            yield SkinnyConfiguration(-(-num_rows // 8), 2, 4, num_stages, steps, early)
    whole = 1 << (-(-num_rows // 8) - 1).bit_length()
    for x_tiles, weight_tiles, num_warps in itertools.product({whole, max(whole // 2, 1)}, (2, 4, 8, 16), (4, 8)):
        block = 512 * num_warps * (x_tiles + weight_tiles)
        for blocks in sorted({min(_SHARED // programs // block, 8) for programs in (1, 2, 3)}):
            if blocks > 1 and x_tiles * weight_tiles <= 64:
                yield SkinnyConfiguration(x_tiles, weight_tiles, num_warps, blocks + 1)


def _tile_cuts(num_rows: int) -> Iterator[GemmConfiguration]:
    block_m = max(16, min(128, 1 << (num_rows - 1).bit_length()))
    for block_n, num_stages in itertools.product((16, 32, 64, 128), (4, 6)):
        yield GemmConfiguration(block_m, block_n, 128, 4, num_stages)
    for parts, num_stages in itertools.product((1, 2, 4), (3, 5, 7)):
        turned_m = max(1 << (num_rows - 1).bit_length(), 16 // parts)
        if turned_m * parts <= 64:
            yield GemmConfiguration(turned_m, 64 // parts, 128, 4, num_stages, turned=True, parts=parts)


def _build(cut: Cut) -> None:
    """Compiles what all shapes share: whose sizes are multiples of 16."""
    x, weight = (torch.zeros(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (32, 256))
    _product(cut, x, weight)


def _build_early(cut: Cut) -> None:
    launch_early()
    _build(cut)


if __name__ == "__main__":
    main()

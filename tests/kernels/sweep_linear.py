"""Times ways to cut the linear kernels of plain weights on an accelerator, beside torch's own matmul.

``python -m tests.kernels.sweep_linear --rows 1 --rows 8`` prints for each shape the time and the bytes
of weight per second of what is chosen now, of the best cuts, and of torch. Weights alternate, so that none is read from
a cache; calls are recorded once and replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import click
import torch

from hardpoint.kernels.gemm import GemmConfiguration, gemm, gemm_configuration
from hardpoint.kernels.gemv import GemvConfiguration, gemv, gemv_configuration
from tests.kernels.sweeping import WEIGHT_BYTES, microseconds

SHAPES = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (151936, 1024),
)
"""N x K of Llama-3.1-8B's and Qwen3-0.6B's projections, and the latter's head."""

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@click.command()
@click.option("--rows", multiple=True, default=(1,), help="Rows of activations; may be repeated.")
@click.option("--shape", multiple=True, help="NxK; all those of two models where not given.")
@click.option("--best", default=3, help="How many of the best cuts are printed.")
def main(rows: tuple[int, ...], shape: tuple[str, ...], best: int) -> None:
    """Print the times."""
    shapes = [(int(n), int(k)) for n, k in (text.split("x") for text in shape)] or SHAPES
    for n, k in shapes:
        count = min(64, WEIGHT_BYTES // (2 * n * k) + 2)
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        for num_rows in rows:
            x = torch.randn(num_rows, k, device="cuda", dtype=torch.bfloat16)
            chosen, others = _calls(num_rows, n, k)
            with ThreadPoolExecutor(12) as pool:  # compiling is most of the time
                compiled = list(pool.map(lambda pair: _works(pair[1], x, weights[0]), others))  # noqa: B023
            works = [pair for pair, good in zip(others, compiled, strict=True) if good]
            times = {name: microseconds(partial(call, x), weights) for name, call in (*chosen, *works)}
            shown = [name for name, _ in chosen] + sorted((name for name, _ in works), key=times.__getitem__)[:best]
            for name in dict.fromkeys(shown):
                speed = 2 * n * k / times[name] / 1e6
                print(f"{n}x{k} rows {num_rows}: {times[name]:8.2f} us {speed:6.2f} TB/s  {name}", flush=True)


def _calls(num_rows: int, n: int, k: int) -> tuple[list[tuple[str, Call]], list[tuple[str, Call]]]:
    """What is chosen now, and torch; and the other ways."""
    dtype = torch.bfloat16

    def by_vectors(cut: GemvConfiguration) -> Call:
        return lambda x, weight: gemv(x, weight, None, dtype, configuration=cut)

    def by_tiles(cut: GemmConfiguration) -> Call:
        return lambda x, weight: gemm(x, weight, None, dtype, configuration=cut)

    vector, tiles = gemv_configuration(num_rows, n, 2 * k), gemm_configuration(num_rows, n, 2)
    chosen = [(f"chosen {vector}", by_vectors(vector)), (f"chosen {tiles}", by_tiles(tiles))]
    others = [(str(cut), by_vectors(cut)) for cut in _vector_cuts(num_rows)]
    others += [(str(cut), by_tiles(cut)) for cut in _tile_cuts(num_rows, n)]
    return [*chosen, ("torch", torch.nn.functional.linear)], others


def _vector_cuts(num_rows: int) -> Iterator[GemvConfiguration]:
    rows = 1 << (num_rows - 1).bit_length()
    if rows > 8:
        return
    for block_n, num_warps, unroll in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2)):
        if rows * block_n <= 32:
            yield GemvConfiguration(rows, block_n, num_warps, unroll)


def _tile_cuts(num_rows: int, n: int) -> Iterator[GemmConfiguration]:
    if num_rows == 1:
        return
    block_m = max(16, min(128, 1 << (num_rows - 1).bit_length()))
    for block_n, block_k, num_warps, num_stages in itertools.product((16, 32, 64, 128), (128, 256), (2, 4), (3, 4, 6)):
        if n >= block_n * 64:
            yield GemmConfiguration(block_m, block_n, block_k, num_warps, num_stages)


def _works(call: Call, x: torch.Tensor, weight: torch.Tensor) -> bool:
    try:
        call(x, weight)
    except Exception:  # a cut that asks for more memory than there is, say
        return False
    return True


if __name__ == "__main__":
    main()

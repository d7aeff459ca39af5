"""Times ways to cut the linear kernels on an accelerator, beside torch's own matmul.

``python -m tests.kernels.sweep_linear --family plain --rows 1 --rows 8`` prints for each shape the time and the bytes
of weight per second of what is chosen now, of the best cuts, and of torch. Weights alternate, so that none is read from
a cache; calls are recorded once and replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import torch

from hardpoint.kernels import weight_only
from hardpoint.kernels.gemm import GemmConfiguration, gemm, gemm_configuration
from hardpoint.kernels.gemv import GemvConfiguration, Scales, gemv, gemv_configuration
from hardpoint.kernels.weight_only import int4_gemm, int4_gemm_configuration, int4_gemv

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

_BYTES = 256 << 20
"""Of weights in turn: several times what caches hold."""

Call = Callable[[torch.Tensor, Any], torch.Tensor]


@click.command()
@click.option("--family", type=click.Choice(["plain", "fp8", "int4"]), default="plain")
@click.option("--rows", multiple=True, default=(1,), help="Rows of activations; may be repeated.")
@click.option("--shape", multiple=True, help="NxK; all those of two models where not given.")
@click.option("--best", default=3, help="How many of the best cuts are printed.")
def main(family: str, rows: tuple[int, ...], shape: tuple[str, ...], best: int) -> None:
    """Print the times."""
    shapes = [(int(n), int(k)) for n, k in (text.split("x") for text in shape)] or SHAPES
    for n, k in shapes:
        weights = _weights(family, n, k)
        nbytes = sum(part.numel() * part.element_size() for part in weights[0].values())
        for num_rows in rows:
            x, chosen, others = _calls(family, num_rows, n, k)
            with ThreadPoolExecutor(12) as pool:  # compiling is most of the time
                compiled = list(pool.map(lambda pair: _works(pair[1], x, weights[0]), others))  # noqa: B023
            works = [pair for pair, good in zip(others, compiled, strict=True) if good]
            times = {name: _microseconds(call, x, weights) for name, call in (*chosen, *works)}
            shown = [name for name, _ in chosen] + sorted((name for name, _ in works), key=times.__getitem__)[:best]
            for name in dict.fromkeys(shown):
                speed = nbytes / times[name] / 1e6
                print(f"{family} {n}x{k} rows {num_rows}: {times[name]:8.2f} us {speed:6.2f} TB/s  {name}", flush=True)


def _weights(family: str, n: int, k: int) -> list[dict[str, torch.Tensor]]:
    def one() -> dict[str, torch.Tensor]:
        if family == "plain":
            return {"weight": torch.randn(n, k, device="cuda", dtype=torch.bfloat16)}
        if family == "fp8":
            weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
            return {"weight": weight, "weight_scale": torch.rand(n, 1, device="cuda")}
        groups = (k // 128, n)
        return {
            "weight": torch.randint(-(2**31), 2**31, (n, k // 8), device="cuda").int(),
            "weight_scale": torch.rand(groups, device="cuda").bfloat16(),
            "weight_zero_point": torch.randint(0, 16, groups, device="cuda", dtype=torch.uint8),
        }

    size = n * k * {"plain": 2.0, "fp8": 1.0, "int4": 0.5}[family]
    return [one() for _ in range(min(64, int(_BYTES / size) + 2))]


def _calls(
    family: str, num_rows: int, n: int, k: int
) -> tuple[torch.Tensor, list[tuple[str, Call]], list[tuple[str, Call]]]:
    """The activations; what is chosen now, and torch; and the other ways."""
    x, dtype = torch.randn(num_rows, k, device="cuda", dtype=torch.bfloat16), torch.bfloat16
    vector_cuts, tile_cuts = list(_vector_cuts(num_rows)), list(_tile_cuts(num_rows, n))
    if family == "int4":
        vector = gemv_configuration(num_rows, n, k // 2, weight_only._PROGRAMS, weight_only._MOST_SUMS)
        tiles = int4_gemm_configuration(num_rows, 2)

        def int4_vector(cut: GemvConfiguration) -> Call:
            return lambda x, w: int4_gemv(x, w, None, 128, 0, cut)

        def int4_tiles(cut: GemmConfiguration) -> Call:
            return lambda x, w: int4_gemm(x, w, None, 128, 0, cut)

        tile_cuts = [cut for cut in tile_cuts if cut.block_k == tiles.block_k]
        return x, *_named(int4_vector, int4_tiles, vector, tiles, vector_cuts, tile_cuts)
    scaled = family == "fp8"
    itemsize = 1 if scaled else 2
    codes, scales = (x.to(torch.float8_e4m3fn), Scales(torch.rand(num_rows, 1, device="cuda"))) if scaled else (x, None)

    def of(weights: dict[str, torch.Tensor]) -> Scales | None:
        return Scales(weights["weight_scale"]) if scaled else None

    def by_vectors(cut: GemvConfiguration) -> Call:
        return lambda x, w: gemv(x, w["weight"], None, dtype, scales, of(w), configuration=cut)

    def by_tiles(cut: GemmConfiguration) -> Call:
        return lambda x, w: gemm(x, w["weight"], None, dtype, scales, of(w), configuration=cut)

    def library(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        if not scales:
            return torch.nn.functional.linear(x, w["weight"])
        return torch._scaled_mm(x, w["weight"].t(), scales.values, w["weight_scale"].t(), out_dtype=dtype)

    vector, tiles = gemv_configuration(num_rows, n, itemsize * k), gemm_configuration(num_rows, n, itemsize)
    chosen, others = _named(by_vectors, by_tiles, vector, tiles, vector_cuts, tile_cuts)
    return codes, [*chosen, ("torch", library)], others


def _named(
    by_vectors: Callable[[GemvConfiguration], Call],
    by_tiles: Callable[[GemmConfiguration], Call],
    vector: GemvConfiguration,
    tiles: GemmConfiguration,
    vector_cuts: list[GemvConfiguration],
    tile_cuts: list[GemmConfiguration],
) -> tuple[list[tuple[str, Call]], list[tuple[str, Call]]]:
    chosen = [(f"chosen {vector}", by_vectors(vector)), (f"chosen {tiles}", by_tiles(tiles))]
    others = [(str(cut), by_vectors(cut)) for cut in vector_cuts] + [(str(cut), by_tiles(cut)) for cut in tile_cuts]
    return chosen, others


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


def _works(call: Call, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> bool:
    try:
        call(x, weights)
    except Exception:  # a cut that asks for more memory than there is, say
        return False
    return True


def _microseconds(call: Call, x: torch.Tensor, weights: list[dict[str, torch.Tensor]]) -> float:
    """Of one call among those on other weights, the best of several replays."""
    for _ in range(2):
        call(x, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for some in weights:
            call(x, some)
    times: list[float] = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(weights))
    return min(times)


if __name__ == "__main__":
    main()

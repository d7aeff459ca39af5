"""``python -m hardpoint_cuda.tune_matmul``: measure cuBLASLt's algorithms on this device, and write down which to use.

Axes: M rows of x, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from rich.progress import Progress

from hardpoint_cuda import cublaslt, matmul_tables
from hardpoint_cuda.cublaslt import WORKSPACE_BYTES, Algorithm, Product, prepared

_BYTES = 256 << 20
"""Of weights in turn: several times what caches hold."""
_MARGIN = 1.015
"""An algorithm replaces the library's choice where it is so much faster in every pass, each a median of rounds."""
_PASSES, _ROUNDS = 3, 7
_FINALISTS = 3

Call = Callable[[torch.Tensor], torch.Tensor]


@click.command()
@click.option("--shape", "shapes", multiple=True, required=True, metavar="NxK", help="Of a weight; may be repeated.")
@click.option(
    "--rows", multiple=True, type=click.IntRange(1), default=(1024, 2048, 4096, 8192, 16384), show_default=True
)
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float16"]), show_default=True)
@click.option("--output", default=None, metavar="FOLDER", help="Write there, and not where kernels look it up.")
def main(shapes: Sequence[str], rows: Sequence[int], dtype: str, output: str | None) -> None:
    """Time the algorithms that cuBLASLt suggests for each weight and number of rows, beside torch's matmul."""
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    found: dict[str, dict[int, Algorithm | None]] = {}
    with torch.inference_mode(), Progress() as progress:
        task = progress.add_task("products", total=len(shapes) * len(rows))
        for n, k in map(_size, shapes):
            weights = _weights(n, k, getattr(torch, dtype), device)
            for m in rows:
                algorithm, gain = _tuned(m, weights, workspace)
                found.setdefault(matmul_tables.key_of(dtype, n, k), {})[m] = algorithm
                progress.console.print(
                    f"{m} x {n} x {k}: " + (f"{gain:.3f} times as fast" if algorithm else "as it is")
                )
                progress.advance(task)
    folder = Path(output) if output else matmul_tables.DIRECTORY
    path = matmul_tables.path_of(torch.cuda.get_device_name(device), cublaslt.version(), folder)
    matmul_tables.write(path, found)
    click.echo(f"written to {path}")


def _tuned(m: int, weights: Sequence[torch.Tensor], workspace: torch.Tensor) -> tuple[Algorithm | None, float]:
    """The fastest algorithm and its least gain of any pass; None where the library's choice is as fast."""
    (n, k), dtype, device = weights[0].shape, weights[0].dtype, weights[0].device
    x, product = torch.randn(m, k, device=device).to(dtype), Product(m, n, k, dtype, device)

    def call(algorithm: Algorithm) -> Call:
        ready = prepared(algorithm)
        return lambda weight: product.run(x, weight, ready, workspace)

    def by_torch(weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()

    calls = {algorithm: call(algorithm) for algorithm in product.candidates()}
    first = {algorithm: _microseconds(one, weights, 2) for algorithm, one in calls.items()}
    best, best_gain = None, _MARGIN
    for algorithm in sorted(first, key=first.__getitem__)[:_FINALISTS]:
        gain = min(_microseconds(by_torch, weights) / _microseconds(calls[algorithm], weights) for _ in range(_PASSES))
        if gain > best_gain:
            best, best_gain = algorithm, gain
    return best, best_gain


def _microseconds(call: Call, weights: Sequence[torch.Tensor], rounds: int = _ROUNDS) -> float:
    """The median time of a call, all weights in turn in each round."""
    times: list[float] = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for weight in weights:
            call(weight)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(weights))
    return statistics.median(times[1:])


def _weights(n: int, k: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    count = max(2, min(16, _BYTES // (n * k * dtype.itemsize)))
    return [(0.02 * torch.randn(n, k, device=device)).to(dtype) for _ in range(count)]


def _size(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal()):
        raise click.BadParameter(f"{text!r} is not NxK, such as 6144x4096", param_hint="--shape")
    return int(n), int(k)


if __name__ == "__main__":
    main()

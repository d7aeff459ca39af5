"""Times tiles of experts with weights of 2 to 6 bits on an accelerator, beside a plain read of them.

``python -m tests.kernels.sweep_experts`` prints for each number of tokens the time of one layer's experts, and the
bytes of weights that are read per second, in the tiles chosen now and in the best ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import click
import torch

from hardpoint.checkpoint.gguf.blocks import SPECS as BLOCKS
from hardpoint.conformance.site import Site
from hardpoint.context import Context
from hardpoint.kernels.block_experts import BlockExpertTiles, TritonBlockExperts
from hardpoint.kernels.paired_experts import PairedExperts
from hardpoint.kernels.tiled_experts import ExpertTiles, TritonTiledExperts
from hardpoint.numerics import quantize_weight
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import ExpertsCall, ExpertsKernel, ExpertsWorkload, QuantSpec, Scale
from tests.kernels.sweeping import compile_beside, launch_early, microseconds, plain_read

SHAPES = {
    "gpt-oss-20b": (32, 4, 2880, 2880, "swiglu_oai"),
    "qwen3-moe-30b-a3b": (128, 8, 2048, 768, "silu_and_mul"),
}
"""Experts, experts of a token, hidden size, width of an expert, activation."""
TILED = {
    "mxfp4": QuantSpec("float4_e2m1", scales=(Scale("float8_e8m0fnu", (1, 32)),)),
    "nvfp4": QuantSpec("float4_e2m1", scales=(Scale("float8_e4m3fn", (1, 16)), Scale("float32", (1, -1)))),
    "int4": QuantSpec("int4", scales=(Scale("bfloat16", (1, 64)),), zero_point=True),
}
_LAYERS = 6
"""So many layers' weights in turn are several times what caches hold."""
_MOST_SHARED = 227 << 10
Cut = ExpertTiles | BlockExpertTiles


@click.command()
@click.option("--tokens", multiple=True, type=int, default=(1, 8, 32, 256, 2048), help="May be repeated.")
@click.option("--shape", default="gpt-oss-20b", type=click.Choice(list(SHAPES)))
@click.option("--spec", default="mxfp4", type=click.Choice([*TILED, *BLOCKS]))
@click.option("--best", default=3, help="How many of the best tiles are printed.")
def main(tokens: tuple[int, ...], shape: str, spec: str, best: int) -> None:
    """Print the times."""
    launch_early()
    variants = [(shape, spec, count, cut) for count in tokens for cut in cuts(count, shape, spec)]
    works = dict(zip(variants, compile_beside(_compile, variants), strict=True))
    ctx, kernel = _kernel(shape, spec)
    layers = [kernel.prepack(_stored(shape, spec)) for _ in range(_LAYERS)]
    for count in tokens:
        steps = [_step(ctx, kernel, count, layer, number) for number, layer in enumerate(layers)]
        active = sum(len(step.ids.unique()) for step in steps) / len(steps)
        nbytes = active * sum(w[0].nbytes for w in layers[0].values())
        title = f"{shape} {spec} {count}"
        for name in ("w13", "w2"):
            read = microseconds(plain_read, [layer[f"{name}.weight"][: round(active)] for layer in layers])
            print(f"{title}: {read:8.2f} us plain read of {active:.0f} experts' {name}", flush=True)
        times = {
            cut: microseconds(functools.partial(kernel.run, cut), steps)
            for cut in cuts(count, shape, spec)
            if works[shape, spec, count, cut]
        }
        chosen = microseconds(kernel.apply, steps)
        lines = [("chosen", chosen), *((f"{cut}", times[cut]) for cut in sorted(times, key=times.__getitem__)[:best])]
        for label, time in lines:
            print(f"{title}: {time:8.2f} us {nbytes / time / 1e3:7.0f} GB/s  {label}", flush=True)


def _spec(name: str) -> QuantSpec:
    return TILED[name] if name in TILED else BLOCKS[name].spec


def _kernel(shape: str, spec: str) -> tuple[Context, PairedExperts[Any]]:
    experts, top_k, hidden, width, activation = SHAPES[shape]
    ctx = Site.open(discover()).context(torch.bfloat16)
    workload = ExpertsWorkload(
        dtype="bfloat16",
        spec=(_spec(spec), QuantSpec("bfloat16")),
        activation=activation,
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=width,
    )
    kind: type[PairedExperts[Any]] = TritonTiledExperts if spec in TILED else TritonBlockExperts
    return ctx, kind(ctx, workload)


def _stored(shape: str, spec: str) -> dict[str, torch.Tensor]:
    """A layer's weights, as checkpoints have them: those of one random expert for each."""
    experts, _, hidden, width, _ = SHAPES[shape]
    found: dict[str, torch.Tensor] = {}
    for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        one = quantize_weight(torch.randn(rows, columns, device="cuda") * columns**-0.5, _spec(spec))
        found |= {f"{name}.{slot}": torch.stack([part] * experts) for slot, part in one.items()}
    return found


def _step(ctx: Context, kernel: ExpertsKernel, tokens: int, weights: dict[str, torch.Tensor], seed: int) -> ExpertsCall:
    assert kernel.workload.num_experts is not None
    assert kernel.workload.hidden_size is not None
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, kernel.workload.hidden_size, generator=generator).to(ctx.torch_device, ctx.dtype)
    ids = torch.rand(tokens, kernel.workload.num_experts, generator=generator).argsort(-1)
    ids = ids[:, : kernel.workload.top_k].int().to(ctx.torch_device)
    factors = torch.rand(ids.shape, generator=generator).to(ctx.torch_device)
    scratch = torch.empty(kernel.workspace_bytes(tokens), dtype=torch.uint8, device=ctx.torch_device)
    return ExpertsCall(x, ids, factors, weights, torch.empty_like(x), scratch)


def _compile(variant: tuple[str, str, int, Cut]) -> None:
    launch_early()
    shape, spec, tokens, cut = variant
    ctx, kernel = _kernel(shape, spec)
    kernel.run(cut, _step(ctx, kernel, tokens, kernel.prepack(_stored(shape, spec)), 0))


_SPLIT = ((2, 3), (2, 4), (4, 2), (4, 3), (4, 4), (8, 2), (8, 3))
"""Warps and stages."""


def cuts(tokens: int, shape: str, spec: str) -> Iterator[Cut]:
    """Tiles worth a try."""
    experts, top_k, *_ = SHAPES[shape]
    each = tokens * top_k / experts
    return _tiles(each) if spec in TILED else _block_tiles(each)


def _tiles(each: float) -> Iterator[ExpertTiles]:
    if each <= 16:
        heights = (1, 8) if each <= 1 else (4, 8, 16)
        for rows, columns, (num_warps, num_stages) in itertools.product(heights, (16, 32), _SPLIT):
            yield ExpertTiles(rows, columns, num_warps, num_stages, split=True)
    if each >= 4:
        heights = (16, 32) if each <= 16 else (32, 64, 128)
        for rows, (columns, num_warps), num_stages in itertools.product(
            heights, ((64, 4), (128, 4), (128, 8), (256, 8)), (2, 3, 4)
        ):
            if rows * columns <= 64 * 32 * num_warps and num_stages * 256 * (columns // 2 + 2 * rows) <= _MOST_SHARED:
                yield ExpertTiles(rows, columns, num_warps, num_stages)


def _block_tiles(each: float) -> Iterator[BlockExpertTiles]:
    if each <= 1:
        for columns, num_warps, num_stages in ((16, 1, 3), (16, 1, 5), (32, 2, 3)):
            yield BlockExpertTiles(1, columns, num_warps, num_stages)
    if each <= 8:
        widths = ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8))
        for (columns, num_warps), num_stages in itertools.product(widths, (2, 3, 4)):
            yield BlockExpertTiles(8, columns, num_warps, num_stages)
    if each > 1:
        heights = (16, 32) if each <= 16 else (32, 64, 128)
        for rows, (columns, num_warps), numbers_first in itertools.product(
            heights, ((64, 4), (128, 4), (128, 8)), (False, True)
        ):
            if rows * columns <= 64 * 32 * num_warps:
                yield BlockExpertTiles(rows, columns, num_warps, 3, numbers_first)


if __name__ == "__main__":
    main()

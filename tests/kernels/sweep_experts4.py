"""Times tiles of experts with 4-bit weights on an accelerator, beside a plain read and the kernel for stored weights.

``python -m tests.kernels.sweep_experts4`` prints for each number of tokens the time of one layer's experts, and the
bytes of weights that are read per second, in the tiles chosen now and in the best ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import click
import torch

from hardpoint.conformance.site import Site
from hardpoint.context import Context
from hardpoint.kernels.experts import TritonGroupedExperts
from hardpoint.kernels.tiled_experts import ExpertTiles, TritonTiledExperts
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import ExpertsCall, ExpertsKernel, ExpertsWorkload, QuantSpec, Scale
from tests.kernels.sweeping import compile_beside, microseconds, plain_read

SHAPES = {
    "gpt-oss-20b": (32, 4, 2880, 2880, "swiglu_oai"),
    "qwen3-moe-30b-a3b": (128, 8, 2048, 768, "silu_and_mul"),
}
"""Experts, experts of a token, hidden size, width of an expert, activation."""
SPECS = {
    "mxfp4": QuantSpec("float4_e2m1", scales=(Scale("float8_e8m0fnu", (1, 32)),)),
    "nvfp4": QuantSpec("float4_e2m1", scales=(Scale("float8_e4m3fn", (1, 16)), Scale("float32", (1, -1)))),
    "int4": QuantSpec("int4", scales=(Scale("bfloat16", (1, 64)),), zero_point=True),
}
_LAYERS = 6
"""So many layers' weights in turn are several times what caches hold."""
_MOST_SHARED = 227 << 10


@click.command()
@click.option("--tokens", multiple=True, type=int, default=(1, 8, 32, 256, 2048), help="May be repeated.")
@click.option("--shape", default="gpt-oss-20b", type=click.Choice(list(SHAPES)))
@click.option("--spec", default="mxfp4", type=click.Choice(list(SPECS)))
@click.option("--best", default=3, help="How many of the best tiles are printed.")
def main(tokens: tuple[int, ...], shape: str, spec: str, best: int) -> None:
    """Print the times."""
    variants = [(shape, spec, count, cut) for count in tokens for cut in cuts(count, shape)]
    works = dict(zip(variants, compile_beside(_compile, variants), strict=True))
    site = Site.open(discover())
    ctx = site.context(torch.bfloat16)
    workload = _workload(shape, spec)
    tiled, grouped = TritonTiledExperts(ctx, workload), TritonGroupedExperts(ctx, workload)
    stored = [_stored(shape, spec) for _ in range(_LAYERS)]
    packed = [tiled.prepack(layer) for layer in stored]
    for count in tokens:
        steps = [_step(ctx, tiled, count, layer, number) for number, layer in enumerate(packed)]
        active = sum(len(step.ids.unique()) for step in steps) / len(steps)
        nbytes = active * sum(w[0].nbytes for w in packed[0].values())
        for name, w in (("w13", packed[0]["w13.weight"]), ("w2", packed[0]["w2.weight"])):
            read = microseconds(plain_read, [layer[f"{name}.weight"][: round(active)] for layer in packed])
            print(f"{shape} {spec} {count}: {read:8.2f} us plain read of {active:.0f} experts' {name}", flush=True)
            del w
        old = [ExpertsCall(s.x, s.ids, s.weights, w, s.out, s.workspace) for s, w in zip(steps, stored, strict=True)]
        before = microseconds(grouped.apply, old)
        tokens_line = f"{shape} {spec} {count}"
        print(f"{tokens_line}: {before:8.2f} us {nbytes / before / 1e3:7.0f} GB/s  stored weights", flush=True)
        times = {
            cut: microseconds(functools.partial(tiled.run, cut), steps)
            for cut in cuts(count, shape)
            if works[shape, spec, count, cut]
        }
        chosen = microseconds(tiled.apply, steps)
        lines = [("chosen", chosen), *((f"{cut}", times[cut]) for cut in sorted(times, key=times.__getitem__)[:best])]
        for label, time in lines:
            print(f"{tokens_line}: {time:8.2f} us {nbytes / time / 1e3:7.0f} GB/s  {label}", flush=True)


def _workload(shape: str, spec: str) -> ExpertsWorkload:
    experts, top_k, hidden, width, activation = SHAPES[shape]
    return ExpertsWorkload(
        dtype="bfloat16",
        spec=(SPECS[spec], QuantSpec("bfloat16")),
        activation=activation,
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=width,
    )


def _stored(shape: str, spec: str) -> dict[str, torch.Tensor]:
    """A layer's random weights, as checkpoints have them."""
    experts, _, hidden, width, _ = SHAPES[shape]
    found = {}
    scales = SPECS[spec].scales
    for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        found[f"{name}.weight"] = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device="cuda")
        groups = (experts, rows, columns // scales[0].block[1])
        of_bytes = torch.randint(110, 118, groups, dtype=torch.uint8, device="cuda")
        plain = scales[0].format == "bfloat16"
        found[f"{name}.weight_scale"] = (
            torch.rand(groups, device="cuda").bfloat16() if plain else of_bytes.view(getattr(torch, scales[0].format))
        )
        if len(scales) == 2:
            found[f"{name}.weight_scale_2"] = torch.rand(experts, rows, 1, device="cuda")
        if SPECS[spec].zero_point:
            found[f"{name}.weight_zero_point"] = torch.randint(-8, 8, groups, dtype=torch.int8, device="cuda")
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


def _compile(variant: tuple[str, str, int, ExpertTiles]) -> None:
    shape, spec, tokens, cut = variant
    ctx = Site.open(discover()).context(torch.bfloat16)
    kernel = TritonTiledExperts(ctx, _workload(shape, spec))
    packed = kernel.prepack(_stored(shape, spec))
    kernel.run(cut, _step(ctx, kernel, tokens, packed, 0))


_SPLIT = ((2, 3), (2, 4), (4, 2), (4, 3), (4, 4), (8, 2), (8, 3))
"""Warps and stages."""


def cuts(tokens: int, shape: str) -> Iterator[ExpertTiles]:
    """Tiles worth a try."""
    experts, top_k, *_ = SHAPES[shape]
    each = tokens * top_k / experts
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


if __name__ == "__main__":
    main()

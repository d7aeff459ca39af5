"""Times the product of a few rows with weights of each format, beside a plain read of as many bytes.

``python -m tests.cpu.sweep_formats --isa avx2 --threads 2 --rows 1`` prints a line for each format: the kernel that an
engine would choose, its time, and the share of the speed at which torch's sum reads, in turns with it. Bytes are those
of the checkpoint or file. More weights than caches hold are gone through before one is read again.
"""

from __future__ import annotations

from functools import partial

import click
import torch

from hardpoint.bench.device_timer import DeviceTimer
from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.config import EngineConfig
from hardpoint.context import Context
from hardpoint.engine.blueprint import draw
from hardpoint.numerics import quantize_weight
from hardpoint.plugin_host.blame import construct
from hardpoint.quantization.methods.block_floats import MXFP4, MXFP8, NVFP4
from hardpoint_plugin_api import GraphEngine, LinearCall, LinearKernel, LinearWorkload, QuantSpec, Scale

_WORKING_SET = 256 << 20
_DTYPE = "bfloat16"
_PLAIN = QuantSpec(_DTYPE)
_ROUNDED = QuantSpec("int8", scales=(Scale("float32", (1, 32)),), static=False)
"""Activations beside blocks of GGUF files."""
_FORMATS = {
    "FP8, a scale for each row": QuantSpec("float8_e4m3fn", scales=(Scale("float32", (1, -1)),)),
    "FP8, 128 x 128": QuantSpec("float8_e4m3fn", scales=(Scale("float32", (128, 128)),)),
    "MXFP8": MXFP8,
    "int8": QuantSpec("int8", scales=(Scale("float32", (1, -1)),)),
    "int4, groups of 32": QuantSpec("int4", scales=(Scale(_DTYPE, (1, 32)),)),
    "int4, groups of 128": QuantSpec("int4", scales=(Scale(_DTYPE, (1, 128)),)),
    "uint4 with zero points, groups of 64": QuantSpec("uint4", scales=(Scale(_DTYPE, (1, 64)),), zero_point=True),
    "MXFP4": MXFP4,
    "NVFP4": NVFP4,
    **{f"GGUF {name}": SPECS[name].spec for name in ("Q4_K", "Q6_K", "Q8_0", "Q4_0")},
}


@click.command()
@click.option("--isa", default="auto", show_default=True, help="The level of instruction sets, as in --cpu.isa.")
@click.option("--threads", default=0, show_default=True, help="Threads, as in --cpu.threads.")
@click.option("--rows", "numbers", multiple=True, type=int, default=(1,), help="Rows of activations; may be repeated.")
@click.option("--shape", default="6144x1024", show_default=True, help="NxK of the weight.")
@click.option("--only", default="", help="Only formats with this text in their name.")
@click.option("--rounds", default=11, show_default=True, help="Turns, of which the median counts.")
def main(isa: str, threads: int, numbers: tuple[int, ...], shape: str, only: str, rounds: int) -> None:
    """Print the times."""
    options = {"cpu": {"isa": isa, "threads": threads}}
    blueprint = draw(EngineConfig.create(model="demo", dtype=_DTYPE, platform="cpu", plugin_config=options))
    timer = DeviceTimer(blueprint.platform, blueprint.ctx.torch_device, _WORKING_SET)
    engine = blueprint.platform.graph_engine()
    n, k = (int(size) for size in shape.split("x"))
    with torch.inference_mode():
        for name, spec in _FORMATS.items():
            for number in numbers:
                if only in name:
                    _print(name, blueprint.ctx, timer, engine, spec, (number, n, k), rounds)


def _print(
    title: str,
    ctx: Context,
    timer: DeviceTimer,
    engine: GraphEngine,
    spec: QuantSpec,
    sizes: tuple[int, int, int],
    rounds: int,
) -> None:
    number, n, k = sizes
    activation = _ROUNDED if title.startswith("GGUF") else _PLAIN
    workload = LinearWorkload(dtype=_DTYPE, in_features=k, out_features=n, spec=(spec, activation))
    plan = ctx.select(workload)
    chosen = next(e for e in plan.entries if e.range.max is None or number <= e.range.max).offer
    kernel = construct(chosen, ctx.load(chosen), LinearKernel, ctx, plan.workload)
    slots = quantize_weight(torch.randn(n, k), spec)
    nbytes = sum(x.nbytes for x in slots.values())
    weights = [kernel.prepack({s: x.clone() for s, x in slots.items()}) for _ in range(_WORKING_SET // nbytes)]
    x = torch.randn(number, k).bfloat16()

    def step() -> None:
        for weight in weights:
            kernel.apply(LinearCall(x, weight))

    run = engine.prepare("sweep", step, {}).run
    for call in (run, timer.read):
        call()
    ours, read = timer.in_turns([run, partial(timer.read)], rounds)
    speed, plain = len(weights) * nbytes / ours / 1e9, _WORKING_SET / read / 1e9
    print(
        f"{title}, {number} rows: {ours / len(weights) * 1e6:,.1f} us, {speed:.1f} GB/s, "
        f"{speed / plain:.0%} of {plain:.1f} ({chosen.contribution.name})",
        flush=True,
    )


if __name__ == "__main__":
    main()

"""Times FlashInfer's product of 8-bit floats with scales of blocks beside Triton's, with input that comes rounded.

``python -m tests.cuda.sweep_fp8_blocks --rows 128 --rows 2048 --shape 6144x4096``; without options, the layers of
Llama-3.1-8B, and prompts of 128 to 8192 tokens. Each speed is of the operations.
"""

from __future__ import annotations

from functools import partial

import click
import torch

from hardpoint.conformance.families.specs import pair_of
from hardpoint.conformance.site import Site, Subject
from hardpoint.numerics import quantize_weight
from hardpoint.ops.quantize_rows import quantize_rows
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import LinearCall, LinearKernel, LinearWorkload, Quantized
from tests.kernels.sweeping import microseconds
from tests.support.specs import SPECS

_KERNELS = ("triton_fp8_gemm", "flashinfer_fp8_blocks")
_SHAPES = ("6144x4096", "4096x4096", "28672x4096", "4096x14336")
_ROWS = (128, 512, 1024, 2048, 8192)
_WEIGHTS = 4
"""In turn; with more rows than a hundred they need not be cold."""


@click.command()
@click.option("--rows", multiple=True, type=int, default=_ROWS, help="Rows of activations; may be repeated.")
@click.option("--shape", multiple=True, default=_SHAPES, help="NxK; may be repeated.")
def main(rows: tuple[int, ...], shape: tuple[str, ...]) -> None:
    """Print the times."""
    site = Site.open(discover(), "cuda")
    context = site.context("bfloat16")
    pair = pair_of(SPECS, "fp8-tiles-dynamic", "bfloat16")
    offers = {offer.contribution.name: offer for offer in site.plugins.offers("linear")}
    for n, k in ((int(n), int(k)) for n, k in (text.split("x") for text in shape)):
        workload = LinearWorkload(dtype="bfloat16", in_features=k, out_features=n, spec=pair)
        drawn = torch.randn(n, k, device=site.device) * k**-0.5
        slots = quantize_weight(drawn, pair[0])
        weights = [{name: x.clone() for name, x in slots.items()} for _ in range(_WEIGHTS)]
        for name in _KERNELS:
            subject = Subject.load(offers[name], site)
            if reason := subject.refuses(workload):
                print(f"{n}x{k}: {name} refuses: {reason}", flush=True)
                continue
            kernel = subject.target(context, workload)
            assert isinstance(kernel, LinearKernel)
            for num_rows in rows:
                x = torch.randn(num_rows, k, device=site.device).bfloat16()
                data, scale = quantize_rows.bind(context, spec=pair[1])(x, spec=pair[1])
                rounded = Quantized(data, scale, pair[1])
                time = microseconds(partial(_multiplied, kernel, rounded), weights)
                speed = 2 * num_rows * n * k / time / 1e6
                print(f"{n}x{k} rows {num_rows}: {time:8.2f} us {speed:6.0f} TFLOP/s  {name}", flush=True)


def _multiplied(kernel: LinearKernel, x: Quantized, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return kernel.apply(LinearCall(x.data, weights, scales=x.scale))


if __name__ == "__main__":
    main()

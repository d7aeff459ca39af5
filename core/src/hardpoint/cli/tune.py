"""``hardpoint tune``: what is fastest on this device, measured, and written where it is looked up."""

from __future__ import annotations

from pathlib import Path

import click

from hardpoint.cli.output import make_folder, print_table

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@click.group(short_help="Measure what is fastest on this device, and write it down.")
def tune() -> None:
    """Measure what is fastest on this device, and write it where it is looked up."""


@tune.command()
@click.option("--experts", required=True, type=click.IntRange(1), help="Experts of this rank.")
@click.option("--top-k", required=True, type=click.IntRange(1), help="Experts of a token.")
@click.option("--hidden-size", required=True, type=click.IntRange(1), help="The model's width.")
@click.option("--intermediate-size", required=True, type=click.IntRange(1), help="An expert's width, on this rank.")
@click.option("--activation", default="silu_and_mul", show_default=True, help="Between the two matrices.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float16"]))
@click.option(
    "--tokens", multiple=True, type=click.IntRange(1), help="Of a step; may be given again. [default: 1 to 4096]"
)
@click.option("--platform", default=None, help="Where to run.")
@click.option("--output", default=None, metavar="FOLDER", help="Write there, and not where kernels look it up.")
def experts(
    experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    activation: str,
    dtype: str,
    tokens: tuple[int, ...],
    platform: str | None,
    output: str | None,
) -> None:
    """Tune the tiles of the experts' matmuls in Triton, for one shape of a layer.

    Weights and tokens are random, and each token's experts are drawn alike. The file is named after the shape and the
    device, and holds the numbers of tokens that were measured this time. Beside them stand torch's matmuls of as many
    rows with the matrices of one expert: the same work without the experts.
    """
    import torch

    from hardpoint.bench.progress import progress_bar
    from hardpoint.conformance.site import Site
    from hardpoint.dtypes import dtype_of
    from hardpoint.kernels import experts_tiling
    from hardpoint.kernels.experts_tuning import Tuner
    from hardpoint.plugins import discover
    from hardpoint_plugin_api import ExpertsWorkload

    folder = Path(output) if output else experts_tiling.DIRECTORY
    make_folder("--output", str(folder))
    site = Site.open(discover(), platform)
    ctx = site.context(dtype_of(dtype))
    workload = ExpertsWorkload(
        dtype=dtype,
        activation=activation,
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )
    with torch.inference_mode(), progress_bar("tiles tried", None) as tried:
        tuner = Tuner(site.platform, ctx, workload)
        found = [tuner.tune(count, tried) for count in tokens or _TOKENS]
    path = folder / experts_tiling.file_name(ctx.device.name, tuner.shape)
    experts_tiling.write(path, {measured.tokens * top_k: measured.tiling for measured in found})
    flops = 2 * top_k * tuner.bytes_per_expert / ctx.dtype.itemsize
    print_table(
        ["tokens", "by rule, us", "tuned, us", "torch's matmuls, us", "TFLOP/s", "weights read, TB/s", "rows"],
        [
            [
                measured.tokens,
                f"{measured.seconds_by_rule * 1e6:,.1f}",
                f"{measured.seconds * 1e6:,.1f}",
                f"{measured.seconds_of_matmuls * 1e6:,.1f}",
                f"{flops * measured.tokens / measured.seconds / 1e12:,.1f}",
                f"{measured.num_active * tuner.bytes_per_expert / measured.seconds / 1e12:,.2f}",
                measured.tiling.rows,
            ]
            for measured in found
        ],
    )
    click.echo(f"written to {path}")

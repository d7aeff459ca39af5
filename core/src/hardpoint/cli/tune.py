"""``hardpoint tune``: what is fastest on this device, measured, and written where it is looked up."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hardpoint.config import EngineConfig
from hardpoint.terminal.engine_options import EngineCommand
from hardpoint.terminal.output import check_writable, make_folder, print_table
from hardpoint_plugin_api import ConfigError, LinearWorkload

if TYPE_CHECKING:
    from hardpoint.bench.linear_tuning import Measured, Roofline
    from hardpoint.selection.decide import Decision

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_ROWS = "1,2,3,4,5,6,7,8,16,32,64,128,256,512,1024"
_DECODE_ROWS = 64
_TUNING_FILE = "tuning.json"


class _Numbers(click.ParamType[tuple[int, ...]]):
    """Positive numbers with commas between them, in ascending order, each once."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = sorted({int(part) for part in value.split(",")})
        except ValueError:
            numbers = [0]
        if numbers[0] < 1:
            self.fail(f"{value!r}: write positive numbers with commas between them, as in {_ROWS[:7]}", param, ctx)
        return tuple(numbers)


@click.group(short_help="Measure kernels on this device, and save the fastest.")
def tune() -> None:
    """Measure kernels on this device, and save the fastest for engines to use."""


@tune.command()
@click.option("--experts", required=True, type=click.IntRange(1), help="Number of experts on this rank.")
@click.option("--top-k", required=True, type=click.IntRange(1), help="Number of experts per token.")
@click.option("--hidden-size", required=True, type=click.IntRange(1), help="Hidden size of the model.")
@click.option(
    "--intermediate-size", required=True, type=click.IntRange(1), help="Intermediate size of an expert on this rank."
)
@click.option(
    "--activation", default="silu_and_mul", show_default=True, help="Activation function between the two matrices."
)
@click.option(
    "--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float16"]), help="Data type."
)
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(1),
    help="Number of tokens in a step; repeatable. [default: 1 to 4096]",
)
@click.option(
    "--platform", default=None, help="Kind of device to run on. Default: an accelerator if one is found, else cpu."
)
@click.option(
    "--output",
    default=None,
    metavar="FOLDER",
    help="Folder to write to; serve reads it with --tuning-tables. Default: beside the kernels.",
)
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
    from contextlib import nullcontext

    import torch
    from triton import knobs

    from hardpoint.bench.experts_compiling import CompilingProcesses
    from hardpoint.conformance.site import Site
    from hardpoint.dtypes import dtype_of
    from hardpoint.kernels import experts_tiling, tables
    from hardpoint.kernels.experts_tuning import RandomLayer, Tuner
    from hardpoint.plugin_host import discover
    from hardpoint.terminal.progress import progress_bar
    from hardpoint_plugin_api import ExpertsWorkload

    if top_k > experts:
        raise ConfigError(f"--top-k {top_k} is more than the {experts} of --experts")
    site = Site.open(discover(), platform)
    is_compiled = not knobs.runtime.interpret
    if is_compiled and not site.platform.info.accelerator:
        name = site.platform.name
        raise ConfigError(f"platform {name} runs no Triton kernels, whose tiles these are; choose one by --platform")
    folder = Path(output) if output else tables.FOLDER
    make_folder("--output", str(folder))
    ctx = site.context(dtype_of(dtype))
    workload = ExpertsWorkload(
        dtype=dtype,
        activation=activation,
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )
    compiling = CompilingProcesses(site.platform.name, workload) if is_compiled else nullcontext(lambda *_: None)
    with torch.inference_mode(), progress_bar("tiles tried", None) as tried, compiling as compile_ahead:
        tuner = Tuner(site.platform, RandomLayer(ctx, workload), compile_ahead)
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


@tune.command(cls=EngineCommand, short_help="Find the fastest matmul kernel for each matrix of a model.")
@click.option(
    "--rows",
    default=_ROWS,
    show_default=True,
    type=_Numbers(),
    help="Numbers of tokens to measure, separated by commas. A token is a row of the matmul's input.",
)
@click.option(
    "--layout-by",
    type=_Numbers(),
    help="Numbers of tokens whose times choose the layout of the weight, which all numbers share.  "
    f"[default: up to {_DECODE_ROWS}]",
)
@click.option(
    "--margin",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0, 50),
    help="Percent by which a kernel must be faster than the present one to replace it.",
)
@click.option(
    "--rounds", default=15, show_default=True, type=click.IntRange(3), help="Most rounds to measure; the median counts."
)
@click.option("--output", metavar="FILE", help=f"The tuning file.  [default: that of --tuning-file, or {_TUNING_FILE}]")
def linear(
    config: EngineConfig,
    rows: tuple[int, ...],
    layout_by: tuple[int, ...] | None,
    margin: float,
    rounds: int,
    output: str | None,
) -> None:
    """Measure every matmul kernel on the matrices of MODEL, and save the fastest for each number of tokens.

    MODEL needs no weights: random ones are packed once for each layout, and no cache of the processor holds them.
    Kernels take turns. The present kernel stays unless another is faster by --margin; an entry of the tuning file
    counts as the present kernel. Entries of other matrices, and of other numbers of tokens, stay in the file. It is
    written after each matrix, so that an interrupt keeps the results so far. An engine reads it with --tuning-file
    FILE.
    """
    from hardpoint.bench.linear_tuning import tune_linears
    from hardpoint.selection import TuningFile

    decisive = layout_by or tuple(n for n in rows if n <= _DECODE_ROWS) or rows
    if absent := [n for n in decisive if n not in rows]:
        raise ConfigError(f"--layout-by {absent[0]}: it is none of --rows {','.join(map(str, rows))}")
    if name := config.choices.get("linear"):
        raise ConfigError(f"{name!r} was asked for as linear kernel, which leaves nothing to tune; leave that out")
    if output is not None and config.tuning_file is not None:
        raise ConfigError(
            f"--output {output} and --tuning-file {config.tuning_file}: one file is read and written; give one of them"
        )
    path = Path(output or config.tuning_file or _TUNING_FILE)
    if str(path) == "-":
        raise ConfigError("--output -: a tuning file cannot be stdout, for it is read, too; give the name of a file")
    check_writable("--output", str(path))
    known = TuningFile.read(path, "--output" if output else "--tuning-file") if path.exists() else TuningFile()
    config = config.model_copy(update={"tuning_file": str(path) if path.exists() else None})
    tuned = tune_linears(config, known, rows, decisive, margin / 100, rounds, lambda file: file.write(path))
    for measured, decision in tuned.decided:
        _print_decision(measured, decision, tuned.roofline, decisive)
    speed, rate = tuned.roofline.bytes_per_second / 1e9, tuned.roofline.flops_per_second / 1e12
    click.echo(
        f"bound: bytes of weight, input and output over {speed:,.1f} GB/s, which torch's sum reads, or operations over "
        f"{rate:,.2f} TFLOP/s, which {tuned.roofline.product} reaches, whatever takes longer"
    )
    if tuned.file == known:
        click.echo(f"{path} stays as it is: no winner is another, and no time differs by more than {margin:g} %")
        return
    click.echo(f"written to {path}; an engine reads it with --tuning-file {path}")


@tune.command(cls=EngineCommand, short_help="Find the blocks of each pipeline stage with which all take equally long.")
@click.option(
    "--tokens",
    default=2048,
    show_default=True,
    type=click.IntRange(1),
    help="Number of prompt tokens in a step, at most --max-num-batched-tokens.",
)
@click.option(
    "--rounds", default=15, show_default=True, type=click.IntRange(3), help="Most rounds to measure; the median counts."
)
def stages(config: EngineConfig, tokens: int, rounds: int) -> None:
    """Measure the blocks of MODEL, and divide them among --pipeline-parallel-size stages by their time.

    MODEL needs no weights: random ones are made of one block of each kind. Blocks run on one device, in a step of
    prompts, as stages matter for these. Of divisions whose slowest stage takes equally long, the one with the fewest
    bytes on any stage is taken.
    """
    from hardpoint.bench.stage_timing import block_kinds, divided_by_time

    number = config.topology.pipeline
    if number == 1:
        raise ConfigError("--pipeline-parallel-size 1: one stage has all blocks; say how many stages there are")
    kinds = block_kinds(config, tokens, rounds)
    print_table(
        ["blocks", "number", "ms", "MB of weights"],
        [
            [_ranges(kind.numbers), len(kind.numbers), f"{kind.seconds * 1e3:.3f}", f"{kind.nbytes / 1e6:,.1f}"]
            for kind in kinds
        ],
    )
    click.echo(f"--pipeline-parallel-layers {','.join(map(str, divided_by_time(config, kinds, number)))}")


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0-2,4``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def _print_decision(measured: Measured, decision: Decision, roofline: Roofline, decisive: Collection[int]) -> None:
    """One workload: who won what, and why in this layout."""
    from hardpoint.selection.decide import serving
    from hardpoint.selection.tuning import written_us

    workload = measured.plan.workload
    assert isinstance(workload, LinearWorkload)
    assert workload.in_features is not None
    assert workload.out_features is not None
    width, nbytes = workload.in_features + workload.out_features, measured.nbytes[decision.form.layout]
    rows = []
    for tokens, winner in decision.winners.items():
        times = dict(measured.times[tokens])
        seconds = times.pop(winner)
        other = min((c for c in times if c.offer != winner.offer), key=lambda c: times[c], default=None)
        bound = roofline.seconds(
            nbytes + tokens * width * measured.itemsize, 2 * tokens * workload.in_features * workload.out_features
        )
        fastest = (other.name, written_us(times[other] * 1e6)) if other else (None, None)
        before = serving(measured.plan, tokens).contribution.name
        chosen = winner.name if before == winner.name else f"{winner.name} (was {before})"
        own = (tokens, chosen, written_us(seconds * 1e6))
        rows.append([*own, *fastest, written_us(bound * 1e6), f"{bound / seconds:.0%}"])
    click.echo(workload.key())
    print_table(["tokens", "chosen", "takes", "fastest other", "takes", "bound", "of bound"], rows)
    means = [f"{form} {written_us(seconds * 1e6)}" for form, seconds in decision.seconds.items()]
    click.echo(f"all in {decision.form}: geometric means of {','.join(map(str, decisive))} tokens: {', '.join(means)}")
    if heavy := sorted(measured.heavy - {decision.form.layout}):
        click.echo(f"not taken, as more memory than the weight as loaded: layout {', '.join(heavy)}")
    click.echo()

"""How evenly experts are spread over ranks, before and after they are balanced: computed, without ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.experts.placement import Placement
from hardpoint_plugin_api import ConfigError

Loads = Sequence[Sequence[float]]
"""By layer and expert."""


@click.option(
    "--routing",
    metavar="FILE",
    help="Recorded routing: a NumPy file of integers [tokens, layers, experts per token], as routed_experts has them.  "
    "[default: loads drawn by Zipf's law]",
)
@click.option("--ranks", default=64, show_default=True, type=click.IntRange(min=2), help="Ranks that experts are on.")
@click.option("--experts", default=256, show_default=True, type=click.IntRange(min=2), help="Experts of each layer.")
@click.option(
    "--redundant", default=64, show_default=True, type=click.IntRange(min=0), help="Copies of experts beyond one."
)
@click.option("--layers", default=8, show_default=True, type=click.IntRange(min=1), help="Layers, without --routing.")
@click.option(
    "--exponent",
    default=0.8,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Of Zipf's law, without --routing: the load of the n-th expert is 1 / n ** EXPONENT.",
)
@benchmark("moe", "How evenly balanced experts are spread over many ranks, and how many of them move. Needs no ranks.")
def moe(routing: str | None, ranks: int, experts: int, redundant: int, layers: int, exponent: float) -> BenchResult:
    """Place experts by the first half of the tokens, and again by the second half.

    A load is the busiest rank's, in the layer where it is highest, over the mean of all ranks. The roofline is 1: equal
    loads. Without a recorded routing the loads of the second half are those of the first, times numbers from 0.8 to
    1.25.
    """
    first, second = _drawn(layers, experts, exponent) if routing is None else _recorded(routing, experts)
    even = [Placement.even(experts, ranks, redundant)] * len(first)
    once = [placement.balanced(loads) for placement, loads in zip(even, first, strict=True)]
    twice = [placement.balanced(loads) for placement, loads in zip(once, second, strict=True)]
    slots = ranks * even[0].num_slots * len(first)
    rows = [
        _busiest("first half, as loaded", even, first),
        _busiest("first half, balanced", once, first),
        _moved("experts moved by the first half", even, once, slots),
        _busiest("second half, as the first left it", once, second),
        _busiest("second half, balanced again", twice, second),
        _moved("experts moved by the second half", once, twice, slots),
    ]
    return BenchResult("moe", tuple(rows), roofline=f"the mean of {ranks} ranks")


def _busiest(name: str, placements: Sequence[Placement], loads: Loads) -> BenchRow:
    worst = max(placement.imbalance(each) for placement, each in zip(placements, loads, strict=True))
    return BenchRow(name, worst, "of the mean", roofline=1.0)


def _moved(name: str, before: Sequence[Placement], after: Sequence[Placement], slots: int) -> BenchRow:
    moved = sum(len(old.moves_to(new)) for old, new in zip(before, after, strict=True))
    return BenchRow(name, moved, "experts", note=f"of {slots} slots")


def _drawn(layers: int, experts: int, exponent: float) -> tuple[Loads, Loads]:
    draw = random.Random(0)
    first = []
    for _ in range(layers):
        loads = [(number + 1) ** -exponent for number in range(experts)]
        draw.shuffle(loads)
        first.append(loads)
    return first, [[load * draw.uniform(0.8, 1.25) for load in loads] for loads in first]


def _recorded(path: str, experts: int) -> tuple[Loads, Loads]:
    """The loads of both halves of a file's tokens. Raises ConfigError for a file that is no such routing."""
    try:
        ids: npt.NDArray[np.integer] = np.load(Path(path), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"--routing {path}: cannot be read as a NumPy file: {error}") from error
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer) or len(ids) < 2:
        raise ConfigError(
            f"--routing {path}: must hold integers [tokens, layers, experts per token] of at least 2 tokens, holds "
            f"{ids.dtype} {list(ids.shape)}"
        )
    if ids.min() < 0 or ids.max() >= experts:
        raise ConfigError(f"--routing {path}: names expert {ids.max()}, and there are {experts}; give --experts")
    halves = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    first, second = (
        [np.bincount(half[:, layer].ravel(), minlength=experts).tolist() for layer in range(ids.shape[1])]
        for half in halves
    )
    return first, second

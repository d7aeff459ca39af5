"""Whether ranks can divide a matrix as it is quantized, found before weights are read."""

from __future__ import annotations

from typing import Literal

from hardpoint_plugin_api import ConfigError, LinearArgs, Scheme, ShardPlan, StoredTensor

FEWER = "use fewer ranks"
WHOLE_EXPERTS = "give ranks whole experts with --enable-expert-parallel, or "
"""Remedies where ranks would divide a block that is quantized as one."""


def check_shards(path: str, scheme: Scheme, args: LinearArgs, advice: str = "") -> None:
    """Raise ConfigError where a rank's piece of a matrix cuts what is quantized as one.

    ``advice`` comes before that to use fewer ranks.
    """
    columns = args.column_shard
    if columns is not None and scheme.weight.permuted:
        raise ConfigError(
            f"--tensor-parallel-size {len(columns.ranks)}: the columns of layer {path!r} are quantized in groups that "
            f"are no neighbours (act-order), which cannot be divided; {advice}run it on one rank"
        )
    for stored in scheme.stored:
        if (args.row_shards and _lacks(stored, scheme, "out")) or (columns and _lacks(stored, scheme, "in")):
            ranks = len((columns or args.row_shards[0]).ranks)
            raise ConfigError(
                f"--tensor-parallel-size {ranks}: layer {path!r} is stored in a form that ranks cannot divide (its "
                f"{stored.name!r} is one piece); {advice}run it on one rank"
            )
        for dim in stored.dims:
            for plan in args.row_shards if dim.axis == "out" else (columns,) if dim.axis == "in" and columns else ():
                try:
                    plan.blocks(dim.per)
                except ValueError:
                    what = "rows" if dim.axis == "out" else "columns"
                    raise cut_error(path, dim.per, plan, what, advice + FEWER) from None


def check_turned_shards(path: str, scheme: Scheme, args: LinearArgs) -> None:
    """The same of a matrix whose parts take turns in the checkpoint: each rank reads it whole, so that only blocks of
    rows may be cut."""
    for plan in args.row_shards:
        for block in (scale.block[0] for scale in scheme.weight.scales if scale.block[0] > 1):
            try:
                plan.blocks(block)
            except ValueError:
                raise cut_error(path, block, plan, "rows", FEWER) from None


def _lacks(stored: StoredTensor, scheme: Scheme, axis: Literal["out", "in"]) -> bool:
    """Whether a tensor whose slots differ along ``axis`` of the matrix has no such axis itself. Where several rows have
    one scale, it may be of a merged matrix, and then is one number."""
    groups = axis == "in" and any(scale.block[1] != -1 for scale in scheme.weight.scales[:1])
    differs = "weight" in stored.fills or (groups and "weight_scale" in stored.fills)
    return differs and all(dim.axis != axis for dim in stored.dims)


def cut_error(path: str, block: int, plan: ShardPlan, what: str, advice: str) -> ConfigError:
    """The error for ranks whose ``what``, by ``plan``, cut blocks of ``block``; ``advice`` is the remedy."""
    return ConfigError(
        f"--tensor-parallel-size {len(plan.ranks)}: layer {path!r} is quantized in blocks of {block}, and ranks would "
        f"have {plan.size} of its {plan.full} {what} each, which cuts blocks; {advice}"
    )

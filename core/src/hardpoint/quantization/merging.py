"""Several modules of a checkpoint in one matrix: when that is exact, and what they must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hardpoint.checkpoint.reading import ONCE
from hardpoint_plugin_api import CheckpointError, Scale, Scheme


def merge_schemes(schemes: Sequence[Scheme], rows: Sequence[int]) -> Scheme | None:
    """One scheme for the matrix that holds the ``rows`` of several modules; None where each must have its own.

    A scale for a whole tensor becomes one for each row, so that nothing is quantized anew. Modules stay apart where
    their schemes differ, or where a block of rows would reach from one into the next.
    """
    first = schemes[0]
    if len(schemes) == 1:
        return first
    scales = first.weight.scales
    if any(scheme != first for scheme in schemes):
        return None
    if any(n % scale.block[0] for scale in scales if scale.block[0] > 1 for n in rows[:-1]):
        return None
    return by_row(first)


def by_row(scheme: Scheme) -> Scheme:
    """The same numbers, with a scale for each row in place of one for all rows."""
    scales = tuple(Scale(s.format, (1, s.block[1])) if s.block[0] == -1 else s for s in scheme.weight.scales)
    return replace(scheme, weight=replace(scheme.weight, scales=scales))


def collapse_parts(
    weights: dict[str, torch.Tensor], path: str, matrix: str = "", *, stacked: bool = False
) -> dict[str, torch.Tensor]:
    """Make one of what each module brought: column groups [in], scale and zero point of activations [1] (``ONCE``).

    The slots are those of ``matrix`` ("w13."), where a layer has several. ``stacked`` ones keep their first axis.
    Raises CheckpointError where they differ, which they did not in the checkpoint that the layer was built for.
    """
    whole = dict(weights)
    for name in sorted(ONCE):
        slot = f"{matrix}{name}"
        if slot not in weights:
            continue
        value = weights[slot].transpose(0, 1) if stacked else weights[slot]
        if not all(torch.equal(other, value[0]) for other in value[1:]):
            raise CheckpointError(
                f"layer {path!r}: the parts that were merged into one matrix differ in {slot}, which they did not in "
                "the checkpoint that the engine was built for; build a new engine for these weights"
            )
        one = value[0] if name == "weight_group_index" else value[:1]
        whole[slot] = one.transpose(0, 1).contiguous() if stacked and name != "weight_group_index" else one
    return whole

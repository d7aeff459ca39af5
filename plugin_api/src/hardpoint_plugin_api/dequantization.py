"""From a stored matrix to numbers: the definition of what a spec's slots mean, in torch operators of any device.

A matrix is a dict of tensors by slot name, as ``quantization.weight_slots`` declares them. Axes: N rows (out), K
columns (in), G columns of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardpoint_plugin_api.quant import QuantSpec, Scale

if TYPE_CHECKING:
    import torch


def scale_slot(level: int, of: str = "weight") -> str:
    """The name of the slot with the scales of ``level`` (from 0): ``weight_scale``, ``weight_scale_2``, ..."""
    return f"{of}_scale" + (f"_{level + 1}" if level else "")


def minimum_slot(level: int) -> str:
    """The name of the slot with the minima of ``level`` (from 0): ``weight_min``, ``weight_min_2``, ..."""
    return "weight_min" + (f"_{level + 1}" if level else "")


def decode_elements(stored: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
    """The elements of ``spec`` as numbers: [..., K / per_byte] as stored -> [..., K] in ``dtype``, before any scale.

    Raises UnknownNameError where the spec names an element that it does not define.
    """
    import torch

    if spec.definition is None and spec.is_plain:
        return stored.to(dtype)
    element = spec.number_format
    if spec.packing == "nibbles":
        stored = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2)
    return element.decode(stored, dtype)


def dequantize(
    weights: Mapping[str, torch.Tensor],
    spec: QuantSpec,
    dtype: torch.dtype,
    rows: slice | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``rows`` (a slice, or int64 ids [R]; None: all) of the matrix, [R, K] in ``dtype``.

    ``w = (q - zero_point) * scale_1 * scale_2 * ... + min_1 * min_2 * ...`` is computed in float32, or in ``dtype``
    where that is wider. A plain matrix may be returned as it is stored.
    """
    import torch

    stored = weights["weight"]
    wide = torch.promote_types(dtype, torch.float32)
    values = decode_elements(stored if rows is None else stored[rows], spec, wide)
    if spec.is_plain:
        return values.to(dtype)
    groups = weights.get("weight_group_index")

    def aligned(of: torch.Tensor, per_block: torch.Tensor, scale: Scale) -> tuple[torch.Tensor, torch.Tensor]:
        return _aligned(of, _of_rows(per_block, scale, stored.shape[0], rows).to(wide), scale.block[1], groups)

    if spec.zero_point:
        view, zero_point = aligned(values, weights["weight_zero_point"], spec.scales[0])
        view.sub_(zero_point)
    for level, scale in enumerate(spec.scales):
        view, factor = aligned(values, weights[scale_slot(level)], scale)
        view.mul_(factor)
    if spec.minimum:
        minima = torch.ones_like(values)
        for level, scale in enumerate(spec.scales):
            view, factor = aligned(minima, weights[minimum_slot(level)], scale)
            view.mul_(factor)
        values.add_(minima)
    return values.to(dtype)


def _of_rows(x: torch.Tensor, scale: Scale, num_rows: int, rows: slice | torch.Tensor | None) -> torch.Tensor:
    """Values of blocks of rows and columns, repeated for each of ``rows``, or once for all of them."""
    n = scale.block[0]
    if n == -1:
        return x
    if n != 1:
        x = x.repeat_interleave(n, dim=0)[:num_rows]
    return x if rows is None else x[rows]


def _aligned(
    values: torch.Tensor, per_block: torch.Tensor, k: int, groups: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of ``values`` [R, K], and ``per_block`` [R or 1, blocks of k columns] as it broadcasts to that view."""
    columns = values.shape[-1]
    if k == -1:
        return values, per_block
    if groups is not None:
        return values, per_block[:, groups]
    if columns % k:
        return values, per_block.repeat_interleave(k, dim=1)[:, :columns]
    return values.unflatten(-1, (columns // k, k)), per_block.unsqueeze(-1)

"""The numbers that a cache holds of elements with scales, as plain rounding makes them: what layouts are judged by."""

from __future__ import annotations

import torch

from hardpoint.conformance.families.steps import worst
from hardpoint.numerics import largest, round_to
from hardpoint_plugin_api import GROUP_SIZE, Plane
from hardpoint_plugin_api.elements import FLOAT4_E2M1, FLOAT8_E4M3FN


def rounded(x: torch.Tensor, plane: Plane) -> torch.Tensor:
    """The numbers that the elements of a plane hold for ``x`` [..., D], with a scale for each row or group; float32."""
    if plane.scaling == "group":
        return _rounded_groups(x)
    scale = x.float().abs().amax(-1, keepdim=True) / largest(plane.dtype)
    scale = torch.where(scale == 0, 1.0, scale)
    return round_to(x.float() / scale, plane.dtype).float() * scale


def _rounded_groups(x: torch.Tensor) -> torch.Tensor:
    """``rounded`` of 4-bit floats, in float64, by the list of their values, not by the layout's own code.

    Elements are so few that the way of rounding counts: of a scale, to the number below, nearest or above; of numbers
    in the middle of two elements, to either. It is the worst of these that a layout may do.
    """
    groups = x.double().unflatten(-1, (-1, GROUP_SIZE))
    elements = torch.tensor(FLOAT4_E2M1.values, dtype=torch.float64)
    codes = torch.arange(1, 127, dtype=torch.uint8)  # from the least scale to 448
    scales = FLOAT8_E4M3FN.decode(codes, torch.float64)
    wanted = groups.abs().amax(-1, keepdim=True) / elements.max()
    nearest = (wanted[..., None] - scales).abs().argmin(-1)
    is_zero = wanted < scales[0] / 2
    evaluations = []
    for step in (0, -1, 1):
        scale = torch.where(is_zero, 1.0, scales[(nearest + step).clamp(0, len(scales) - 1)])
        for ascending in (True, False):  # of two that are as near, argmin takes the first
            values = elements if ascending else elements.flip(0)
            held = values[((groups / scale)[..., None] - values).abs().argmin(-1)]
            evaluations.append((held * scale).flatten(-2).float())
    truth = x.double()
    return worst(truth.flatten(0, -2), [one.flatten(0, -2) for one in evaluations]).view(x.shape)

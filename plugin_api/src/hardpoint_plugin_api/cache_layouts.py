"""The cache layouts that most backends need: planes one after the other, with or without scales.

The views of a page are named as the planes are. Axes: B tokens of a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardpoint_plugin_api.cache import CacheLayout, CacheSpec, Region
from hardpoint_plugin_api.elements import BUILT_IN

if TYPE_CHECKING:
    import torch

_SCALE = "float32"
_SCALE_BYTES = 4


class PlainLayout(CacheLayout):
    """A page is its planes in the order of the spec, each [B, *plane.shape] or a state. Elements are the values."""

    name = "plain"

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        import torch

        regions, end = [], 0
        for plane in spec.planes:
            item = getattr(torch, plane.dtype).itemsize
            shape = spec.page_shape(plane, block_size)
            offset, nbytes = -(-end // item) * item, math.prod(shape) * item
            regions.append(Region(plane.name, offset, nbytes, shape, plane.dtype))
            end = offset + nbytes
        return tuple(regions)

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: view[pages] for name, view in views.items()}

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        for name, values in planes.items():
            views[name][pages] = values


class ScaledLayout(PlainLayout):
    """A page is its planes, as in ``PlainLayout``, then the float32 scales of each plane whose scaling is ``row``.

    The view of these scales is named ``PLANE_scale`` and has the plane's shape without the last axis.
    """

    name = "plain_scaled"

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        regions = list(super().regions(spec, block_size))
        end = -(-(regions[-1].offset + regions[-1].nbytes) // _SCALE_BYTES) * _SCALE_BYTES
        for plane in spec.planes:
            if plane.scaling == "row":
                shape = spec.page_shape(plane, block_size)[:-1]
                nbytes = math.prod(shape) * _SCALE_BYTES
                regions.append(Region(f"{plane.name}_scale", end, nbytes, shape, _SCALE))
                end += nbytes
        return tuple(regions)

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """Numbers in float32, less the static scales where there are such; wider planes as they are."""
        import torch

        found = {}
        for name, view in views.items():
            if name.removesuffix("_scale") in views and name.endswith("_scale"):
                continue
            if view.element_size() > 1:
                found[name] = view[pages]
                continue
            elements = view.view(torch.uint8)[pages].view(view.dtype).float()
            scale = views.get(f"{name}_scale")
            found[name] = elements if scale is None else elements * scale[pages].unsqueeze(-1)
        return found

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        """Values that no scale maps to elements are rounded, as ``write_rounded`` rounds them."""
        for name, values in planes.items():
            if views[name].element_size() > 1:
                views[name][pages] = values
            else:
                write_rounded(views, name, (pages,), values, None)


def write_rounded(
    views: Mapping[str, torch.Tensor],
    name: str,
    where: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    """Round ``x`` [..., D] to the 8-bit elements at ``views[name][where]``. Mutates the views.

    ``x`` is divided by ``scale`` [1] first; or, where the views have room for scales, by what just fits each row's
    largest magnitude, float32, which is kept there.
    """
    import torch

    dtype = views[name].dtype
    element = BUILT_IN[str(dtype).removeprefix("torch.")]
    x = x.float()
    if scale is not None:
        x = x / scale
    elif f"{name}_scale" in views:
        largest = x.abs().amax(-1)
        fitting = largest / largest.new_full((), element.largest)  # a tensor: torch multiplies with a number's inverse
        fitting = torch.where(fitting == 0, 1.0, fitting)
        views[f"{name}_scale"][where] = fitting
        x = x / fitting.unsqueeze(-1)
    views[name].view(torch.uint8)[where] = element.encode(x).view(torch.uint8)

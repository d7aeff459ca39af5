"""The cache layouts that most backends need: planes one after the other, with or without scales.

The views of a page are named as the planes are. Axes: B tokens of a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardpoint_plugin_api.cache import GROUP_SIZE, CacheLayout, CacheSpec, Region
from hardpoint_plugin_api.elements import BUILT_IN, FLOAT4_E2M1, FLOAT8_E4M3FN

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


class GroupScaledLayout(CacheLayout):
    """Planes of scaling ``group``, one after the other: the codes of a plane, then its scales. Bytes per token and head
    of size D: D / 2 + D / 16, of keys and of values.

    The view ``PLANE`` holds codes, uint8 [B, *shape[:-1], D / 2], two elements a byte, the first in the low bits. The
    view ``PLANE_scale`` holds float8_e4m3fn [B, *shape[:-1], D / 16], and follows the codes without a gap. Planes begin
    at multiples of 16 bytes. vLLM packs its ``nvfp4`` cache in as many bytes: ``head_size // 2 + head_size // 16``.
    """

    name = "plain_group_scaled"
    _plane_alignment = 16

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        """Raises ValueError for planes of another scaling, or whose last axis is no multiple of GROUP_SIZE."""
        regions: list[Region] = []
        end = 0
        for plane in spec.planes:
            shape = spec.page_shape(plane, block_size)
            if plane.scaling != "group" or shape[-1] % GROUP_SIZE:
                raise ValueError(
                    f"layout {self.name!r} stores planes of scaling 'group' whose last axis is a multiple of "
                    f"{GROUP_SIZE}; plane {plane.name!r} has scaling {plane.scaling!r} and shape {plane.shape}"
                )
            end = -(-end // self._plane_alignment) * self._plane_alignment
            for name, per_byte, dtype in (
                (plane.name, 2, "uint8"),
                (f"{plane.name}_scale", GROUP_SIZE, "float8_e4m3fn"),
            ):
                part = (*shape[:-1], shape[-1] // per_byte)
                regions.append(Region(name, end, math.prod(part), part, dtype))
                end += math.prod(part)
        return tuple(regions)

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """Numbers in float32, less the scale of a whole plane; the product of an element and a scale is exact."""
        import torch

        found = {}
        for name, view in views.items():
            if name.endswith("_scale") and name.removesuffix("_scale") in views:
                continue
            codes, scales = view[pages], views[f"{name}_scale"].view(torch.uint8)[pages]
            elements = FLOAT4_E2M1.decode(torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2), torch.float32)
            groups = elements.unflatten(-1, (-1, GROUP_SIZE)) * FLOAT8_E4M3FN.decode(scales, torch.float32)[..., None]
            found[name] = groups.flatten(-2)
        return found

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        """Values are rounded, as ``write_group_rounded`` rounds them."""
        for name, values in planes.items():
            write_group_rounded(views, name, (pages,), values, None)


def write_group_rounded(
    views: Mapping[str, torch.Tensor],
    name: str,
    where: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    """Round ``x`` [..., D] to the codes at ``views[name][where]`` and the scales beside them. Mutates the views.

    ``x`` is divided by ``scale`` [1], float32, first, where one is given. The scale of GROUP_SIZE neighbours is their
    largest magnitude over 6, the largest of e2m1, rounded to float8_e4m3fn, at most 448; 1 where that is zero. Elements
    are the numbers over their scale, rounded to the nearest of e2m1, ties to even codes. A NaN makes its group's scale
    NaN. NVIDIA describes this format in "Introducing NVFP4 for efficient and accurate low-precision inference" (2025).
    """
    import torch

    x = x.float()
    groups = (x if scale is None else x / scale).unflatten(-1, (-1, GROUP_SIZE))
    largest = groups.abs().amax(-1)
    fitting = FLOAT8_E4M3FN.encode(largest / largest.new_full((), FLOAT4_E2M1.largest))
    fitting = torch.where(fitting.float() == 0, torch.ones_like(largest), fitting.float())
    codes = FLOAT4_E2M1.encode(groups / fitting[..., None]).flatten(-2)
    views[name][where] = codes[..., ::2] | codes[..., 1::2] << 4
    views[f"{name}_scale"].view(torch.uint8)[where] = fitting.to(torch.float8_e4m3fn).view(torch.uint8)

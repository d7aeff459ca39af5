"""The attention family's truth over a cache of 8-bit elements, with scales from the checkpoint or for each token.

Axes: T tokens, K KV heads, D head size.
"""

from __future__ import annotations

import torch

from hardpoint.attention.reference import ReferenceAttention
from hardpoint.quantization.numerics import divided, largest, round_to
from hardpoint_plugin_api import CacheLayout, CacheSpec, Region, StoreCall

_SCALE = "float32"


class ScaledLayout(CacheLayout):
    """A page is its keys [block, K, D], its values, and, unless scales are static, a float32 scale [block, K] of each.

    Logical keys and values are numbers in float32, less the static scales where there are such.
    """

    name = "plain_scaled"

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        shape = (block_size, spec.num_kv_heads, spec.head_size)
        nbytes = block_size * spec.num_kv_heads * spec.head_size
        elements = tuple(Region(name, i * nbytes, nbytes, shape, spec.dtype) for i, name in enumerate(("k", "v")))
        if spec.static_scales:
            return elements
        start, size = -(-2 * nbytes // 4) * 4, block_size * spec.num_kv_heads * 4
        scales = (Region(f"{name}_scale", start + i * size, size, shape[:2], _SCALE) for i, name in enumerate("kv"))
        return (*elements, *scales)

    def to_logical(self, views: dict[str, torch.Tensor], pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def numbers(name: str) -> torch.Tensor:
            elements = views[name].view(torch.uint8)[pages].view(views[name].dtype).float()
            scale = views.get(f"{name}_scale")
            return elements if scale is None else elements * scale[pages].unsqueeze(-1)

        return numbers("k"), numbers("v")

    def from_logical(
        self, views: dict[str, torch.Tensor], pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Values that no scale maps to elements are rounded, as ``store`` rounds them."""
        for name, x in (("k", k), ("v", v)):
            write_rounded(views, name, (pages,), x, None)


def write_rounded(
    views: dict[str, torch.Tensor],
    name: str,
    where: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    """Round ``x`` [..., K, D] to elements at ``views[name][where]``.

    They are divided by ``scale`` [1] first; or, where the views have room for scales, by what just fits each token's
    head, float32, which is kept there.
    """
    dtype = views[name].dtype
    element = str(dtype).removeprefix("torch.")
    x = x.float()
    if scale is not None:
        x = x / scale
    elif f"{name}_scale" in views:
        fitting = divided(x.abs().amax(-1), largest(element))
        fitting = torch.where(fitting == 0, 1.0, fitting)
        views[f"{name}_scale"][where] = fitting
        x = x / fitting.unsqueeze(-1)
    views[name].view(torch.uint8)[where] = round_to(x, element).view(torch.uint8)


class QuantizedCacheAttention(ReferenceAttention):
    """The reference, for caches of 8-bit elements."""

    layout: CacheLayout = ScaledLayout()  # type: ignore[misc]  # a class variable, as the base has it

    def store(self, call: StoreCall) -> None:
        slots = call.slot_mapping.long()
        where = (slots // self.spec.block_size, slots % self.spec.block_size)
        for name, x, scale in zip("kv", (call.k, call.v), self.cache_scales, strict=True):
            write_rounded(call.cache, name, where, x, scale)

    def read(self, cache: dict[str, torch.Tensor], pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.layout.to_logical(cache, pages)
        k_scale, v_scale = self.cache_scales
        return keys if k_scale is None else keys * k_scale, values if v_scale is None else values * v_scale

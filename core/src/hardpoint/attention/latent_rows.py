"""A cache of latents in which each token's latent and rotated key are neighbours, as vendors' libraries read them.

Axes: P pages, B tokens of a page, L latent size, R rope size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hardpoint.dtypes import dtype_of
from hardpoint_plugin_api import CacheLayout, CacheSpec, Region


class LatentRows(CacheLayout):
    """A page is ``rows`` [B, L + R]: each token's latent, then its rotated key. ``latent`` and ``rope_key`` are views
    of its columns.
    """

    name = "latent_rows"
    alignment = 1152
    """Bytes of a row of 512 + 64 elements of 16 bits: such rows lie evenly over all pages, of whatever size."""

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        """See CacheLayout."""
        (latent, rope), dtype = (spec[name].numel for name in ("latent", "rope_key")), spec["latent"].dtype
        shape = block_size, latent + rope
        return (Region("rows", 0, shape[0] * shape[1] * dtype_of(dtype).itemsize, shape, dtype),)

    def views(
        self, buffer: torch.Tensor, pages: int, spec: CacheSpec, block_size: int, page_bytes: int | None = None
    ) -> dict[str, torch.Tensor]:
        """See CacheLayout; besides the region, both planes."""
        rows = super().views(buffer, pages, spec, block_size, page_bytes)["rows"]
        latent, rope_key = rows.split([spec["latent"].numel, spec["rope_key"].numel], dim=-1)
        return {"rows": rows, "latent": latent, "rope_key": rope_key}

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """See CacheLayout."""
        return {name: views[name][pages] for name in ("latent", "rope_key")}

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        """See CacheLayout."""
        for name in ("latent", "rope_key"):
            views[name][pages] = planes[name]


def tokens_in_place(rows: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Rows [P, B, n] of a cache as tokens [S, n], and how many of them lie between pages; None where none fits there.

    Token i of page p is number ``p * between + i``.
    """
    pages, block, size = rows.shape
    if rows.stride(0) % size:
        return None
    between = rows.stride(0) // size
    return rows.as_strided(((pages - 1) * between + block, size), (size, 1)), between

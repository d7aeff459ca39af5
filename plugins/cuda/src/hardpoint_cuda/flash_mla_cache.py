"""FlashMLA's cache of 8-bit latents: 656 bytes for a token, as its comments and ``tests/quant.py`` describe them.

512 elements float8_e4m3fn; four float32 scales, each for 128 of them; 64 rotated elements bfloat16. Scales are powers
of two: the kernels of sm_100 read their exponents alone, and those of sm_90 round them to bfloat16
(``csrc/sm100/decode/head64/kernel.cuh``, ``csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh``).

Axes: P pages, B tokens of a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hardpoint_cuda.flash_mla_library import LATENT_SIZE, ROPE_SIZE
from hardpoint_plugin_api import CacheLayout, CacheSpec, Region

_GROUP = 128
_GROUPS = LATENT_SIZE // _GROUP
_SCALES_AT = LATENT_SIZE
_ROPE_AT = LATENT_SIZE + 4 * _GROUPS
TOKEN_BYTES = _ROPE_AT + 2 * ROPE_SIZE
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST_EXPONENT = -126


class FlashMlaRows(CacheLayout):
    """A page is ``rows`` uint8 [B, 656]. ``latent`` [B, 512], ``latent_scale`` [B, 4] and ``rope_key`` [B, 64] are
    views of its columns. A latent has four scales, where its plane's scaling is ``row``.
    """

    name = "flash_mla_rows"
    alignment = math.lcm(64, TOKEN_BYTES)
    """The kernels of sm_100 read pages whose distance is a multiple of tokens."""

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        """See CacheLayout."""
        return (Region("rows", 0, block_size * TOKEN_BYTES, (block_size, TOKEN_BYTES), "uint8"),)

    def views(
        self, buffer: torch.Tensor, pages: int, spec: CacheSpec, block_size: int, page_bytes: int | None = None
    ) -> dict[str, torch.Tensor]:
        """See CacheLayout; besides the region, what its columns are."""
        rows = super().views(buffer, pages, spec, block_size, page_bytes)["rows"]
        return {
            "rows": rows,
            "latent": rows[..., :LATENT_SIZE].view(torch.float8_e4m3fn),
            "latent_scale": rows[..., _SCALES_AT:_ROPE_AT].view(torch.float32),
            "rope_key": rows[..., _ROPE_AT:].view(torch.bfloat16),
        }

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """See CacheLayout."""
        rows = views["rows"][pages]
        elements = rows[..., :LATENT_SIZE].contiguous().view(torch.float8_e4m3fn).float()
        scales = rows[..., _SCALES_AT:_ROPE_AT].contiguous().view(torch.float32)
        latent = elements.unflatten(-1, (_GROUPS, _GROUP)) * scales.unsqueeze(-1)
        return {"latent": latent.flatten(-2), "rope_key": rows[..., _ROPE_AT:].contiguous().view(torch.bfloat16)}

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        """See CacheLayout."""
        views["rows"][pages] = token_bytes(planes["latent"], planes["rope_key"])


def token_bytes(latent: torch.Tensor, rope_key: torch.Tensor) -> torch.Tensor:
    """The bytes of tokens, uint8 [..., 656], of latents [..., 512] and rotated keys [..., 64]."""
    groups = latent.float().unflatten(-1, (_GROUPS, _GROUP))
    needed = groups.abs().amax(-1) / _LARGEST
    exponent = needed.log2().ceil()
    # A logarithm may be rounded to the whole number below.
    exponent = torch.where(torch.exp2(exponent) < needed, exponent + 1, exponent).clamp(min=_LEAST_EXPONENT)
    scales = torch.exp2(exponent)
    elements = (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)
    parts = elements, scales, rope_key.to(torch.bfloat16).contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)

"""The truth of latent attention: paged, with plain torch ops, one request at a time, in float32 or wider.

Axes: T tokens, H query heads, L latent size, R rope size, S cached tokens of one request.
"""

from __future__ import annotations

import torch

from hardpoint.reference.attention import query_parts
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionMetadata,
    CacheLayout,
    LatentBackend,
    LatentCall,
    LatentStoreCall,
    PlainLayout,
)


class ReferenceLatentAttention(LatentBackend):
    """Correct for every size and dtype; fast for none."""

    layout: CacheLayout = PlainLayout()  # type: ignore[misc]  # a class variable, as the base has it

    def store(self, call: LatentStoreCall) -> None:
        slots, block = call.slot_mapping.long(), self.spec.block_size
        pages, offsets = slots // block, slots % block
        for name, x in (("latent", call.latent), ("rope_key", call.rope_key)):
            view = call.cache[name]
            view[pages, offsets] = x.to(view.dtype)

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        return AttentionMetadata(batch)

    def forward(self, call: LatentCall) -> None:
        batch, block = call.metadata.batch, self.spec.block_size
        for i, seq_len in enumerate(batch.seq_lens_host):
            rows = slice(batch.query_start_host[i], batch.query_start_host[i + 1])
            pages = batch.block_table[i, : -(-seq_len // block)].long()
            planes = self.layout.to_logical(call.cache, pages)
            latent, rope_key = (planes[name].flatten(0, 1) for name in ("latent", "rope_key"))
            q_latent, q_rope, out = call.q_latent[rows], call.q_rope[rows], call.out[rows]
            for part, keys in query_parts(rows.stop - rows.start, seq_len, q_latent.shape[1]):
                listed = None if call.indices is None else call.indices[rows][part]
                keys_read = latent[:keys], rope_key[:keys]
                out[part] = attend_latent(q_latent[part], q_rope[part], *keys_read, self.spec.scale, listed)


def attend_latent(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    scale: float,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Latent attention of one request's newest queries (arXiv:2405.04434, section 2.1, in its absorbed form).

    latent [S, L] and rope_key [S, R] are those of all positions; q_latent [T, H, L] and q_rope [T, H, R] are the last
    T of them. ``indices`` int [T, K]: each reads these positions alone, -1 for none. Returns [T, H, L] in q_latent's
    dtype.
    """
    wide = torch.promote_types(q_latent.dtype, torch.float32)
    latent, rope_key = latent.to(wide), rope_key.to(wide)
    scores = torch.einsum("thl,sl->hts", q_latent.to(wide), latent)
    scores = (scores + torch.einsum("thr,sr->hts", q_rope.to(wide), rope_key)) * scale
    positions = torch.arange(latent.shape[0], device=latent.device)
    hidden = positions > positions[latent.shape[0] - q_latent.shape[0] :, None]
    if indices is not None:
        listed = torch.zeros(len(indices), latent.shape[0] + 1, dtype=torch.bool, device=latent.device)
        hidden = hidden | ~listed.scatter_(1, indices.long() + 1, True)[:, 1:]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hts,sl->thl", weights, latent).to(q_latent.dtype)

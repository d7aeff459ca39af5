"""Reference latent attention whose results do not depend on other requests, on prompt chunks, or on the prefix cache.

Queries are computed in tiles of 16 positions, which look alike in every step, as in batch_invariant_attention.py.

Axes: T tokens, H query heads, L latent size, R rope size, S cached tokens of one request, K positions of a list.
"""

from __future__ import annotations

import torch

from hardpoint.reference.batch_invariant_attention import TILE_QUERIES, placed
from hardpoint.reference.latent_attention import ReferenceLatentAttention, attend_latent
from hardpoint.reference.quantized_latent_attention import QuantizedLatentAttention
from hardpoint_plugin_api import LatentCall


class BatchInvariantLatentAttention(ReferenceLatentAttention):
    """See the top of this file."""

    def forward(self, call: LatentCall) -> None:
        batch, block = call.metadata.batch, self.spec.block_size
        for i, seq_len in enumerate(batch.seq_lens_host):
            rows = slice(batch.query_start_host[i], batch.query_start_host[i + 1])
            pages = batch.block_table[i, : -(-seq_len // block)].long()
            planes = self.layout.to_logical(call.cache, pages)
            latent, rope_key = (planes[name].flatten(0, 1)[:seq_len] for name in ("latent", "rope_key"))
            listed = None if call.indices is None else call.indices[rows]
            call.out[rows] = self._request(call.q_latent[rows], call.q_rope[rows], latent, rope_key, listed)

    def _request(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        rope_key: torch.Tensor,
        listed: torch.Tensor | None,
    ) -> torch.Tensor:
        """Queries [T, H, ...] are those of the last of all positions, whose latents and keys [S, ...] are given."""
        end = latent.shape[0]
        begin = end - q_latent.shape[0]
        results = []
        for tile in range(begin - begin % TILE_QUERIES, end, TILE_QUERIES):
            low, high = max(tile, begin), min(tile + TILE_QUERIES, end)
            of_tile, read = slice(low - begin, high - begin), tile + TILE_QUERIES
            of_latents, of_keys = (placed(q[of_tile], low - tile, TILE_QUERIES) for q in (q_latent, q_rope))
            latents, rope_keys = (placed(x[:high], 0, read) for x in (latent, rope_key))
            lists = None
            if listed is not None:
                # Rows without a query list the first position, since a row that reads nothing has no result.
                lists = listed.new_zeros(TILE_QUERIES, listed.shape[1])
                lists[low - tile : high - tile] = listed[of_tile]
            y = attend_latent(of_latents, of_keys, latents, rope_keys, self.spec.scale, lists)
            results.append(y[low - tile : high - tile])
        return torch.cat(results)


class BatchInvariantQuantizedLatentAttention(BatchInvariantLatentAttention, QuantizedLatentAttention):
    """The same over latents of 8 bits: the scale of each depends on that latent alone."""

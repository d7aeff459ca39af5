"""Reference attention whose results do not depend on other requests, on prompt chunks, or on the prefix cache.

Queries are computed in tiles of 16 positions. The query at position p is row p % 16 of the tile that starts at
p - p % 16. A tile's keys run from the oldest key that its first query reads to the tile's end. Missing rows and keys
are zeros. Masked keys have weight 0. So a tile's tensors have the same shapes in every step. A deterministic kernel
then gives the same result. No row of a matmul or softmax depends on another row.

Axes: H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import torch

from hardpoint.reference.attention import ReferenceAttention, attend, read_blocks
from hardpoint_plugin_api import AttentionCall

TILE_QUERIES = 16


class BatchInvariantAttention(ReferenceAttention):
    """See the top of this file."""

    def forward(self, call: AttentionCall) -> None:
        batch = call.metadata.batch
        for i, seq_len in enumerate(batch.seq_lens_host):
            first, last = batch.query_start_host[i], batch.query_start_host[i + 1]
            pages, start = read_blocks(batch, i, self.spec)
            keys, values = (x.flatten(0, 1)[: seq_len - start] for x in self.read(call.cache, pages))
            call.out[first:last] = self._request(call.q[first:last], keys, values, start)

    def _request(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
        """q [T, H, D] are the last of the positions from ``start`` on, whose keys and values [S, K, D] are given."""
        end = start + keys.shape[0]
        begin = end - q.shape[0]
        results = []
        for tile in range(begin - begin % TILE_QUERIES, end, TILE_QUERIES):
            tile_end, oldest = tile + TILE_QUERIES, self.spec.span.first(tile)
            low, high = max(tile, begin), min(tile_end, end)  # the positions of this tile whose queries are here
            read = self.spec.span.first(low)
            queries = placed(q[low - begin : high - begin], low - tile, TILE_QUERIES)
            tile_keys, tile_values = (
                placed(x[read - start : high - start], read - oldest, tile_end - oldest) for x in (keys, values)
            )
            y = attend(queries, tile_keys, tile_values, self.spec, self.sinks, self.alibi_slopes, oldest)
            results.append(y[low - tile : high - tile])
        return torch.cat(results)


def placed(x: torch.Tensor, at: int, size: int) -> torch.Tensor:
    """Zeros [size, ...] with ``x`` from row ``at`` on."""
    rows = x.new_zeros(size, *x.shape[1:])
    rows[at : at + x.shape[0]] = x
    return rows

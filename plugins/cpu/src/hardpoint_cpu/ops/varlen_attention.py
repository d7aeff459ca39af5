"""Attention over keys and values side by side, through torch's fused kernel for CPUs, which also returns sums.

The kernel takes values as large as keys: the smaller of both are padded with zeros. All is computed in float32: with
numbers of 16 bits the kernel approximates exponentials to 20 bits, and sums err by 5e-5.

Axes: T queries, S keys, H heads, D size of a key, V size of a value.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import pad

Starts = tuple[int, ...]


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    *,
    query_starts: Starts,
    key_starts: Starts,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op. Each request is a call."""
    tokens, heads, size = q.shape
    value_size, wide = v.shape[2], max(size, v.shape[2])
    out = q.new_empty(tokens, heads, value_size)
    sums = q.new_empty(tokens, heads, dtype=torch.float32)
    q, k, v = (pad(x.float(), (0, wide - x.shape[2])) for x in (q, k, v))
    for (first, last), (begin, end) in zip(pairwise(query_starts), pairwise(key_starts), strict=True):
        if first == last:
            continue
        if begin == end:
            out[first:last], sums[first:last] = 0, float("-inf")
            continue
        parts = (x.transpose(0, 1)[None] for x in (q[first:last], k[begin:end], v[begin:end]))
        result, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, causal, scale=scale)
        out[first:last] = result[0].transpose(0, 1)[..., :value_size]
        sums[first:last] = total[0].transpose(0, 1)
    return out, sums

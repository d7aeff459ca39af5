"""AITER's kernels for the indexer of sparse attention (DeepSeek-V3.2, GLM-5). None of this ran on hardware.

Axes: T tokens, N requests, H index heads, D index head size, S positions of a block table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hardpoint.context import Context
from hardpoint.layers.sparse_indexer import SparseIndexer
from hardpoint.ops.quantize_rows import quantize_rows
from hardpoint.ops.store_index_keys import Cache
from hardpoint_plugin_api import ConfigError, DeviceInfo, LayerWorkload, QuantSpec, Reason, Scale, SparseIndexerArgs
from hardpoint_plugin_api.elements import BUILT_IN
from hardpoint_rocm.aiter_library import function, reasons_against

LOGITS = "ops.triton.attention.fp8_mqa_logits.fp8_mqa_logits"
_HEAD_SIZES = (64, 128)
_LEAST_HEADS = 32
"""AITER tries its kernel with 32 and 64 heads (op_tests/triton_tests/attention/test_fp8_mqa_logits.py)."""
_MOST_LOGITS = 1 << 24
"""Logits that exist at a time: AITER makes one for each position of every request of a step."""


def topk_positions(scores: torch.Tensor, positions: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """See core's op. Raises PlatformError where AITER's function takes other arguments.

    ``top_k_per_row_prefill`` with ``stable`` lists positions in rising order, and the lower of two with equal bits. So
    scores are copied first, with one zero and one NaN.
    """
    out = torch.empty(scores.shape[0], top_k, dtype=torch.int32, device=scores.device)
    if not scores.shape[0]:
        return out
    keys = (scores + 0.0).masked_fill_(scores.isnan(), float("nan"))  # -0 + 0 is 0
    ends = (positions + 1).to(torch.int32)
    function("top_k_per_row_prefill")(
        logits=keys,
        rowStarts=torch.zeros_like(ends),
        rowEnds=ends,
        indices=out,
        values=None,
        numRows=keys.shape[0],
        stride0=keys.stride(0),
        stride1=1,
        k=top_k,
        stable=True,
    )
    return out


class AiterSparseIndexer(SparseIndexer):
    """Core's layer with scores by ``fp8_mqa_logits``, for index keys of 8 bits.

    That function takes 8-bit queries alone, with a scale for each token and head, as DeepSeek's own code has them
    (inference/model.py of DeepSeek-V3.2-Exp). So lists may differ from core's where scores are close.
    """

    @classmethod
    def supports(cls, workload: LayerWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse heads that AITER's kernel was not written for, and an AITER that has the function otherwise."""
        found, args = reasons_against(LOGITS), workload.args
        if isinstance(args, SparseIndexerArgs) and args.head_size not in _HEAD_SIZES:
            sizes = " or ".join(map(str, _HEAD_SIZES))
            found.append(Reason("head-size", "index heads", wanted=str(args.head_size), supported=sizes))
        return found

    def scores(self, ctx: Context, layout: str) -> Callable[..., torch.Tensor]:
        """See SparseIndexer. Raises ConfigError for index keys without scales."""
        if ctx.kv_dtype not in BUILT_IN:
            raise ConfigError(
                f"{ctx.path}: AITER's indexer reads index keys of 8 bits, and the cache is {ctx.kv_dtype}; set "
                "--kv-cache-dtype fp8, or leave out --use layer.sparse_indexer=aiter_indexer"
            )
        spec = QuantSpec(ctx.kv_dtype, scales=(Scale("float32", (1, -1)),), static=False)
        quantize = quantize_rows.bind(ctx, spec=spec)

        def score(
            q: torch.Tensor,
            weights: torch.Tensor,
            cache: Cache,
            block_table: torch.Tensor,
            query_start: torch.Tensor,
            positions: torch.Tensor,
        ) -> torch.Tensor:
            codes, scales = quantize(q.flatten(0, 1), spec=spec)
            weights = weights * scales.view(weights.shape)
            return index_logits(codes.view(q.shape), weights, cache, block_table, query_start, positions)

        return score


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See core's op ``index_scores``: the same for q [T, H, D] of 8 bits, and keys of one scale each.

    The keys of the step's requests are copied, since AITER's kernel knows no pages. Heads that it does not take are
    filled up with zeros, whose scores are zero.
    """
    keys, scales = cache["index_key"], cache["index_key_scale"]
    tokens, heads, size = q.shape
    requests, places = block_table.shape[0], block_table.shape[1] * keys.shape[1]
    out = torch.empty(tokens, places, dtype=torch.float32, device=q.device)
    if not tokens or not places:
        return out
    pages = block_table.flatten().long()
    copied = keys.view(torch.uint8)[pages].view(keys.dtype).view(-1, size)
    own_scales = scales[pages].flatten()
    taken = max(_LEAST_HEADS, 1 << (heads - 1).bit_length())
    if taken > heads:
        q = torch.nn.functional.pad(q.view(torch.uint8), (0, 0, 0, taken - heads)).view(q.dtype)
        weights = torch.nn.functional.pad(weights, (0, taken - heads))
    numbers = torch.arange(tokens, dtype=query_start.dtype, device=q.device)
    request = (torch.searchsorted(query_start, numbers, right=True) - 1).clamp_(max=requests - 1)
    starts = (request * places).to(torch.int32)
    ends = starts + positions.to(torch.int32) + 1
    few = max(1, _MOST_LOGITS // (requests * places))
    for first in range(0, tokens, few):
        rows = slice(first, first + few)
        logits = function(LOGITS)(
            Q=q[rows].contiguous(),
            KV=copied,
            kv_scales=own_scales,
            weights=weights[rows].contiguous(),
            cu_starts=starts[rows],
            cu_ends=ends[rows],
            clean_logits=True,
        )
        apart = logits.unflatten(1, (requests, places))
        out[rows] = apart[torch.arange(apart.shape[0], device=q.device), request[rows]]
    return out

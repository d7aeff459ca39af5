"""How much each cached position matters to each query of sparse attention, by its index key.

Axes: T tokens, N requests, H index heads, D index head size, G groups of D, S positions of a block table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.store_index_keys import Cache, random_index_cache, store_index_keys
from hardpoint_plugin_api import NULL_PAGE

_ERRORS = ErrorModel(scale="row", finest=2.0**-18)
"""Heads with weights of both signs cancel, and a row may have one score: then nothing in it shows how large terms were.
"""
_TILE_KEYS = 256
"""Positions of a tile, of which all have one shape."""
_MOST_GATHERED = 1 << 24
"""Elements of gathered keys that exist at a time."""


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(
        name: str,
        pieces: Sequence[tuple[int, int]],
        heads: int = 4,
        size: int = 32,
        block: int = 16,
        scaled: bool = False,
        unused: int = 0,
    ) -> Case:
        """``pieces``: of each request, its queries and all its positions. ``unused`` rows of the table follow."""
        widths = [-(-total // block) for _, total in pieces]
        pages = sum(widths) + 2
        cache = random_index_cache(draw, pages, block, size, scaled)
        free = (draw.distinct(NULL_PAGE + 2, pages, pages - 2)).tolist()
        table = torch.full((len(pieces) + unused, max(widths, default=1) + 1), NULL_PAGE + 1, dtype=torch.int32)
        starts, positions = [0], list[int]()
        for row, (queries, total), width in zip(table, pieces, widths, strict=False):
            own, free = free[:width], free[width:]
            row[:width] = torch.tensor(own)
            at = torch.arange(total)
            slots = (row[at // block] * block + at % block).to(device)
            store_index_keys.reference(draw.normal(total, size), cache, slots)
            starts.append(starts[-1] + queries)
            positions += range(total - queries, total)
        starts += [starts[-1]] * unused
        tokens = len(positions)
        q, weights = draw.normal(tokens, heads, size), draw.normal(tokens, heads).float()
        arrays = (table, torch.tensor(starts, dtype=torch.int32), torch.tensor(positions, dtype=torch.int64))
        args = (q, weights, cache, *(x.to(device) for x in arrays))
        return Case(name, args, {}, {"layout": "plain_scaled" if scaled else "plain", "head_size": size})

    decodes, prompts = [(1, 1), (1, 16), (1, 17), (1, 50)], [(5, 5), (16, 32), (7, 40)]
    for scaled in (False, True):
        suffix = "_scaled" if scaled else ""
        yield case("decodes" + suffix, decodes, size=128, scaled=scaled)
        yield case("prompts" + suffix, prompts, heads=5, scaled=scaled)
        yield case("mixed" + suffix, decodes + prompts, heads=3, size=33, block=5, scaled=scaled)
        yield case("groups" + suffix, [(3, 20), (1, 9)], heads=2, size=256, scaled=scaled)
    yield case("one_head", [(1, 3), (2, 2)], heads=1, size=8)
    yield case("many_heads", [(1, 70), (9, 30)], heads=64, size=128)
    yield case("padded", [(1, 1), (4, 21)], unused=3)
    yield case("long", [(1, 700), (2, 300)], size=16)
    yield case("one_token_pages", [(1, 7), (3, 9)], block=1)
    yield case("empty", [])


def _allocate(
    q: torch.Tensor, weights: torch.Tensor, cache: Cache, block_table: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    return weights.new_empty(q.shape[0], block_table.shape[1] * cache["index_key"].shape[1])


@custom_op(cases=_cases, errors=_ERRORS, allocate=_allocate, has_rows=False)
def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Score each position s that a query reads: the sum over heads of ``weights * relu(q . key_s)``, [T, S] (DeepSeek-
    V3.2, arXiv:2512.02556, equation 1).

    q [T, H, D]; ``weights`` float32 [T, H], as results are; ``cache`` as store_index_keys writes it. ``block_table``
    int32 [N, S / block] and ``query_start`` int32 [N + 1] are as in AttentionBatch; a query's request is the last that
    starts at or before it. ``positions`` int64 [T]: a query reads up to its own; scores behind it are -inf. Computed in
    float32 or wider.
    """
    keys, scales = cache["index_key"], cache.get("index_key_scale")
    block, size, tokens = keys.shape[1], q.shape[-1], q.shape[0]
    wide = torch.promote_types(weights.dtype, torch.float32)
    numbers = torch.arange(tokens, dtype=query_start.dtype, device=q.device)
    requests = torch.searchsorted(query_start, numbers, right=True) - 1
    requests = requests.clamp(max=block_table.shape[0] - 1)
    at = torch.arange(block_table.shape[1] * block, device=q.device)
    out = weights.new_empty(tokens, len(at), dtype=wide)
    few = max(1, _MOST_GATHERED // max(1, len(at) * size))
    for first in range(0, tokens, few):
        rows = slice(first, first + few)
        pages = block_table[requests[rows]].long()
        found = keys.view(torch.uint8)[pages].view(keys.dtype) if keys.element_size() == 1 else keys[pages]
        found = found.to(wide) if scales is None else found.to(wide) * scales[pages].unsqueeze(-1)
        dots = torch.einsum("thd,tsd->ths", q[rows].to(wide), found.reshape(len(pages), -1, size))
        scores = torch.einsum("th,ths->ts", weights[rows], dots.relu())
        out[rows] = scores.masked_fill(at > positions[rows, None], float("-inf"))
    return out


def row_by_row(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """``index_scores``, each token alone, over tiles of positions that have one shape, whatever the table's width."""
    keys, scales = cache["index_key"], cache.get("index_key_scale")
    block, size, tokens = keys.shape[1], q.shape[-1], q.shape[0]
    wide = torch.promote_types(weights.dtype, torch.float32)
    numbers = torch.arange(tokens, dtype=query_start.dtype, device=q.device)
    requests = (torch.searchsorted(query_start, numbers, right=True) - 1).clamp(max=block_table.shape[0] - 1)
    places = block_table.shape[1] * block
    out = weights.new_empty(tokens, places, dtype=wide)
    for token in range(tokens):
        pages = block_table[requests[token : token + 1]][0].long()
        query, own_weights = q[token].to(wide).contiguous(), weights[token].to(wide).contiguous()
        for begin in range(0, places, _TILE_KEYS):
            at = torch.arange(begin, begin + _TILE_KEYS, device=q.device)
            where = pages[at.clamp(max=places - 1) // block], at % block
            found = keys.view(torch.uint8)[where].view(keys.dtype) if keys.element_size() == 1 else keys[where]
            found = found.to(wide) if scales is None else found.to(wide) * scales[where].unsqueeze(-1)
            scores = (found.reshape(_TILE_KEYS, size) @ query.T).relu() @ own_weights
            scores = scores.masked_fill(at > positions[token : token + 1], float("-inf"))
            out[token, begin : begin + _TILE_KEYS] = scores[: places - begin]
    return out

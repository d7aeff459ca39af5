"""Which queries and which keys a program of an attention kernel takes, found in the batch's own arrays.

Decodes: contexts are cut into splits, see attention_decode.py. Requests with several queries: their rows, each a query
of one of the heads that share keys, are cut into tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.attention_tile import num_read


@triton.jit
def find_split(
    place,
    seq_lens,
    num_requests,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The request and the positions of a place in the grid of a decode kernel.

    Returns the request (-1 where nothing falls to the place), the range of its positions (none where the place is a
    whole request's that is split), its number of splits (0: it stays whole), the place among splits, and the place of
    the request's first split.
    """
    tokens = 0
    for start in range(0, num_requests, SCAN):
        numbers = start + tl.arange(0, SCAN)
        lengths = tl.load(seq_lens + numbers, mask=numbers < num_requests, other=0)
        tokens += tl.sum(num_read(lengths, WINDOW, CHUNK))
    chunk = tl.maximum(MIN_CHUNK, tl.cdiv(tokens, SPLITS))

    is_split = place >= num_requests
    request = place
    first_place = place * 0
    if is_split:
        place -= num_requests
        request = place * 0 - 1
        taken = place * 0
        for start in range(0, num_requests, SCAN):
            numbers = start + tl.arange(0, SCAN)
            lengths = tl.load(seq_lens + numbers, mask=numbers < num_requests, other=0)
            counts = num_splits(num_read(lengths, WINDOW, CHUNK), chunk, MOST_SPLITS, BLOCK_N)
            ends = taken + tl.cumsum(counts, 0)
            here = (place < ends) & (place >= ends - counts)
            request = tl.maximum(request, tl.max(tl.where(here, numbers, -1)))
            first_place = tl.maximum(first_place, tl.max(tl.where(here, ends - counts, 0)))
            taken += tl.sum(counts)

    seq_len = tl.load(seq_lens + request, mask=request >= 0, other=0)
    count = num_read(seq_len, WINDOW, CHUNK)
    splits = num_splits(count, chunk, MOST_SPLITS, BLOCK_N)
    begin = seq_len - count
    end = seq_len
    if is_split:
        length = _split_length(count, tl.maximum(splits, 1), BLOCK_N)
        begin += (place - first_place) * length
        end = tl.minimum(begin + length, seq_len)
    elif splits > 0:
        end = begin
    return request, begin, end, splits, place, first_place


@triton.jit
def find_tile(
    place,
    query_start,
    first_request,
    num_requests,
    GROUP: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The request of a place in the grid of a prefill kernel, -1 where nothing falls to it, and its tile of rows."""
    request = place * 0 - 1
    tile = place * 0
    taken = place * 0
    for start in range(first_request, num_requests, SCAN):
        numbers = start + tl.arange(0, SCAN)
        there = numbers < num_requests
        starts = tl.load(query_start + numbers, mask=there, other=0)
        counts = tl.cdiv((tl.load(query_start + numbers + 1, mask=there, other=0) - starts) * GROUP, BLOCK_M)
        ends = taken + tl.cumsum(counts, 0)
        here = (place < ends) & (place >= ends - counts)
        request = tl.maximum(request, tl.max(tl.where(here, numbers, -1)))
        tile = tl.maximum(tile, tl.max(tl.where(here, place - (ends - counts), 0)))
        taken += tl.sum(counts)
    return request, tile


@triton.jit
def num_splits(count, chunk, MOST_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Into how many splits ``count`` tokens are cut; 0: they stay whole. No split is empty."""
    splits = tl.minimum(count // chunk, MOST_SPLITS)
    length = _split_length(count, tl.maximum(splits, 1), BLOCK_N)
    return tl.where(splits > 1, tl.cdiv(count, tl.maximum(length, 1)), 0)


@triton.jit
def _split_length(count, splits, BLOCK_N: tl.constexpr):
    """Tokens of each split but the last, in whole tiles. Rounding makes fewer of them, for which it gives the same."""
    return tl.cdiv(tl.cdiv(count, splits), BLOCK_N) * BLOCK_N

"""Attention over keys and values that lie side by side instead of in a cache's pages, and the merge of two results.

A prompt's keys may be attended to in parts: ``varlen_attention`` of each part, joined by ``merge_attention``.

Axes: N requests, T queries, S keys, H heads, D size of a key, V size of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel

_ERRORS = ErrorModel(scale="row", finest=2.0**-18)
_MOST_SCORES = 1 << 24
"""Scores that the reference holds at a time."""
Starts = tuple[int, ...]


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(
        name: str,
        pieces: Sequence[tuple[int, int]],
        sizes: tuple[int, int] = (24, 16),
        heads: int = 3,
        *,
        causal: bool = False,
        spread: float = 1.0,
        shift: float = 0.0,
    ) -> Case:
        """``pieces``: queries and keys of each request. Keys and values are slices of rows that hold both."""
        size, value_size = sizes
        starts = [(0, *accumulate(counts)) for counts in zip(*pieces, strict=True)] if pieces else [(0,), (0,)]
        both = draw.normal(starts[1][-1], heads, size + value_size)
        q, (k, v) = draw.normal(starts[0][-1], heads, size) * spread, both.split([size, value_size], dim=-1)
        if shift:  # one element of each query and key moves all scores
            q[..., 0], k = shift, torch.cat([torch.full_like(k[..., :1], -shift), k[..., 1:]], dim=-1)
        arrays = [torch.tensor(x, dtype=torch.int32, device=device) for x in starts]
        kwargs = {"query_starts": starts[0], "key_starts": starts[1], "scale": size**-0.5, "causal": causal}
        return Case(name, (q, k, v, *arrays), kwargs, {"head_size": size})

    alike = [(5, 5), (1, 1), (40, 40), (130, 130)]
    yield case("prompts", alike, causal=True)
    yield case("context", [(5, 9), (1, 70), (40, 3), (33, 130)])
    yield case("one", [(1, 1)], causal=True)
    yield case("deepseek", [(70, 70), (9, 9)], (192, 128), 2, causal=True)
    yield case("deepseek_context", [(33, 90), (64, 64)], (192, 128), 2)
    yield case("narrow_values", [(20, 20), (70, 70)], (96, 32), 2, causal=True)
    yield case("narrow_values_context", [(64, 100), (9, 70)], (76, 10), 4)
    yield case("odd", [(17, 17), (31, 31)], (11, 7), 5, causal=True)
    yield case("odd_context", [(17, 5), (3, 77)], (11, 7), 5)
    yield case("wide_values", [(20, 33)], (8, 32), 2)
    yield case("without_keys", [(3, 0), (4, 20), (2, 0)])
    yield case("without_queries", [(0, 6), (7, 40), (0, 3)])
    yield case("peaked", [(40, 200)], spread=20.0)
    yield case("low", [(9, 9), (20, 20)], shift=60.0, causal=True)
    yield case("low_context", [(9, 40)], shift=60.0)
    yield case("long", [(3, 1500), (300, 300)], (16, 16), 1)
    nan = case("nan", [(6, 20), (5, 9)])
    nan.args[2][25, 1, 2] = float("nan")
    yield nan
    yield case("empty", [])


def _allocate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor, **scalars: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)


@custom_op(cases=_cases, errors=_ERRORS, allocate=_allocate, has_rows=False, static=["scale", "causal"])
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
    """Softmax of ``scale * q k``, times v, of each request by itself: q [T, H, D], k [S, H, D] and v [S, H, V] ->
    [T, H, V] in q's dtype, and the logarithm of the sum of exponentials (base e), float32 [T, H].

    ``query_start`` and ``key_start`` int32 [N + 1] say where a request's queries and keys begin; ``query_starts`` and
    ``key_starts`` are the same on the host. With ``causal``, a request has as many keys as queries, and each query
    reads the keys up to its own. A query without keys has zeros and -inf. A NaN among the values that any query of a
    request reads may reach its other queries, never those of other requests. Elements of a head lie one by one.
    Computed in float32 or wider.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out, sums = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full(q.shape[:2], float("-inf"), dtype=wide)
    for i in range(len(query_starts) - 1):
        first, last = query_starts[i : i + 2]
        keys, values = (x[key_starts[i] : key_starts[i + 1]].to(wide) for x in (k, v))
        few = max(1, _MOST_SCORES // max(1, len(keys) * q.shape[1]))
        for begin in range(first, last if len(keys) else first, few):
            rows = slice(begin, min(begin + few, last))
            scores = torch.einsum("thd,shd->ths", q[rows].to(wide), keys) * scale
            if causal:
                own = torch.arange(rows.start - first, rows.stop - first, device=q.device)
                hidden = torch.arange(len(keys), device=q.device) > own[:, None]
                scores = scores.masked_fill(hidden[:, None], float("-inf"))
            sums[rows] = scores.logsumexp(dim=-1)
            out[rows] = torch.einsum("ths,shv->thv", scores.softmax(dim=-1), values).to(out.dtype)
    return out, sums


def _merge_cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, tokens: int, heads: int, size: int, spread: float = 2.0, shift: float = 0.0) -> Case:
        results = [draw.normal(tokens, heads, size) for _ in range(2)]
        sums = [draw.normal(tokens, heads).float() * spread + shift for _ in range(2)]
        return Case(name, (results[0], sums[0], results[1], sums[1]))

    yield case("random", 9, 3, 24)
    yield case("wide", 70, 2, 128)
    yield case("odd", 5, 7, 9)
    yield case("far_apart", 20, 4, 32, spread=60.0)
    yield case("low", 6, 4, 16, shift=-3000.0)
    yield case("high", 6, 4, 16, shift=3000.0)
    out, sums, other, other_sums = (nothing := case("without_keys", 8, 2, 16)).args
    for number, (result, total) in enumerate([(out, sums), (other, other_sums)]):
        rows = torch.arange(8, device=device) % 4 < 2 if number else torch.arange(8, device=device) % 2 == 0
        result[rows], total[rows] = 0, float("-inf")
    yield nothing
    yield case("empty", 0, 2, 8)


@custom_op(cases=_merge_cases, errors=_ERRORS, mutates=["out", "sums"])
def merge_attention(out: torch.Tensor, sums: torch.Tensor, other: torch.Tensor, other_sums: torch.Tensor) -> None:
    """Make of two results of attention, over different keys, the result over all of them; written to the first.

    ``out`` and ``other`` [T, H, V], ``sums`` and ``other_sums`` float32 [T, H]: results of varlen_attention. Rows of
    which both are without keys stay so. Computed in float32 or wider.
    """
    wide = torch.promote_types(out.dtype, torch.float32)
    largest = torch.maximum(sums, other_sums)
    largest = largest.masked_fill(largest == float("-inf"), 0)
    mine, theirs = (sums - largest).exp(), (other_sums - largest).exp()
    total = mine + theirs
    first, second = (x.div(total.where(total > 0, 1)).unsqueeze(-1).to(wide) for x in (mine, theirs))
    out.copy_(out.to(wide) * first + other.to(wide) * second)
    sums.copy_(total.log() + largest)

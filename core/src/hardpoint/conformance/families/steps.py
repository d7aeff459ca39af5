"""Made-up steps of paged attention: ragged, chunked, mixed and speculative batches over a cache full of garbage.

Axes: T tokens of the step, S positions of one request, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hardpoint.conformance.families.scaled_cache import element_bytes, is_scaled, spread
from hardpoint.conformance.memory import POISON, Placement, empty, far_pages, place, place_far
from hardpoint.dtypes import dtype_of
from hardpoint.ops.judge import Expectation
from hardpoint.reference.attention import attend, attention_weights
from hardpoint_plugin_api import (
    NULL_PAGE,
    NVFP4,
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CacheLayout,
    CacheSpec,
    Span,
    StoreCall,
)

_EVALUATIONS = 8
_FEW_KEYS = 256
"""Roundings of this many weights average out."""
_MAGNITUDES = (1.0, 2.0**8, 0.0, 2.0**-8)
"""Factors for the values of requests where these are uneven."""
HIGH_SCORE = 100.0
"""Float32 exponentials overflow at 88.7."""
LOW_SCORES = (-430.0, -12_000.0)
"""In turn, request by request: a running maximum that begins at 0 leaves no weight, a mask of -10,000 masks nothing."""


@dataclass(frozen=True)
class Piece:
    """One request of a step: ``query`` new tokens at the end of ``total``."""

    query: int
    total: int


MIXED = (Piece(1, 1), Piece(1, 37), Piece(1, 16), Piece(1, 5), Piece(9, 9), Piece(16, 48), Piece(3, 50))
"""Decodes first, among them a request's very first token and a full page; then a whole prompt and two chunks."""


def batches(block: int, seed: int = 0) -> dict[str, tuple[Piece, ...]]:
    """Steps by name, with lengths about the edges of blocks of ``block`` tokens.

    ``seed`` draws how many queries lie between the tiles of a prompt, and how many requests between those of decodes.
    """
    b, draw = block, random.Random(seed)
    decodes = (Piece(1, 1), Piece(1, b), Piece(1, b + 1), Piece(1, 3 * b + 2))
    return {
        "prefill": (Piece(b, b), Piece(b + 1, b + 1), Piece(3, 3)),
        "decode": decodes,
        "alike": (Piece(1, b + 3), Piece(1, b + 1), Piece(1, b + 2)),
        "chunked": (Piece(b, 2 * b), Piece(4, b + 4), Piece(5, 3 * b + 4)),  # where b is 1, the first is a decode
        "mixed": (*decodes, Piece(2 * b + 1, 2 * b + 1), Piece(7, 2 * b + 5)),
        "speculative": tuple(Piece(4, total) for total in (4, b + 3, 2 * b + 2, 3 * b + 4)),
        "one": (Piece(1, 1),),
        "long": (Piece(1, 600), Piece(20, 500)),
        "many": tuple(Piece(1, 1 + 7 * i % (2 * b + 3)) for i in range(33)),
        "dozens": tuple(Piece(1, 1 + 5 * i % (b + 3)) for i in range(draw.randint(66, 126))),
        "hundreds": tuple(Piece(1, 1 + 5 * i % (b + 3)) for i in range(257)),
        "prompt": (Piece(300, 300), Piece(130, 190), Piece(129, 129), Piece(n := draw.randint(66, 126), n + 9)),
        "deep": (Piece(1, 2500), Piece(1, 1025), Piece(5, 1100)),
    }


LONG = ("prompt", "deep", "dozens", "hundreds")
"""Batches that take the reference long: prompts of several tiles of queries, contexts of more than 1,024 tokens, and
many requests."""


@dataclass(frozen=True)
class Request:
    """The tensors of one request, on the host: its newest queries [T, H, D], all its keys and values [S, K, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def num_old(self) -> int:
        """Positions that earlier steps have stored."""
        return self.k.shape[0] - self.q.shape[0]


def draw_requests(
    spec: AttentionSpec, pieces: Sequence[Piece], generator: torch.Generator, values: str = "normal", shared: int = 0
) -> list[Request]:
    """Draw the requests of a step. Requests with a context of ``shared`` positions or more have the same first
    ``shared`` tokens.

    ``values``: "normal"; "flat" (queries are zero: all keys weigh alike); "peaked" (few keys outweigh all);
    "large" (all scores are so high that an exponential would overflow); "uneven" (values of zero, large and small ones,
    request by request); "low" (all scores are far below zero); "nan" (in a query of the first request, which no other
    may notice, and in a value of the last request that all of its queries read, which stays one).
    """
    dtype, scale = dtype_of(spec.dtype), {"flat": 0.0, "peaked": 5.0}.get(values, 1.0)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, spec.head_size, generator=generator)

    requests: list[Request] = []
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None
    for piece in pieces:
        q, k, v = (
            (draw(piece.query, spec.num_heads) * scale).to(dtype),
            spread(draw(piece.total, spec.num_kv_heads), spec.cache_spec["k"], generator).to(dtype),
            spread(draw(piece.total, spec.num_kv_heads), spec.cache_spec["k"], generator).to(dtype),
        )
        if values == "large":  # the same for every query and key, so that nothing changes but the scores' height
            q[..., 0] = k[..., 0] = (HIGH_SCORE / spec.scale) ** 0.5
        if values == "low":
            height = (-LOW_SCORES[len(requests) % len(LOW_SCORES)] / spec.scale) ** 0.5
            q[..., 0], k[..., 0] = height, -height
        if values == "uneven":
            v *= _MAGNITUDES[len(requests) % len(_MAGNITUDES)]
        if shared and piece.total - piece.query >= shared:
            prefix = prefix or (k[:shared].clone(), v[:shared].clone())
            k[:shared], v[:shared] = prefix
        requests.append(Request(q, k, v))
    if values == "nan":
        requests[0].q[0, 0, 0] = float("nan")
        read_by_all = requests[-1].num_old if pieces[-1].query == 1 or spec.span == Span() else None
        if len(requests) > 1 and read_by_all is not None and not is_scaled(spec.kv_dtype):
            requests[-1].v[read_by_all, 0, 0] = float("nan")
    return requests


@dataclass(frozen=True)
class Tables:
    """Which pages hold what: one row of ``blocks`` per request, garbage included; ``num_pages`` in all."""

    blocks: torch.Tensor
    num_pages: int

    def slots(self, row: int, first: int, last: int, block: int) -> torch.Tensor:
        """Slots (int32) of positions ``first`` to ``last`` of a request."""
        position = torch.arange(first, last)
        return (self.blocks[row, position // block] * block + position % block).to(torch.int32)


def draw_tables(
    spec: AttentionSpec,
    pieces: Sequence[Piece],
    generator: torch.Generator,
    shared: int = 0,
    num_pages: int = 0,
    room: Sequence[Sequence[Piece]] = (),
) -> Tables:
    """Permuted pages for a step (among ``num_pages``, where that is more than it takes).

    The table is as wide, and there are as many pages, as steps with the requests of ``room`` take, too.

    Requests with a context of ``shared`` positions or more hold the same pages for these. Blocks that no query of the
    step reads, before its span or behind its end, name the null page or a page of garbage in turn.
    """
    block = spec.block_size
    widths = [-(-piece.total // block) for piece in pieces]
    need, most = _pages(pieces, block), max(_pages(some, block) for some in (pieces, *room))
    count = max(num_pages, most + 1)
    columns = max(-(-piece.total // block) for some in (pieces, *room) for piece in some) + 2
    # The first pages and the last: where there are very many, offsets near both ends are wanted.
    candidates = torch.cat([torch.arange(1, need + 1), torch.arange(count - need, count)]).unique()
    garbage, *ids = candidates[torch.randperm(len(candidates), generator=generator)].tolist()
    free = iter(ids)
    table = torch.empty(len(pieces), columns, dtype=torch.int32)
    table[:, ::2], table[:, 1::2] = garbage, NULL_PAGE
    common = [next(free) for _ in range(shared // block)]
    for row, piece, width in zip(table, pieces, widths, strict=True):
        own = [next(free) for _ in range(width)]
        if shared and piece.total - piece.query >= shared:
            own[: len(common)] = common
        first = spec.span.first(piece.total - piece.query) // block
        row[first:width] = torch.tensor(own[first:], dtype=torch.int32)
    return Tables(table, count)


def _pages(pieces: Sequence[Piece], block: int) -> int:
    """How many pages a step takes at most, garbage and a common beginning included."""
    widths = [-(-piece.total // block) for piece in pieces]
    return sum(widths) + max(widths) + 2


@dataclass(frozen=True)
class PlacedStep:
    """A step in memory: tensors on the device between guard bands, the cache filled as ``store`` fills it.

    ``q``, ``k``, ``v`` and ``out`` have ``padding`` rows more than the batch has tokens. ``held`` are the keys and
    values [S, K, D] that the cache holds of each request, on the host, where scales make them the layout's own affair.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    buffer: torch.Tensor
    cache: dict[str, torch.Tensor]
    batch: AttentionBatch
    held: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None


def lay_out(
    backend: AttentionBackend,
    pieces: Sequence[Piece],
    requests: Sequence[Request],
    tables: Tables,
    device: torch.device,
    *,
    placement: Placement = Placement.AS_DRAWN,
    far: str | None = None,
    padding: int = 0,
    slack: int = 0,
    free_bytes: int = 0,
) -> PlacedStep:
    """Put a step into memory: the cache and the output are poisoned, then ``store`` writes what the requests hold.

    ``slack`` bytes follow each page. With ``far`` "cache" the pages are those of ``tables`` in a buffer that is not
    filled but where the step reads it; with "q" the queries lie apart. Both may raise NotEnoughMemoryError.
    """
    spec = backend.spec
    block, layout = spec.block_size, backend.layout
    buffer, cache = _cache(layout, backend.cache_spec, block, tables, slack, device, far == "cache", free_bytes)
    starts = torch.tensor([0, *(piece.query for piece in pieces)]).cumsum(0)
    totals = torch.tensor([piece.total for piece in pieces])
    slots = [tables.slots(i, p.total - p.query, p.total, block) for i, p in enumerate(pieces)]
    slots.append(torch.full((padding,), NULL_PAGE * block, dtype=torch.int32))

    def whole(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*rows, rows[0].new_full((padding, *rows[0].shape[1:]), float("nan"))])

    q = whole([r.q for r in requests])
    k, v = (whole([x[r.num_old :] for r, x in zip(requests, xs, strict=True)]) for xs in _keys_and_values(requests))
    batch = AttentionBatch(
        query_start=place(starts.to(torch.int32), device),
        seq_lens=place(totals.to(torch.int32), device),
        block_table=place(tables.blocks, device),
        slot_mapping=place(torch.cat(slots), device),
        query_start_host=tuple(starts.tolist()),
        seq_lens_host=tuple(totals.tolist()),
        num_decodes=sum(piece.query == 1 for piece in pieces),
        graph_key=len(pieces) if all(piece.query == 1 for piece in pieces) else None,  # as the engine records it
    )
    placed_q = place_far(q, device, free_bytes) if far == "q" else place(q, device, placement)
    placed_k, placed_v = (place(x, device, placement) for x in (k, v))
    olds = [slice(spec.span.first(r.num_old) // block * block, r.num_old) for r in requests]
    with torch.inference_mode():
        if any(old.start < old.stop for old in olds):
            old_k = torch.cat([r.k[old] for r, old in zip(requests, olds, strict=True)])
            old_v = torch.cat([r.v[old] for r, old in zip(requests, olds, strict=True)])
            where = torch.cat([tables.slots(i, old.start, old.stop, block) for i, old in enumerate(olds)])
            backend.store(StoreCall(old_k.to(device), old_v.to(device), cache, where.to(device)))
        backend.store(StoreCall(placed_k, placed_v, cache, batch.slot_mapping))
    out = place(q.new_full((*q.shape[:-1], v.shape[-1]), float("nan")), device)
    held = [_held(backend, r, cache, tables, i) for i, r in enumerate(requests)] if is_scaled(spec.kv_dtype) else None
    return PlacedStep(placed_q, placed_k, placed_v, out, buffer, cache, batch, held)


def _held(
    backend: AttentionBackend, request: Request, cache: dict[str, torch.Tensor], tables: Tables, row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a request in float64, as the layout reads them; as they were drawn where none is stored."""
    spec, length = backend.spec, request.k.shape[0]
    first = spec.span.first(request.num_old) // spec.block_size
    device = next(iter(cache.values())).device
    pages = tables.blocks[row, first : -(-length // spec.block_size)].long()
    planes, found = backend.layout.to_logical(cache, pages.to(device)), []
    for x, scale, name in zip((request.k, request.v), backend.cache_scales, ("k", "v"), strict=True):
        read = planes[name]
        start, numbers = first * spec.block_size, read.cpu().double().flatten(0, 1)[..., : spec.head_size]
        numbers = numbers if scale is None else numbers * scale.cpu().double()
        found.append(torch.cat([x[:start].double(), numbers[: length - start]]))
    return found[0], found[1]


def _keys_and_values(requests: Sequence[Request]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [r.k for r in requests], [r.v for r in requests]


def _cache(
    layout: CacheLayout,
    spec: CacheSpec,
    block: int,
    tables: Tables,
    slack: int,
    device: torch.device,
    far: bool,
    free_bytes: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A cache whose pages are poisoned: all of them, or only those that the tables name."""
    size = layout.page_bytes(spec, block) + slack
    if far:
        buffer = empty(tables.num_pages * size, torch.uint8, device, free_bytes)
        for page in {NULL_PAGE, *tables.blocks.flatten().tolist()}:
            buffer[page * size : (page + 1) * size].fill_(POISON)
    else:
        buffer = place(torch.full((tables.num_pages * size,), POISON, dtype=torch.uint8), device)
    return buffer, layout.views(buffer, tables.num_pages, spec, block, size)


def pages_to_be_far(layout: CacheLayout, spec: CacheSpec, block: int) -> int:
    """How many pages it takes until the elements of a page begin past 2**31."""
    return far_pages(layout.page_bytes(spec, block) // max(map(element_bytes, spec.planes)))


def expectations(
    spec: AttentionSpec,
    requests: Sequence[Request],
    pieces: Sequence[Piece],
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    held: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> tuple[Expectation, ...]:
    """The expected output of each request: attention over keys and values as the cache's dtype holds them.

    ``held`` says how, where it is not by rounding alone.

    A backend may also take this step's own keys and values as they are, before they are rounded to that dtype. The
    reference's own error is the worst of several evaluations that differ in the order of summation alone: how far one
    of them is off is luck where a score's rounding decides between two keys. In no row is it less than twice what such
    roundings cost on the average.
    """
    orders = [torch.randperm(spec.head_size, generator=torch.Generator().manual_seed(i)) for i in range(_EVALUATIONS)]

    def expectation(label: str, request: Request, cached: Sequence[torch.Tensor], stored: int) -> Expectation:
        exact = (request.k, request.v)
        keys, values = (
            torch.cat([c[:stored].double(), x[stored:].double()]) for c, x in zip(cached, exact, strict=True)
        )
        constants = (spec, sinks, alibi_slopes)
        truth = attend(request.q.double(), keys, values, *constants)
        found = [evaluated(request.q, keys, values, number) for number in range(_EVALUATIONS)]
        if is_scaled(spec.kv_dtype) and spec.kv_dtype != NVFP4 and len(keys) <= _FEW_KEYS:
            found.extend(with_scaled_weights(request.q, keys, values, *constants, seeds=range(_EVALUATIONS)))
        own = raised(worst(truth, found), truth, errors_of_scores(request.q, keys, values, truth, *constants))
        other = expectation(label, request, cached, request.num_old) if stored > request.num_old and rounds else None
        return Expectation(label, own, truth, other)

    def evaluated(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, number: int) -> torch.Tensor:
        """In float32: the elements of a head in another order each time, every other time with q scaled beforehand.

        The first two are summed one by one, as a kernel may whose threads have a score each: that loses most.
        """
        order, scale = orders[number] if number else torch.arange(spec.head_size), spec.scale if number % 2 else 1.0
        one = replace(spec, scale=spec.scale / scale)
        first, second = q.float()[..., order] * scale, keys[..., order].float()
        if number >= 2:
            return attend(first, second, values.float(), one, sinks, alibi_slopes).to(q.dtype)
        weights = attention_weights(summed_one_by_one(first, second), one, sinks, alibi_slopes)
        each = values.float().repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)
        return torch.einsum("hts,shd->thd", weights, each).to(q.dtype)

    rounds = spec.kv_dtype != spec.dtype
    titles = [f"request {i} ({piece.query} of {piece.total})" for i, piece in enumerate(pieces)]
    caches = held or [(r.k.to(dtype_of(spec.kv_dtype)), r.v.to(dtype_of(spec.kv_dtype))) for r in requests]
    return tuple(
        expectation(title, r, cached, r.k.shape[0]) for title, r, cached in zip(titles, requests, caches, strict=True)
    )


def with_scaled_weights(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    *,
    seeds: Sequence[int],
) -> list[torch.Tensor]:
    """Attention [T, H, D] as kernels compute it over 8-bit elements: a token's scale goes into its weight.

    The product of both is rounded to q's dtype before it is multiplied by elements, which that dtype holds exactly. All
    elements of a head, and all heads that share keys, have the same error from it, which only many keys average out.
    One result for each of ``seeds``, by which the scales are drawn.
    """
    each_key = keys.float().repeat_interleave(q.shape[1] // keys.shape[1], dim=1)
    products = torch.einsum("thd,shd->hts", q.float(), each_key)
    weights = attention_weights(products, spec, sinks, alibi_slopes).unflatten(0, (keys.shape[1], -1))  # [K, H/K, T, S]
    results = []
    for seed in seeds:
        scales = 1 + torch.rand(*keys.shape[:2], generator=torch.Generator().manual_seed(seed))  # [S, K]
        scaled = (weights * scales.T[:, None, None]).to(q.dtype)
        attended = torch.einsum("kgts,skd->tkgd", scaled.float(), values.float() / scales[..., None])
        results.append(attended.flatten(1, 2).to(q.dtype))
    return results


def summed_one_by_one(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The products [H, T, S] of q [T, H, D] and k [S, K, D], each element's added to the sum of those before it."""
    groups = q.shape[1] // k.shape[1]
    by_element = k.repeat_interleave(groups, dim=1).permute(2, 1, 0)[:, :, None].contiguous()  # [D, H, 1, S]
    queries = q.permute(2, 1, 0)[..., None].contiguous()  # [D, H, T, 1]
    products = torch.zeros(q.shape[1], q.shape[0], k.shape[0])
    for first, second in zip(queries, by_element, strict=True):
        products.addcmul_(first, second)
    return products


def without_first_row(expectation: Expectation) -> Expectation:
    """The expected results of all queries of a request but the first."""
    other = expectation.or_else
    return Expectation(
        expectation.label, expectation.own[1:], expectation.truth[1:], without_first_row(other) if other else None
    )


def worst(truth: torch.Tensor, evaluations: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of several evaluations, row by row the one that is furthest from the truth, and along it as far as any is.

    The same cause, such as an error in one key's weight, may make a row's error point along the true row in one
    evaluation and across it in another.
    """
    errors = torch.stack([x.double() - truth for x in evaluations])
    axis = torch.nn.functional.normalize(truth, dim=-1, eps=0.0).nan_to_num(0.0)
    along = (errors.nan_to_num(0.0, 0.0, 0.0) * axis).sum(-1, keepdim=True)
    furthest = errors.norm(dim=-1, keepdim=True).nan_to_num(0.0).argmax(0, keepdim=True)
    most_along = along.gather(0, along.abs().argmax(0, keepdim=True)) - along.gather(0, furthest)
    found = torch.stack(list(evaluations)).gather(0, furthest.expand(1, *truth.shape))
    return (found.double() + most_along * axis).to(found.dtype)[0]


def errors_of_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    truth: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice the root mean square error of each row [T, H, 1] along its true result and across it, from scores alone.

    The error e of a score is that of a sum of float32 products one by one: a share of the lengths of query and key, the
    same for all, which is measured here. It moves a result by weight * (value - result) * e.
    """
    groups = spec.num_heads // spec.num_kv_heads
    each_key, each_value = (x.double().repeat_interleave(groups, dim=1) for x in (keys, values))
    products = torch.einsum("thd,shd->hts", q.double(), each_key)
    lengths = torch.einsum("th,sh->hts", q.double().norm(dim=-1), each_key.norm(dim=-1))
    errors = summed_one_by_one(q.float(), keys.float()) - products
    share = (errors / lengths).nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
    moved = attention_weights(products, spec, sinks, alibi_slopes) * share * lengths * spec.scale
    if spec.soft_cap is not None:
        moved *= 1 - torch.tanh(products * spec.scale / spec.soft_cap).square()
    axis = torch.nn.functional.normalize(truth, dim=-1, eps=0.0).nan_to_num(0.0)
    along = torch.einsum("shd,thd->hts", each_value, axis) - (truth * axis).sum(-1).T[..., None]
    away = each_value.square().sum(-1).T[:, None] - 2 * torch.einsum("shd,thd->hts", each_value, truth)
    squares = moved.square()
    both = (squares * (away + truth.square().sum(-1).T[..., None])).sum(-1)
    first = (squares * along.square()).sum(-1)
    parts = (2 * x.nan_to_num(0.0, 0.0, 0.0).clamp(min=0).sqrt().T[..., None] for x in (first, both - first))
    return next(parts), next(parts)


def error_parts(own: torch.Tensor, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The error of each row of ``own`` [..., n] along the true row, and across it, float64."""
    axis = torch.nn.functional.normalize(truth, dim=-1, eps=0.0).nan_to_num(0.0)
    error = own.double() - truth
    along = (error * axis).sum(-1, keepdim=True) * axis
    return along, error - along


def raised(own: torch.Tensor, truth: torch.Tensor, least: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """``own`` [..., n], each row no nearer to the truth, along it and across it, than ``least`` [..., 1] says."""
    found = truth.clone()
    for part, lengths in zip(error_parts(own, truth), least, strict=True):
        found += part * (lengths / part.norm(dim=-1, keepdim=True)).nan_to_num(1.0, 1.0, 1.0).clamp(min=1)
    return torch.where(found.isfinite(), found, own.double()).to(own.dtype)


def draw_constants(spec: AttentionSpec, generator: torch.Generator) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Sinks and slopes, each float32 [H] on the host, where ``spec`` has some."""
    sinks = torch.randn(spec.num_heads, generator=generator) * 1.5 if spec.sinks else None
    slopes = None
    if spec.alibi:  # from 1/2 to 1/512, as ALiBi's own: so far keys weigh in some heads
        steps = torch.arange(spec.num_heads) + torch.rand(spec.num_heads, generator=generator)
        slopes = 2.0 ** -(1 + 8 * steps / spec.num_heads)
    return sinks, slopes

"""Linear recurrences with a matrix as the state of each head: one token at a time, and prompts in chunks.

Gated delta rule (Yang et al. 2024, arXiv:2412.06464, equation 10), with a decay for each channel of the key as in Kimi
Delta Attention (arXiv:2510.26692, equation 1); without the delta rule, Mamba-2's state space (arXiv:2405.21060).

Axes: T tokens, N requests, H heads, K key heads (each serves H / K heads that lie one after the other), D key size,
V value size, P pages of states, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.causal_conv import Piece, batch_arrays, fill_known, random_pages
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel

Tensor = torch.Tensor
NORM_EPS = 1e-6
"""Added to the sum of squares of keys and queries, in their norm."""
_CHUNK = 64
_CHANNEL_CHUNK = 16
"""Tokens of a chunk where each channel has a decay: [C, C, D] ratios of decays exist at a time."""
_ERRORS = ErrorModel(scale="row", finest=2.0**-18, ignore_null_page=("states",))
_STATIC = ("scale", "delta_rule", "normalize", "channel_decay")


def _drawn(
    draw: Draw,
    name: str,
    pieces: Sequence[Piece],
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 24),
    *,
    delta_rule: bool = True,
    channel_decay: bool = False,
    decays: tuple[float, float] = (-1.5, -0.01),
    along_keys: bool = False,
    padding: int = 0,
) -> Case:
    """A case for chunks; ``heads``: H and K, ``sizes``: D and V, ``decays``: between which their logarithms are.

    ``along_keys``: queries have their keys' direction. With fast decays an output is little more than its own token's
    q k times v, and where q k cancels, a right kernel errs by much of it.
    """
    (num_heads, num_key_heads), (key_size, value_size) = heads, sizes
    count, pages = random_pages(draw, pieces, padding)
    shape = (num_heads, value_size, key_size)
    buffer = torch.full((count, num_heads * value_size * key_size + 16), float("nan"), device=draw.device)
    states = buffer[:, 16:].view(count, *shape)  # pages hold other planes, too
    known = draw.floats(len(pieces), *shape) - 0.5
    fill_known(states, pages, pieces, known)
    tokens = sum(piece[0] for piece in pieces) + padding
    widths = [num_key_heads * key_size] * 2 + [num_heads * value_size]
    q, k, v = draw.normal(tokens, sum(widths)).split(widths, dim=1)  # as a convolution leaves them
    q, k = (x.unflatten(1, (num_key_heads, key_size)) for x in (q, k))
    if along_keys:
        q += k
    channels = (key_size,) if channel_decay else ()
    low, high = decays
    decay = draw.floats(tokens, num_heads, *channels) * (high - low) + low
    args = (q, k, v.unflatten(1, (num_heads, value_size)), decay, draw.floats(tokens, num_heads), states, pages)
    query_start, seq_lens = batch_arrays(draw, pieces, padding)
    kwargs = {
        "starts": tuple(query_start.tolist()),
        "scale": key_size**-0.5,
        "delta_rule": delta_rule,
        "normalize": delta_rule,
        "channel_decay": channel_decay,
    }
    return Case(name, (*args, query_start, seq_lens), kwargs, {"head_size": key_size})


def _chunk_cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)
    yield _drawn(draw, "prompts", [(5, 5), (70, 70), (1, 1), (2, 2)])
    yield _drawn(draw, "chunks", [(6, 40), (64, 80), (2, 3), (65, 200)], (3, 1), (32, 16))
    yield _drawn(draw, "long", [(300, 300), (129, 500)], (2, 2), (64, 64), decays=(-0.1, 0.0))
    yield _drawn(draw, "wide", [(130, 150), (33, 33)], (4, 2), (128, 128))
    yield _drawn(draw, "odd", [(7, 9), (17, 17)], (3, 3), (5, 3))
    yield _drawn(draw, "fast_decay", [(80, 81), (9, 9)], decays=(-40.0, 0.0), along_keys=True)
    yield _drawn(draw, "no_decay", [(40, 90)], decays=(0.0, 0.0))
    yield _drawn(draw, "channel_decay", [(70, 90), (3, 3), (16, 16)], (3, 3), (32, 16), channel_decay=True)
    yield _drawn(draw, "channel_fast", [(40, 90)], (2, 2), channel_decay=True, decays=(-30.0, 0.0), along_keys=True)
    yield _drawn(draw, "sum", [(90, 130), (4, 4)], (6, 2), (32, 16), delta_rule=False)
    yield _drawn(draw, "sum_odd", [(17, 17), (3, 9)], (3, 1), (17, 9), delta_rule=False)
    yield _drawn(draw, "padded", [(4, 21)], padding=1)
    yield _drawn(draw, "empty", [])


def _step_cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, lengths: Sequence[int], *shapes: tuple[int, int], **options: Any) -> Case:
        return _one_token(_drawn(draw, name, [(1, length) for length in lengths], *shapes, **options))

    yield case("decodes", [9, 1, 2, 300, 1])
    yield case("wide", [7, 1, 70], (4, 2), (128, 128))
    yield case("one_key_head", [3, 8], (6, 1), (64, 32))
    yield case("odd", [5, 1, 2], (3, 3), (5, 3))
    yield case("channel_decay", [5, 1, 60], (3, 3), (32, 16), channel_decay=True)
    yield case("sum", [4, 1, 90], (6, 2), (32, 16), delta_rule=False)
    yield case("sum_odd", [4, 1], (3, 1), (17, 9), delta_rule=False)
    yield case("padded", [4, 70], padding=1)
    yield case("many", [*range(1, 20)], (2, 1), (32, 32))
    yield _one_token(_drawn(draw, "fast_decay", [(1, 9), (1, 4)], decays=(-120.0, -60.0), along_keys=True))
    yield case("one", [1], (1, 1), (1, 1))
    yield case("empty", [])
    q, k, v, *rest = (zeros := case("zero_keys", [5, 6])).args
    yield Case(zeros.name, (q, k * 0, v, *rest), zeros.kwargs, zeros.workload)
    q, k, v, *rest = (wrong := case("nan", [5, 6])).args
    v = v.clone()
    v[0, 0, 1] = float("nan")
    yield Case(wrong.name, (q, k, v, *rest), wrong.kwargs, wrong.workload)


def _one_token(case: Case) -> Case:
    """``case``, of requests with one token each, without ``query_start``."""
    kwargs = {name: value for name, value in case.kwargs.items() if name != "starts"}
    return Case(case.name, (*case.args[:7], case.args[8]), kwargs, case.workload)


def _allocate(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **scalars: object) -> Tensor:
    return v.new_empty(v.shape)


@custom_op(cases=_step_cases, errors=_ERRORS, allocate=_allocate, mutates=["states"], has_rows=False, static=_STATIC)
def linear_recurrence_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    pages: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    delta_rule: bool,
    normalize: bool,
    channel_decay: bool,
) -> Tensor:
    """One token of each request, T = N: q, k [N, K, D], v [N, H, V] -> [N, H, V] in v's dtype. Advances ``states``.

    For each head, S [V, D] becomes ``S exp(decay)``, then ``S + beta u k^T`` with ``u = v - S k``, or ``u = v`` without
    ``delta_rule``; the result is ``scale * S q``. ``normalize`` divides q and k by the root of their sum of squares
    plus 1e-6 first.

    ``decay`` float32 [N, H], at most 0, or [N, H, D] with ``channel_decay``: one for each column of S. ``beta`` float32
    [N, H]. ``states`` float32 [P, H, V, D]: that of each request is in its page and is overwritten. ``pages`` int64 [N]
    differ, but for the null page, whose state nobody reads; where several requests have it, their results are
    undefined, since they may advance it at once. ``seq_lens`` int32 [N], the tokens up to this one: where that is 1,
    the state before is zero, whatever the page holds. Computed in float32 or wider.
    """
    wide = torch.promote_types(v.dtype, states.dtype)
    q, k = _prepared(q, k, v.shape[1], normalize, wide)
    old = states[pages].masked_fill((seq_lens == 1)[:, None, None, None], 0.0).to(wide)
    kept = decay.to(wide).exp()
    state = old * (kept if channel_decay else kept[..., None])[..., None, :]
    u = v.to(wide)
    if delta_rule:
        u = u - torch.einsum("nhvd,nhd->nhv", state, k)
    state = state + (beta.to(wide)[..., None] * u)[..., None] * k[..., None, :]
    states[pages] = state.to(states.dtype)
    return (scale * torch.einsum("nhvd,nhd->nhv", state, q)).to(v.dtype)


@custom_op(cases=_chunk_cases, errors=_ERRORS, allocate=_allocate, mutates=["states"], has_rows=False, static=_STATIC)
def linear_recurrence_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    pages: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    starts: Sequence[int],
    scale: float,
    delta_rule: bool,
    normalize: bool,
    channel_decay: bool,
) -> Tensor:
    """The recurrence of linear_recurrence_step over several tokens of each request: q, k [T, K, D], v [T, H, V] ->
    [T, H, V]. Advances ``states`` to the last token of each request.

    ``query_start`` int32 [N+1] and ``seq_lens`` int32 [N] are as in AttentionBatch, and ``starts`` is a copy of
    ``query_start`` on the host. A request whose tokens are all in this step begins with a state of zero. Rows behind
    the last request have undefined results. Everything else is as in linear_recurrence_step, with T for N in ``decay``
    and ``beta``. Computed in chunks, as in section 3.3 of arXiv:2412.06464; how requests are cut into calls changes
    results by rounding alone.
    """
    wide = torch.promote_types(v.dtype, states.dtype)
    out, before = torch.zeros_like(v), states[pages]
    before = before.masked_fill((seq_lens == query_start[1:] - query_start[:-1])[:, None, None, None], 0.0)
    for request, (first, last) in enumerate(pairwise(starts)):
        rows = slice(first, last)
        own_q, own_k = _prepared(q[rows], k[rows], v.shape[1], normalize, wide)
        inputs = own_q * scale, own_k, v[rows].to(wide), decay[rows].to(wide), beta[rows].to(wide)
        o, state = _scan(*inputs, before[request].to(wide), delta_rule)
        out[rows], before[request] = o.to(v.dtype), state.to(states.dtype)
    states[pages] = before
    return out


def _prepared(q: Tensor, k: Tensor, heads: int, normalize: bool, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and keys of each head, [T, H, D], normed where they are to be."""
    q, k = q.to(wide), k.to(wide)
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    return q.repeat_interleave(heads // q.shape[1], 1), k.repeat_interleave(heads // k.shape[1], 1)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, delta_rule: bool
) -> tuple[Tensor, Tensor]:
    """The results [T, H, V] of one request, and its last state [H, V, D]; q, k [T, H, D] of each head."""
    found = []
    chunk = _CHUNK if decay.dim() == 2 else _CHANNEL_CHUNK
    for first in range(0, q.shape[0], chunk):
        rows = slice(first, first + chunk)
        parts = [x[rows].transpose(0, 1) for x in (q, k, v, decay, beta)]  # [H, C, ...]
        o, state = _chunk(*parts, state=state, delta_rule=delta_rule)
        found.append(o.transpose(0, 1))
    return torch.cat(found) if found else torch.empty_like(v), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, state: Tensor, delta_rule: bool
) -> tuple[Tensor, Tensor]:
    """One chunk of tokens, [H, C, ...]; ``state`` [H, V, D] before it. Returns results, and the state after it."""
    sums = decay.cumsum(1)
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)  # [query, key]
    if decay.dim() == 2:
        ratio = (sums[:, :, None] - sums[:, None]).masked_fill(later, float("-inf")).exp()
        between_keys, to_queries = (x @ k.transpose(1, 2) * ratio for x in (k, q))
        sums = sums[..., None]
    else:
        ratios = (sums[:, :, None] - sums[:, None]).masked_fill(later[..., None], float("-inf")).exp()
        between_keys, to_queries = (torch.einsum("hid,hjd,hijd->hij", x, k, ratios) for x in (k, q))
    u = beta[..., None] * v
    if delta_rule:  # each token's correction depends on the earlier ones of its chunk: (1 + A) u = beta (v - S k)
        u = u - beta[..., None] * ((k * sums.exp()) @ state.transpose(1, 2))
        u = torch.linalg.solve_triangular((beta[..., None] * between_keys).tril(-1), u, upper=False, unitriangular=True)
    out = (q * sums.exp()) @ state.transpose(1, 2) + to_queries @ u
    last = sums[:, -1:]
    return out, state * last.exp() + u.transpose(1, 2) @ (k * (last - sums).exp())

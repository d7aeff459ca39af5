"""Kernels that change logits before sampling, and compute their log-probabilities.

Axes: N rows, V vocabulary, K biased tokens of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.kernels.sampling import order_of

_BLOCK, _WARPS = 2048, 8
_BLOCKS_AT_ONCE = 8
"""Of a row, for each program that looks for what is likelier than a token."""


def mask_tokens(logits: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """See core's op."""
    logits, forbidden = _rows(logits), _rows(forbidden)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        _mask[_grid(logits)](
            logits, logits.stride(0), forbidden, forbidden.stride(0), out, out.shape[1], _BLOCK, num_warps=_WARPS
        )
    return out


def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """See core's op."""
    logits, in_prompt, output_counts = map(_rows, (logits, in_prompt, output_counts))
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        _penalize[_grid(logits)](
            logits,
            logits.stride(0),
            in_prompt,
            in_prompt.stride(0),
            output_counts,
            output_counts.stride(0),
            repetition.contiguous(),
            presence.contiguous(),
            frequency.contiguous(),
            out,
            out.shape[1],
            _BLOCK,
            num_warps=_WARPS,
        )
    return out


def apply_logit_bias(logits: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """See core's op. Two launches: a copy, and additions to it."""
    out = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if tokens.numel() and out.numel():
        tokens, values = _rows(tokens), _rows(values)
        block = min(triton.next_power_of_2(tokens.shape[1]), 256)
        _add_bias[tokens.shape[0], triton.cdiv(tokens.shape[1], block)](
            tokens, tokens.stride(0), values, values.stride(0), out, out.shape[1], tokens.shape[1], block, num_warps=4
        )
    return out


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, *, top_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See core's op. The likeliest tokens are torch's ``topk``; without any, the op is two launches."""
    logits = _rows(logits)
    count, vocabulary = logits.shape
    ids = torch.empty(count, 1 + top_n, dtype=torch.int64, device=logits.device)
    ranks, logprobs = torch.empty_like(ids), torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    if not count:
        return ids, logprobs, ranks
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    blocks = min(_BLOCKS_AT_ONCE, triton.cdiv(vocabulary, block))
    parts = triton.cdiv(vocabulary, block * blocks)
    found = torch.empty(3, count, parts, dtype=torch.float32, device=logits.device)
    tokens = tokens.contiguous()
    _weigh_parts[count, parts](logits, logits.stride(0), tokens, found, vocabulary, block, blocks, num_warps=_WARPS)
    top, top_ids = logits.topk(top_n, dim=-1) if top_n else (logits, tokens)
    _score_row[count,](
        logits,
        logits.stride(0),
        tokens,
        found,
        top,
        top_ids,
        ids,
        logprobs,
        ranks,
        parts,
        top_n,
        triton.next_power_of_2(parts),
        64,
        num_warps=4,
    )
    return ids, logprobs, ranks


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Rows with their elements one behind the other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _grid(logits: torch.Tensor) -> tuple[int, int]:
    return logits.shape[0], triton.cdiv(logits.shape[1], _BLOCK)


@triton.jit
def _mask(logits, stride, forbidden, forbidden_stride, out, vocabulary, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = at < vocabulary
    x = tl.load(logits + row * stride + at, mask=is_token)
    is_forbidden = tl.load(forbidden + row * forbidden_stride + at, mask=is_token, other=0) != 0
    x = tl.where(is_forbidden, float("-inf"), x.to(tl.float32))
    tl.store(out + row * vocabulary + at, x.to(out.dtype.element_ty), mask=is_token)


@triton.jit
def _penalize(
    logits,
    stride,
    in_prompt,
    prompt_stride,
    counts,
    counts_stride,
    repetition,
    presence,
    frequency,
    out,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = at < vocabulary
    x = tl.load(logits + row * stride + at, mask=is_token, other=0.0).to(tl.float32)
    is_in_prompt = tl.load(in_prompt + row * prompt_stride + at, mask=is_token, other=0) != 0
    drawn = tl.load(counts + row * counts_stride + at, mask=is_token, other=0)
    factor = tl.where(is_in_prompt | (drawn > 0), tl.load(repetition + row), 1.0)
    x = tl.where(x > 0.0, tl.div_rn(x, factor), x * factor)
    x -= tl.load(frequency + row) * drawn.to(tl.float32) + tl.load(presence + row) * (drawn > 0).to(tl.float32)
    tl.store(out + row * vocabulary + at, x, mask=is_token)


@triton.jit(do_not_specialize=["count"])
def _add_bias(tokens, tokens_stride, values, values_stride, out, vocabulary, count, BLOCK: tl.constexpr):
    """Additions are atomic, as a token may come several times; in what order is of no account."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row * tokens_stride + at, mask=at < count, other=0)
    value = tl.load(values + row * values_stride + at, mask=at < count, other=0.0)
    tl.atomic_add(out + row * vocabulary + token, value, mask=at < count)


@triton.jit
def _weigh_parts(logits, stride, tokens, found, vocabulary, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Of a part of a row: its highest logit, the sum of e^(x - that), and how many are above the row's token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = order_of(tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32))
    at = part * BLOCK * BLOCKS + tl.arange(0, BLOCK)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for block in range(BLOCKS):
        token = at + block * BLOCK
        x = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        above += ((order_of(x) > own) & (token < vocabulary)).to(tl.int32)
        higher = tl.maximum(high, x, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(high - base) + tl.exp(x - base)
        high = higher
    highest = tl.reduce(high, 0, _larger)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    place, parts = row * tl.num_programs(1) + part, tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(found + place, highest)
    tl.store(found + parts + place, tl.sum(mass * tl.exp(high - base), axis=0))
    tl.store(found + 2 * parts + place, tl.sum(above, axis=0).to(tl.float32))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["parts", "top_n"])
def _score_row(
    logits,
    stride,
    tokens,
    found,
    top,
    top_ids,
    ids,
    logprobs,
    ranks,
    parts,
    top_n,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first column is the row's token, the others its ``top_n`` likeliest, of which equal ones share a rank."""
    row = tl.program_id(0).to(tl.int64)
    lanes, rows = tl.arange(0, PARTS), tl.num_programs(0).to(tl.int64)
    is_part = lanes < parts
    mine = found + row * parts + lanes
    highs = tl.load(mine, mask=is_part, other=float("-inf"))
    high = tl.reduce(highs, 0, _larger)
    base = tl.where(high == float("-inf"), 0.0, high)
    mass = tl.sum(tl.load(mine + rows * parts, mask=is_part, other=0.0) * tl.exp(highs - base), axis=0)
    above = tl.sum(tl.load(mine + 2 * rows * parts, mask=is_part, other=0.0).to(tl.int32), axis=0)
    log_mass = tl.log(mass)
    token = tl.load(tokens + row)
    own = tl.load(logits + row * stride + token).to(tl.float32)
    start = row * (1 + top_n)
    tl.store(ids + start, token)
    tl.store(logprobs + start, own - high - log_mass)
    tl.store(ranks + start, (1 + above).to(tl.int64))
    for first in range(0, top_n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(top + row * top_n + at, mask=at < top_n, other=float("-inf")).to(tl.float32)
        likelier = tl.zeros([BLOCK], tl.int64)
        for other in range(0, first + BLOCK, BLOCK):
            those = other + tl.arange(0, BLOCK)
            y = tl.load(top + row * top_n + those, mask=those < top_n, other=float("-inf")).to(tl.float32)
            likelier += tl.sum((y[None, :] > x[:, None]).to(tl.int64), axis=1)
        tl.store(ids + start + 1 + at, tl.load(top_ids + row * top_n + at, mask=at < top_n, other=0), mask=at < top_n)
        tl.store(logprobs + start + 1 + at, x - high - log_mass, mask=at < top_n)
        tl.store(ranks + start + 1 + at, 1 + likelier, mask=at < top_n)

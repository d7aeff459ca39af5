"""Layers with a state among the kernels that ``hardpoint bench ops`` measures, in the shape of Qwen3-Next-80B-A3B."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hardpoint.bench.device_timer import Run
from hardpoint.context import Context
from hardpoint.ops.causal_conv import causal_conv
from hardpoint.ops.linear_recurrence import linear_recurrence_chunks, linear_recurrence_step

_HEADS, _KEY_HEADS, _SIZE, _WIDTH = 32, 16, 128, 4
_CHANNELS = (2 * _KEY_HEADS + _HEADS) * _SIZE
_SCALARS: dict[str, Any] = {
    "scale": _SIZE**-0.5,
    "delta_rule": True,
    "normalize": True,
    "channel_decay": False,
}


@dataclass(frozen=True)
class Recurrent:
    """Calls that do the same on different states: the bytes that one reads and writes, and its products where these
    take the time."""

    runs: list[Run]
    nbytes: int
    flops: int = 0


def recurrences(ctx: Context, working_set: int) -> Iterator[tuple[str, Callable[[], Recurrent]]]:
    """Each row's name, and what makes its calls, whose states fill ``working_set`` bytes."""
    for sequences in (1, 32):
        yield f"delta net decode, {sequences} sequences", partial(_decode, ctx, sequences, working_set)
    yield "delta net prompt, 2048 tokens", partial(_prompt, ctx, 2048)
    yield "convolution decode, 32 sequences", partial(_convolution, ctx, 32, 32)
    yield "convolution prompt, 2048 tokens", partial(_convolution, ctx, 1, 2048)


def _inputs(ctx: Context, tokens: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, decay and beta, the first three as a convolution leaves them."""
    device = ctx.torch_device
    mixed = torch.randn(tokens, _CHANNELS, device=device).to(ctx.dtype)
    heads = [_KEY_HEADS, _KEY_HEADS, _HEADS]
    q, k, v = (x.unflatten(1, (-1, _SIZE)) for x in mixed.split([count * _SIZE for count in heads], dim=1))
    return q, k, v, -torch.rand(tokens, _HEADS, device=device), torch.rand(tokens, _HEADS, device=device)


def _decode(ctx: Context, sequences: int, working_set: int) -> Recurrent:
    step: Callable[..., torch.Tensor] = linear_recurrence_step.bind(ctx, head_size=_SIZE, scalars=_SCALARS)
    device = ctx.torch_device
    state = _HEADS * _SIZE * _SIZE * 4
    copies = max(1, working_set // (state * sequences))
    states = torch.zeros(copies * sequences, _HEADS, _SIZE, _SIZE, device=device)
    inputs, lengths = _inputs(ctx, sequences), torch.full((sequences,), 1000, dtype=torch.int32, device=device)
    pages = torch.randperm(copies * sequences, device=device).view(copies, sequences)
    runs: list[Run] = [partial(step, *inputs, states, own, lengths, **_SCALARS) for own in pages]
    return Recurrent(runs, 2 * state * sequences)


def _prompt(ctx: Context, tokens: int) -> Recurrent:
    chunks: Callable[..., torch.Tensor] = linear_recurrence_chunks.bind(ctx, head_size=_SIZE, scalars=_SCALARS)
    device = ctx.torch_device
    states = torch.zeros(1, _HEADS, _SIZE, _SIZE, device=device)
    pages = torch.zeros(1, dtype=torch.int64, device=device)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    arrays = states, pages, starts, starts[1:]
    run = partial(chunks, *_inputs(ctx, tokens), *arrays, starts=(0, tokens), **_SCALARS)
    return Recurrent([run], 0, 6 * tokens * _HEADS * _SIZE * _SIZE)


def _convolution(ctx: Context, sequences: int, tokens: int) -> Recurrent:
    """``tokens`` in all, as many of each sequence."""
    conv, device, each = causal_conv.bind(ctx, activation="silu"), ctx.torch_device, tokens // sequences
    x = torch.randn(tokens, _CHANNELS, device=device).to(ctx.dtype)
    weight = torch.randn(_CHANNELS, _WIDTH, device=device).to(ctx.dtype)
    states = torch.zeros(sequences, _WIDTH - 1, _CHANNELS, device=device, dtype=ctx.dtype)
    starts = torch.arange(0, tokens + 1, each, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), 5000, dtype=torch.int32, device=device)
    pages = torch.arange(sequences, device=device)
    run = partial(conv, x, weight, None, states, pages, starts, lengths, activation="silu")
    return Recurrent([run], 2 * (x.nbytes + states.nbytes))

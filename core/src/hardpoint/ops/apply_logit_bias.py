"""Bias on single tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, logits: torch.Tensor, count: int) -> Case:
        n, v = logits.shape
        tokens = torch.stack([draw.distinct(0, v, count) for _ in range(n)]) if n else draw.integers(0, v, 0, count)
        return Case(name, (logits, tokens, draw.floats(n, count) * 20 - 10))

    yield case("random", draw.normal(5, 300, scale=3.0), 7)
    yield case("one", draw.normal(3, 129), 1)
    yield case("all", draw.normal(2, 100), 100)
    yield case("none", draw.normal(3, 50), 0)
    yield case("wide", draw.normal(2, 32_000, scale=4.0), 300)
    yield case("strided", draw.strided(4, 100), 5)
    bans = case("bans", draw.normal(4, 200), 6)
    bans.args[2][:, ::2] = float("-inf")
    yield bans
    padded = case("padded", draw.normal(4, 200), 8)
    padded.args[1][:, 3:], padded.args[2][:, 3:] = 0, 0.0
    yield padded
    twice = case("banned_twice", draw.normal(4, 200), 4)
    twice.args[1][:, 2:], twice.args[2][:, 2:] = twice.args[1][:, :2], float("-inf")
    yield twice
    yield case("empty", draw.normal(0, 100), 3)


def _allocate(logits: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


@custom_op(cases=_cases, errors=ErrorModel(), allocate=_allocate)
def apply_logit_bias(logits: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """logits [N, V], tokens int64 [N, K], values float32 [N, K] -> logits + bias, float32 or wider [N, V].

    A row's ``values`` are added at its ``tokens``; negative infinity forbids a token. A token may come several times,
    with one finite value besides zeros and infinities at the most: so the order of additions is of no account.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.scatter_add(-1, tokens, values.to(wide.dtype))

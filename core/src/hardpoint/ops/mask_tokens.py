"""Tokens that may not be drawn."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, logits: torch.Tensor, share: float) -> Case:
        return Case(name, (logits, draw.floats(*logits.shape) < share))

    yield case("random", draw.normal(5, 300), 0.5)
    yield case("odd", draw.normal(3, 129), 0.9)
    yield case("nothing", draw.normal(3, 50), 0.0)
    yield case("everything", draw.normal(2, 50), 1.0)
    yield case("wide", draw.normal(2, 32_000), 0.99)
    yield case("strided", draw.strided(4, 100), 0.5)
    yield case("non_finite", draw.with_non_finite(3, 64), 0.5)
    yield case("one", draw.normal(1, 1), 0.5)
    yield case("empty", draw.normal(0, 100), 0.5)


def _allocate(logits: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape)


@custom_op(cases=_cases, errors=ErrorModel(exact=True), allocate=_allocate)
def mask_tokens(logits: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """logits [N, V], forbidden bool [N, V] -> [N, V] in logits' dtype: negative infinity where forbidden."""
    return logits.masked_fill(forbidden, float("-inf"))

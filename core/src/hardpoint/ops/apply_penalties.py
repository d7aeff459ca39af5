"""Penalties on tokens that a text already holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, logits: torch.Tensor) -> Case:
        n, v = logits.shape
        in_prompt, counts = draw.floats(n, v) < 0.3, draw.integers(-4, 6, n, v).clamp(min=0).int()
        repetition = draw.floats(n) * 1.5 + 0.5
        return Case(name, (logits, in_prompt, counts, repetition, draw.floats(n) * 4 - 2, draw.floats(n) * 4 - 2))

    yield case("random", draw.normal(5, 300, scale=3.0))
    yield case("odd", draw.normal(3, 129))
    yield case("wide", draw.normal(2, 32_000, scale=4.0))
    yield case("strided", draw.strided(4, 100))
    yield case("large", draw.normal(3, 64, scale=1e4))
    masked = draw.normal(4, 200)
    masked[:, ::3] = float("-inf")
    yield case("masked", masked)
    some = case("some_rows_off", draw.normal(6, 200, scale=3.0))
    some.args[3][::2], some.args[4][::2], some.args[5][::2] = 1.0, 0.0, 0.0
    yield some
    often = case("often", draw.normal(2, 100))
    often.args[2].mul_(1000)
    yield often
    yield case("one", draw.normal(1, 1))
    yield case("empty", draw.normal(0, 100))


def _allocate(logits: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


@custom_op(cases=_cases, errors=ErrorModel(), allocate=_allocate)
def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """logits [N, V] and each row's history and penalties -> penalised logits, float32 or wider [N, V].

    ``in_prompt`` (bool [N, V]) says which tokens stand in the prompt, ``output_counts`` (int32 [N, V]) how often each
    was drawn. For tokens of either, a logit x becomes x / ``repetition`` where it is positive and x * ``repetition``
    where it is not: Keskar et al. 2019, arXiv:1909.05858, section 4.1, with the sign's case as in Transformers, so that
    a penalty above 1 never makes a token likelier. Then ``frequency`` * count + ``presence`` * (count > 0) is
    subtracted, as the OpenAI API documents its penalties: drawn tokens alone. Penalties are float32 [N]; a row of
    1, 0, 0 keeps its logits to the bit.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    drawn = output_counts > 0
    factor = torch.where(in_prompt | drawn, repetition[:, None], 1.0)
    wide = torch.where(wide > 0, wide / factor, wide * factor)
    return wide - (frequency[:, None] * output_counts + presence[:, None] * drawn)

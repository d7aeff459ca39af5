"""Sampled tokens, kept on the device for the next step: it reads tokens that the host need not know yet."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, rows: int, slots: int) -> Case:
        kept, tokens = draw.integers(0, 1000, slots), draw.integers(0, 1000, rows)
        return Case(name, (kept, draw.distinct(0, slots, rows), tokens), {})

    yield case("random", 7, 12)
    yield case("all", 33, 33)
    yield case("many", 500, 513)
    yield case("one", 1, 1)
    yield case("empty", 0, 0)


@custom_op(cases=_cases, errors=ErrorModel(exact=True), mutates=["last_tokens"])
def keep_tokens(last_tokens: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write ``tokens``, int64 [N], to the places ``slots``, int64 [N], of ``last_tokens``, int64 [R].

    Of a slot that stands several times, which is that of padding, any of its tokens is kept. Mutates ``last_tokens``.
    """
    last_tokens[slots] = tokens

"""Whether a function of rows gives each row the same bits whatever the others are."""

from __future__ import annotations

from collections.abc import Callable

import torch

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
RowFunction = Callable[..., Outputs]
"""Takes tensors with a common first axis, returns one or several with the same."""


def check_rows(function: RowFunction, *rows: torch.Tensor, seed: int = 0) -> None:
    """Assert that the rows of ``function(*rows)`` have the same bits alone, shuffled among other rows, and strided."""
    count = rows[0].shape[0]
    whole = bits(function(*rows))
    for i in {0, 1, count // 2, count - 1} & set(range(count)):
        alone = bits(function(*(x[i : i + 1].clone() for x in rows)))
        assert same(alone, tuple(y[i : i + 1] for y in whole)), f"row {i} of {count} differs from itself alone"
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: max(1, 2 * count // 3)]
    assert same(bits(function(*(x[order] for x in rows))), tuple(y[order] for y in whole)), "place or number matter"
    assert same(bits(function(*map(strided, rows))), whole), "strides or alignment matter"


def bits(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """Floating-point outputs as integers, so that equal means equal to the bit."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(x.contiguous().view(integers[x.element_size()]) for x in tensors)


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """Whether all tensors of two tuples are equal."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def strided(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a part of something wider that begins elsewhere."""
    if x.ndim == 1:
        return x
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 5)
    wide[..., 3:-2] = x
    return wide[..., 3:-2]

"""The gates of a linear recurrence: how much each head forgets, and how much of a token it takes in.

Axes: T tokens, H heads, D key size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import softplus

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel

Tensor = torch.Tensor


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, a: Tensor, *, channels: tuple[int, ...] = (), step: bool = False, low: float = 0.0) -> Case:
        heads = a.shape[1]
        rate = draw.floats(heads) * 4 - 2
        bias = (draw.floats(heads, *channels) * 6 - 4).to(device)
        b = None if step else draw.strided(a.shape[0], heads)
        return Case(name, (a, b, rate, bias), {"low": low})

    yield case("sigmoid", draw.strided(7, 32))
    yield case("odd", draw.normal(5, 3))
    yield case("channels", draw.normal(6, 4, 16), channels=(16,))
    yield case("step", draw.strided(9, 24), step=True)
    yield case("clamped_step", draw.normal(9, 24, scale=4.0), step=True, low=0.05)
    yield case("large", draw.between(-60.0, 60.0, 6, 8))
    yield case("one", draw.normal(1, 1))
    yield case("empty", draw.normal(0, 8))


def _allocate(a: Tensor, b: Tensor | None, rate: Tensor, bias: Tensor, *, low: float) -> tuple[Tensor, Tensor]:
    return rate.new_empty(a.shape), rate.new_empty(a.shape[:2])


@custom_op(cases=_cases, errors=ErrorModel(scale="element", finest=2.0**-18), allocate=_allocate)
def recurrence_gates(a: Tensor, b: Tensor | None, rate: Tensor, bias: Tensor, *, low: float) -> tuple[Tensor, Tensor]:
    """The logarithms of decays, float32 like ``a``, and betas, float32 [T, H], for linear_recurrence_step.

    ``step = max(low, softplus(a + bias))`` and ``decay = -exp(rate) * step``. ``beta`` is ``sigmoid(b)`` (gated delta
    net, arXiv:2412.06464); where ``b`` is None it is ``step`` (Mamba-2's time step, arXiv:2405.21060).

    a [T, H], or [T, H, D] with a decay for each channel; b [T, H]; ``rate`` float32 [H], a checkpoint's ``A_log``;
    ``bias`` float32 [H] or [H, D]. Computed in float32 or wider.
    """
    wide = rate.dtype
    step = softplus(a.to(wide) + bias).clamp(min=low)
    decay = -rate.exp().view(-1, *[1] * (a.dim() - 2)) * step
    return decay, step if b is None else torch.sigmoid(b.to(wide))

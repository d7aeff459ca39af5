"""The middle of an expert, between its two matrices, by the names in workloads (MoEArgs.experts_activation)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from hardpoint.ops import act_and_mul as gated
from hardpoint.ops import activation as plain
from hardpoint_plugin_api import Reason, UnknownNameError

if TYPE_CHECKING:
    from hardpoint.context import Context

Middle = Callable[[torch.Tensor], torch.Tensor]
"""[T, rows of w13] -> [T, columns of w2]."""

_SUFFIX = "_and_mul"


def names() -> Iterator[str]:
    """Every middle that there is."""
    yield from plain.ACTIVATIONS
    yield from (name if name not in plain.ACTIVATIONS else f"{name}{_SUFFIX}" for name in gated.GATED)


def is_gated(name: str) -> bool:
    """Whether w13 has a gate, and so twice the rows. Raises UnknownNameError."""
    if name in plain.ACTIVATIONS:
        return False
    try:
        gated.gating(name.removesuffix(_SUFFIX))
    except UnknownNameError:
        raise UnknownNameError("activation of experts", name, names()) from None
    return True


def unsupported_activation(name: str | None) -> list[Reason]:
    """The reason of a kernel for all middles that there are, where ``name`` is another; None: it is not known yet."""
    known = tuple(names())
    if name is None or name in known:
        return []
    return [Reason("activation", "activation not supported", wanted=name, supported=", ".join(known))]


def reference_middle(name: str) -> Middle:
    """By the ops' references. Raises UnknownNameError."""
    function = gated.act_and_mul.reference if is_gated(name) else plain.activation.reference
    return partial(function, activation=name.removesuffix(_SUFFIX))


def row_by_row_middle(name: str) -> Middle:
    """By the ops' batch-invariant forms. Raises UnknownNameError."""
    function = gated.row_by_row if is_gated(name) else plain.row_by_row
    return partial(function, activation=name.removesuffix(_SUFFIX))


def bound_middle(ctx: Context, name: str) -> Middle:
    """By the ops as selected. Raises UnknownNameError."""
    op, activation = gated.act_and_mul if is_gated(name) else plain.activation, name.removesuffix(_SUFFIX)
    return partial(op.bind(ctx, activation=activation), activation=activation)

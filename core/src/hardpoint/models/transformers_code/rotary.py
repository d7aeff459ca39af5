"""Rotary embedding in a model's code: the function that rotates queries and keys, served by the selected op.

Angles stay the model's own, whatever their scaling: the op's table is made of the cosines and sines that its code
computes in each step. Attention that runs fused has them from a table of all positions; see rotary_tables.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hardpoint.context import Context
from hardpoint.models.transformers_code.current import Current
from hardpoint.models.transformers_code.rebound import globals_used, rebind
from hardpoint.ops.rotary_embedding import rotary_embedding

_NAME = "apply_rotary_pos_emb"


class Rotation:
    """Takes the place of ``apply_rotary_pos_emb(q, k, cos, sin)`` in the code of one module.

    q [1, H, T, D], k [1, K, T, D], cos and sin [1, T, R] hold each angle twice. ``head_size``: D, once the run on the
    meta device has shown it. The first layer that uses cosines rotates by its own code, and makes the table for the
    others: a kernel that is launched early must find its table.
    """

    def __init__(self, current: Current, own: Callable[..., Any], interleaved: bool, in_a_row: bool) -> None:
        self._current, self._own, self._interleaved, self._in_a_row = current, own, interleaved, in_a_row
        self._op: Callable[..., Any] | None = None
        self.head_size: int | None = None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        """Return q and k, rotated."""
        if self._current.probe is not None and not rest and not more and q.ndim == 4 and q.shape[3] == k.shape[3]:
            self.head_size = q.shape[3]
        if self._op is None or rest or more or self._current.is_traced:
            return self._own(q, k, cos, sin, *rest, **more)
        is_first = id(cos) not in self._current.tables
        angles, rows = self._current.table(cos, sin, self._in_a_row)
        if is_first:
            return self._own(q, k, cos, sin)
        turned = self._op(q[0].transpose(0, 1), k[0].transpose(0, 1), rows, angles, interleaved=self._interleaved)
        return tuple(x.transpose(0, 1)[None] for x in turned)

    def bind(self, ctx: Context) -> bool:
        """Select the op; False where the run on the meta device never came here."""
        if self.head_size is not None:
            scalars = {"interleaved": self._interleaved}
            self._op = rotary_embedding.bind(ctx, head_size=self.head_size, scalars=scalars)
        return self.head_size is not None


def replace_rotation(module: Any, current: Current) -> Rotation | None:
    """Have the code of ``module`` call a Rotation, if it calls a function that rotates as the op does."""
    own = globals_used(module).get(_NAME)
    found = None if own is None else _kind(own)
    if found is None or own is None:
        return None
    rotation = Rotation(current, own, *found)
    rebind(module, {_NAME: rotation})
    return rotation


def _kind(function: Callable[..., Any]) -> tuple[bool, bool] | None:
    """Whether ``function`` rotates interleaved pairs, and whether it is given each angle twice in a row, not in halves.

    It is tried on small tensors; None where it does something else.
    """
    q, k, angles = torch.randn(1, 3, 5, 8), torch.randn(1, 2, 5, 8), torch.rand(1, 5, 4) * 6
    table = torch.cat([angles[0].cos(), angles[0].sin()], -1)
    for interleaved, in_a_row in itertools.product((False, True), repeat=2):
        twice = angles.repeat_interleave(2, -1) if in_a_row else torch.cat([angles, angles], -1)
        rows = (q[0].transpose(0, 1), k[0].transpose(0, 1), torch.arange(5), table)
        wanted = rotary_embedding.reference(*rows, interleaved=interleaved)
        try:
            found = function(q, k, twice.cos(), twice.sin())
        except Exception:  # it wants something else
            continue
        if all(torch.allclose(x[0].transpose(0, 1), y, 1e-4, 1e-5) for x, y in zip(found, wanted, strict=True)):
            return interleaved, in_a_row
    return None


def rotations(model: nn.Module, current: Current) -> list[Rotation]:
    """The rotations that took the place of the model's own."""
    made = (replace_rotation(module, current) for module in model.modules())
    return [rotation for rotation in made if rotation is not None]

"""The state that a model's modules share: Transformers' code passes them tensors alone, and layers want the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hardpoint.models.transformers_code.probe import Probe
from hardpoint_plugin_api import ForwardStep

if TYPE_CHECKING:
    from hardpoint.models.transformers_code.attention import Attend


@dataclass
class Current:
    """Of one model. ``step``: the one that runs. ``probe``: notes calls on the meta device instead; see Probe.

    ``is_traced``: for compilation, which fuses operators better than it fuses layers.
    ``attention`` holds a layer for each call of attention in a step, in order; ``calls`` counts those made so far.
    ``tables``: for each tensor of cosines of the step, by identity, that tensor, the table for the rotary op, and its
    rows; see Rotation. ``products``: those of shared linear layers that are not asked for in full yet, and by how many
    parts; see SharedProduct. ``residual``: what a layer returned, and the residual that is to be added; see FusedLayer.
    """

    step: ForwardStep
    probe: Probe | None = None
    is_traced: bool = False
    attention: list[Attend] = field(default_factory=list)
    calls: int = 0
    products: dict[object, tuple[torch.Tensor | None, int]] = field(default_factory=dict)
    tables: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    residual: tuple[torch.Tensor, torch.Tensor] | None = None

    def take_residual(self, x: torch.Tensor) -> torch.Tensor | None:
        """The residual [T, hidden] that a layer left to be added to x, which it returned; None where x is whole."""
        if self.residual is None or self.residual[0] is not x:
            return None
        _, residual = self.residual
        self.residual = None
        return residual

    def table(self, cos: torch.Tensor, sin: torch.Tensor, in_a_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The table float32 [T, R] for rotary ops, and the row of each token, of cos and sin [1, T, R].

        These hold each angle twice, ``in_a_row`` or in halves. It is made once in a step.
        """
        if (known := self.tables.get(id(cos))) is None:
            known = cos, rotary_pair(cos, sin, in_a_row), torch.arange(cos.shape[1], device=cos.device)
            self.tables[id(cos)] = known
        return known[1], known[2]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The next call of attention in this step, see Attend.forward."""
        layer = self.attention[self.calls]
        self.calls += 1
        attended: torch.Tensor = layer(q, k, v, self.step)
        return attended


def rotary_pair(cos: torch.Tensor, sin: torch.Tensor, in_a_row: bool) -> torch.Tensor:
    """cos and sin [1, T, R], each angle twice, ``in_a_row`` or in halves -> float32 [T, R], R/2 cosines first."""
    half = cos.shape[-1] // 2
    return torch.cat([x[0, :, ::2] if in_a_row else x[0, :, :half] for x in (cos, sin)], -1).float()

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
    parts; see SharedProduct.
    """

    step: ForwardStep
    probe: Probe | None = None
    is_traced: bool = False
    attention: list[Attend] = field(default_factory=list)
    calls: int = 0
    products: dict[object, tuple[torch.Tensor | None, int]] = field(default_factory=dict)
    tables: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The next call of attention in this step, see Attend.forward."""
        layer = self.attention[self.calls]
        self.calls += 1
        attended: torch.Tensor = layer(q, k, v, self.step)
        return attended

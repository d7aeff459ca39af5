"""The verbs by which the core has ranks balance their experts, and the ranks' handlers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hardpoint.engine.control import Verb
from hardpoint.engine.execution.rank_verbs import on_rank
from hardpoint.experts.balance import Balanced, balanced_experts

if TYPE_CHECKING:
    from hardpoint.engine.execution.worker import Worker


@dataclass(frozen=True)
class ForgetLoads(Verb[None]):
    """Count the tokens of each expert from zero."""


@dataclass(frozen=True)
class BalanceLayer(Verb["Balanced | None"]):
    """Balance the experts of the layer that has this ``number`` among those of its stage; None where it has fewer."""

    number: int


@on_rank.register(ForgetLoads)
def forget_loads(verb: ForgetLoads, worker: Worker) -> None:
    """Of every layer."""
    with torch.inference_mode():
        for layer in balanced_experts(worker.blueprint.ctx):
            layer.forget_loads()


@on_rank.register(BalanceLayer)
def balance_layer(verb: BalanceLayer, worker: Worker) -> Balanced | None:
    """All ranks of a stage move the layer's experts together."""
    layers = balanced_experts(worker.blueprint.ctx)
    if verb.number >= len(layers):
        return None
    with torch.inference_mode():
        return layers[verb.number].balance()

"""Decoder layers whose code is x + attention(norm(x)), then x + feed-forward(norm(x)).

Such a layer runs as Hardpoint's own block does: one op adds a residual and norms the sum. The last sum of a layer is
left to the next layer's norm. The layer's code is tried with random numbers in place of its parts (see trial.py). The
run on the meta device shows that no other code reads the hidden states between layers (see residuals.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hardpoint.models.transformers_code.current import Current
from hardpoint.models.transformers_code.fused_attention import FusedAttention
from hardpoint.models.transformers_code.probe import Call, Probe
from hardpoint.models.transformers_code.stand_ins import MLPStandIn, NormStandIn
from hardpoint.models.transformers_code.trial import NormPart, Part, agree, exchanged, numbers, wide

_EPS = 1e-5


@dataclass(frozen=True)
class LayerMatch:
    """A layer by the names of its parts, in the order in which they run."""

    norm: str
    attention: str
    next_norm: str
    feed_forward: str


def might_match(module: nn.Module) -> bool:
    """Whether ``module`` has two norms and two other children, and no tensors of its own."""
    norms = [child for child in module.children() if isinstance(child, NormStandIn)]
    others = [child for child in module.children() if not isinstance(child, NormStandIn)]
    return len(norms) == len(others) == 2 and not module._parameters and not module._buffers


def match_layer(module: nn.Module, call: Call, dtype: torch.dtype) -> LayerMatch | None:
    """How ``module`` fits the head of this file; None where its code computes anything else.

    ``call``: its call in the run on the meta device.
    """
    attention = [name for name, child in module.named_children() if isinstance(child.forward, FusedAttention)]
    norms = [name for name, child in module.named_children() if isinstance(child, NormStandIn)]
    rest = [name for name, _ in module.named_children() if name not in (*attention, *norms)]
    if not might_match(module) or len(attention) != 1:
        return None
    for first, second in itertools.permutations(norms):
        match = LayerMatch(first, attention[0], second, rest[0])
        if all(_computes(module, call, match, each) for each in dict.fromkeys((torch.float32, dtype))):
            return match
    return None


@torch.no_grad()
def _computes(module: nn.Module, call: Call, match: LayerMatch, dtype: torch.dtype) -> bool:
    """Whether ``module`` computes what ``match`` says, with ``dtype``."""
    given = numbers(call, dtype, in_a_row=False)
    if given is None:
        return False
    x = given.hidden.clone()
    norm, next_norm = (NormPart(x.shape[-1], _EPS, dtype) for _ in range(2))
    attended, fed = wide(*x.shape, dtype=dtype), wide(*x.shape, dtype=dtype)
    attention, feed_forward = Part((attended.clone(), None)), Part(fed.clone())
    names = match.norm, match.attention, match.next_norm, match.feed_forward
    parts = dict(zip(names, (norm, attention, next_norm, feed_forward), strict=True))
    try:
        with exchanged(module, parts):
            result = module.forward(*given.call.args, **given.call.kwargs)
    except Exception:  # code of hundreds of models, with parts that are not the model's
        return False
    if any(len(part.calls) != 1 for part in parts.values()):
        return False
    middle = x + attended
    read = [
        (norm.calls[0].hidden, x),
        (attention.calls[0].hidden, norm.normed(x)),
        (next_norm.calls[0].hidden, middle),
        (feed_forward.calls[0].hidden, next_norm.normed(middle)),
        (result, middle + fed),
    ]
    passed = attention.calls[0].kwargs.get("position_embeddings") is given.call.kwargs.get("position_embeddings")
    return passed and all(agree(found, wanted) for found, wanted in read)


class FusedLayer:
    """Takes the place of ``forward`` in a layer that was recognised.

    ``defers``: the next layer, or the last norm, adds the residual to what it returns; see Current.take_residual.
    """

    def __init__(self, module: Any, match: LayerMatch, defers: bool, current: Current) -> None:
        self._current, self._defers = current, defers
        self._own: Callable[..., Any] = module.forward
        names = match.norm, match.attention, match.next_norm, match.feed_forward
        self._norm, self._attention, self._next_norm, self._feed_forward = (getattr(module, name) for name in names)

    def __call__(self, hidden_states: torch.Tensor, **rest: Any) -> Any:
        """hidden_states [1, T, hidden] -> the like. Writes to them."""
        current = self._current
        if current.is_traced:
            return self._own(hidden_states, **rest)
        x, residual = self._norm.layer(hidden_states[0], current.take_residual(hidden_states))
        made, _ = self._attention(x[None], position_embeddings=rest.get("position_embeddings"))
        x, residual = self._next_norm.layer(made[0], residual)
        made = self._feed_forward(x[None])
        if not self._defers:
            return made + residual[None]
        current.residual = made, residual
        return made


def fuse_layers(probe: Probe, dtype: torch.dtype, current: Current) -> int:
    """Have layers run as ``FusedLayer`` where they can; returns how many do. Attention in them runs fused already."""
    calls = probe.calls
    owners, following = probe.residuals.owners(), probe.residuals.next_of()
    matches = {
        module: match
        for module in owners
        if len(calls.get(module, ())) == 1
        and (match := match_layer(module, calls[module][0], dtype)) is not None
        and _returns_tensor(module.get_submodule(match.feed_forward), calls)
    }
    for module, match in matches.items():
        reader = following.get(module)
        defers = reader in owners and (reader in matches or isinstance(reader, NormStandIn))
        module.forward = FusedLayer(module, match, defers, current)
    return len(matches)


def _returns_tensor(feed_forward: nn.Module, calls: Mapping[nn.Module, list[Call]]) -> bool:
    """Whether the run saw it return one tensor; stand-ins do."""
    if isinstance(feed_forward, MLPStandIn):
        return True
    return all(call.returned is torch.Tensor for call in calls.get(feed_forward, ())) and feed_forward in calls

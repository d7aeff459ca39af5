"""Which of our layers computes what a module of Transformers' computes: found by trying.

A class is known by what it does and not by its name: a copy with small random weights is called, and compared. A module
that is not recognised stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hardpoint.ops.activation import ACTIVATIONS
from hardpoint.ops.rms_norm import rms_norm
from hardpoint_plugin_api import MoEArgs

_RELATIVE, _ABSOLUTE = 1e-4, 1e-5


@dataclass(frozen=True)
class NormMatch:
    """An RMS norm; ``plus_one``: one is added to its stored weight."""

    size: int
    eps: float
    plus_one: bool


@dataclass(frozen=True)
class MLPMatch:
    """A feed-forward by the names of its linear layers; ``gate`` is None for an ungated one.

    ``fused``: it is gated, and ``up`` computes both halves, the gate first.
    """

    gate: str | None
    up: str
    down: str
    activation: str
    fused: bool = False

    @property
    def is_gated(self) -> bool:
        """Whether there is a gate."""
        return self.fused or self.gate is not None


@dataclass(frozen=True)
class GateMatch:
    """The activation of experts; ``alpha`` and ``limit`` are those of ``swiglu_oai``, see MoEArgs."""

    activation: str
    alpha: float = MoEArgs.swiglu_alpha
    limit: float = MoEArgs.swiglu_limit


def is_linear(module: nn.Module) -> bool:
    """Whether it is ``nn.Linear``, or a subclass that computes the same."""
    if type(module) is nn.Linear:
        return True
    if not isinstance(module, nn.Linear):
        return False
    bias = torch.randn(3) if module.bias is not None else None
    weight, x = torch.randn(3, 5), torch.randn(2, 5)
    tried = (
        with_parameters(module, weight=weight) if bias is None else with_parameters(module, weight=weight, bias=bias)
    )
    return _agrees(lambda: tried(x), functional.linear(x, weight, bias))


def embedding_multiplier(module: nn.Module) -> float | None:
    """The number by which an embedding multiplies its rows; None for a module that is something else."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return None
    if type(module) is nn.Embedding:
        return 1.0
    weight, ids = torch.randn(4, module.embedding_dim), torch.tensor([[3, 0, 1]])
    tried, rows = with_parameters(module, weight=weight), functional.embedding(ids, weight)
    try:
        factor = float((tried(ids).float() / rows).median())
    except Exception:
        return None
    return factor if torch.allclose(tried(ids).float(), rows * factor, _RELATIVE, _ABSOLUTE) else None


def match_norm(module: nn.Module) -> NormMatch | None:
    """The RMS norm that ``module`` is, if it is one with a weight."""
    weights = dict(module.named_parameters())
    if set(weights) != {"weight"} or weights["weight"].ndim != 1 or any(True for _ in module.children()):
        return None
    size = weights["weight"].shape[0]
    numbers = (x for name, x in vars(module).items() if isinstance(x, float) and ("eps" in name or "epsilon" in name))
    weight, x = torch.rand(size) + 0.5, torch.randn(2, 3, size) * torch.tensor([[[1.0]], [[1e-3]]])
    for eps in numbers:
        for plus_one in (False, True):
            wanted = rms_norm.reference(x, weight + 1 if plus_one else weight, eps=eps)
            tried = with_parameters(module, weight=weight)
            if _agrees(lambda tried=tried: tried(x), wanted):  # type: ignore[misc]  # bound now, called at once
                return NormMatch(size, eps, plus_one)
    return None


def match_gate(function: Callable[[torch.Tensor], torch.Tensor], interleaved: bool) -> GateMatch | None:
    """The activation in ``function``, [T, 2n] -> [T, n], which gates the second half of columns by the first.

    ``interleaved``: columns of both halves stand in turn. Parameters of gpt-oss's gate are looked for in attributes of
    the module that ``function`` is a method of.
    """
    gate, up = torch.linspace(-9, 9, 36).view(4, 9), 5 * torch.randn(4, 9)
    given = torch.stack([gate, up], -1).flatten(1) if interleaved else torch.cat([gate, up], -1)
    for name, ours in ACTIVATIONS.items():
        if _agrees(lambda: function(given), ours(gate) * up):
            return GateMatch(name)
    module = getattr(function, "__self__", None)
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, int | float) and isinstance(limit, int | float):
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        if _agrees(lambda: function(given), g * torch.sigmoid(alpha * g) * (u + 1)):
            return GateMatch("swiglu_oai", float(alpha), float(limit))
    return None


def match_mlp(module: nn.Module) -> MLPMatch | None:
    """The feed-forward that ``module`` is, if that is all its code computes. It is tried with small matrices."""
    linears = {name: child for name, child in module.named_children() if is_linear(child)}
    others = (child for name, child in module.named_children() if name not in linears)
    if len(linears) not in (1 + 1, 1 + 2) or module._parameters or any(_has_parameters(child) for child in others):
        return None
    for down in linears:
        rest = [name for name in linears if name != down]
        hidden, width = _shape(linears[down])
        found = {_shape(linears[name]) for name in rest}
        if found == {(width, hidden)}:
            tried = _try_mlp(module, rest, down, rows=_WIDTH)
        elif found == {(2 * width, hidden)} and len(rest) == 1:
            tried = _try_mlp(module, rest, down, rows=2 * _WIDTH)
        else:
            continue
        if tried is not None:
            return tried
    return None


_HIDDEN, _WIDTH = 6, 8


def _try_mlp(module: nn.Module, rest: list[str], down: str, rows: int) -> MLPMatch | None:
    """Compare ``module``, with small matrices, to the feed-forwards that it may be."""
    tried, small = copy.deepcopy(module), dict[str, nn.Linear]()
    for name in (*rest, down):
        bias = module.get_submodule(name).bias is not None
        small[name] = nn.Linear(_WIDTH, _HIDDEN, bias) if name == down else nn.Linear(_HIDDEN, rows, bias)
        nn.init.normal_(small[name].weight)
        setattr(tried, name, small[name])
    x = torch.randn(1, 3, _HIDDEN)
    for name, activation in ACTIVATIONS.items():
        first = [small[one](x) for one in rest]
        if rows == 2 * _WIDTH:
            gate, up = first[0].chunk(2, -1)
            if _agrees(lambda: tried(x), small[down](activation(gate) * up)):
                return MLPMatch(None, rest[0], down, name, fused=True)
        elif len(rest) == 1 and _agrees(lambda: tried(x), small[down](activation(first[0]))):
            return MLPMatch(None, rest[0], down, name)
        for one in range(len(rest) if len(rest) == 2 else 0):
            if _agrees(lambda: tried(x), small[down](activation(first[one]) * first[1 - one])):
                return MLPMatch(rest[one], rest[1 - one], down, name)
    return None


def _shape(linear: nn.Module) -> tuple[int, int]:
    """Output and input features."""
    weight = linear.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0], weight.shape[1]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def with_parameters(module: nn.Module, **parameters: torch.Tensor) -> nn.Module:
    """A copy of ``module`` with these parameters, on the host."""
    made = copy.deepcopy(module)
    for name, value in parameters.items():
        made._parameters[name] = nn.Parameter(value, requires_grad=False)
    for name, buffer in made.named_buffers(recurse=False):
        made._buffers[name] = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.float()
    return made


@torch.no_grad()
def _agrees(call: Callable[[], torch.Tensor], wanted: torch.Tensor) -> bool:
    try:
        found = call()
    except Exception:  # it wants something else
        return False
    return (
        isinstance(found, torch.Tensor)
        and found.shape == wanted.shape
        and torch.allclose(found, wanted, _RELATIVE, _ABSOLUTE)
    )

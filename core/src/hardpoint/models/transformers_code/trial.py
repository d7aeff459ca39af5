"""Calling a module's own code, without its weights, to see what it computes of what its parts return.

Linear layers and norms of the module are exchanged for parts that return known numbers, so that only the code between
them is tried. A module must not be tried while the run on the meta device is under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hardpoint.models.transformers_code.probe import TOKENS, Call
from hardpoint.ops.rms_norm import rms_norm

_TOKENS = 5
_FAR = 2**20
"""Positions are drawn up to here, so that code which treats far tokens unlike near ones shows it."""


@dataclass(frozen=True)
class Given:
    """Arguments of a trial: ``call`` with numbers in it, ``hidden`` [1, T, n], the angles [T, R / 2] or None."""

    call: Call
    hidden: torch.Tensor
    angles: torch.Tensor | None


def wide(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of many magnitudes, so that code which clamps shows it."""
    return (torch.randn(shape) * 10 ** (4 * torch.rand(shape) - 2)).to(dtype)


def numbers(call: Call, dtype: torch.dtype, in_a_row: bool) -> Given | None:
    """``call`` with random numbers; None where it has arguments whose meaning is not known.

    ``in_a_row``: each angle comes twice in a row, not in halves.
    """
    if not isinstance(call.hidden, torch.Tensor) or call.hidden.ndim != 3 or len(call.args) > 1:
        return None
    hidden, angles = wide(1, _TOKENS, call.hidden.shape[-1], dtype=dtype), None
    made: dict[str, Any] = {}
    for name, value in call.kwargs.items():
        if name == "position_embeddings" and call.angles is not None:
            angles = torch.rand(_TOKENS, call.angles[0].shape[-1] // 2) * 6
            twice = (angles.repeat_interleave(2, -1) if in_a_row else torch.cat([angles, angles], -1))[None]
            made[name] = twice.cos().to(dtype), twice.sin().to(dtype)
        elif name == "hidden_states":
            made[name] = hidden
        elif isinstance(value, torch.Tensor) and not value.is_floating_point():
            if TOKENS not in value.shape or value.dtype not in (torch.int64, torch.int32):
                return None
            shape = [_TOKENS if size == TOKENS else size for size in value.shape]
            made[name] = torch.randint(_FAR // 2, _FAR, shape, dtype=value.dtype)
        elif name == "attention_mask" or value is None or isinstance(value, bool | int | float | str):
            made[name] = value
        else:
            return None
    return Given(Call((hidden,) if call.args else (), made, call.returned), hidden, angles)


class Part(nn.Module):
    """Returns ``returned`` and keeps what it was called with. ``weight``: for code that looks at its dtype."""

    def __init__(self, returned: Any, weight: torch.Tensor | None = None) -> None:
        super().__init__()
        self.returned, self.calls = returned, list[Call]()
        self.weight = torch.empty(0) if weight is None else weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``returned``, whatever the arguments."""
        self.calls.append(Call(args, kwargs, type(self.returned)))
        return self.returned


class NormPart(Part):
    """An RMS norm with a random weight [n]."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(None, (torch.rand(size) + 0.5).to(dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] -> [..., n]."""
        self.calls.append(Call((x,), {}, torch.Tensor))
        return self.normed(x)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """As ``forward``, without a note of it."""
        y: torch.Tensor = rms_norm.reference(x, self.weight, eps=self.eps)
        return y


@contextmanager
def exchanged(module: nn.Module, parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """``module`` with ``parts`` in place of its children of those names."""
    own = {name: module._modules[name] for name in parts}
    module._modules.update(parts)
    try:
        yield
    finally:
        module._modules.update(own)


def agree(found: Any, wanted: torch.Tensor) -> bool:
    """Whether ``found`` is a tensor like ``wanted``, of its dtype. Formats of 16 bits are compared roughly."""
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    relative, absolute = (1e-4, 1e-6) if wanted.dtype == torch.float32 else (3e-2, 1e-2)
    most = float(wanted.abs().max()) if wanted.numel() else 0.0
    return torch.allclose(found, wanted, relative, most * absolute)

"""Checkpoints in one 8-bit float, converted while they load for a device that has another.

``float8_e4m3fnuz`` has the bits of ``float8_e4m3fn`` at half the value. Two codes differ: minus zero is NaN there, and
NaN is 240. So elements keep their bits but for these, and their scales double. Both are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from hardpoint.dtypes import dtype_name
from hardpoint_plugin_api import CheckpointError, Fp8Format, QuantSpec, Scheme, StoredTensor

_FROM, _TO = "float8_e4m3fn", "float8_e4m3fnuz"
_MINUS_ZERO = _NAN = 0x80
_SOURCE_NAN = 0x7F


def on_device(scheme: Scheme, fp8: Fp8Format | None) -> Scheme:
    """``scheme`` with ``float8_e4m3fn`` elements in the device's format where that is ``float8_e4m3fnuz``."""
    if fp8 is None or fp8.dtype != _TO:
        return scheme
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    if _is_scaled(scheme.weight):
        changes |= {"weight": halved, "weight_scale": doubled}
    if _is_scaled(scheme.activation):
        changes["input_scale"] = doubled
    if not changes:
        return scheme
    return replace(
        scheme,
        weight=_converted(scheme.weight),
        activation=_converted(scheme.activation),
        stored=tuple(replace(stored, read=_reader(stored, changes)) for stored in scheme.stored),
    )


def cache_scale_factor(element: str, kv_dtype: str) -> float | None:
    """The factor that brings a checkpoint's scales of the cache, made for ``element``, to a cache of ``kv_dtype``; None
    where they do not serve it."""
    if element == kv_dtype:
        return 1.0
    return 2.0 if (element, kv_dtype) == (_FROM, _TO) else None


def halved(elements: torch.Tensor) -> torch.Tensor:
    """``float8_e4m3fn`` [...] as new ``float8_e4m3fnuz`` of half the values; minus zero becomes zero, NaN stays NaN."""
    bits = elements.view(torch.uint8)
    found = bits.masked_fill(bits == _MINUS_ZERO, 0)
    return found.masked_fill_((bits & 0x7F) == _SOURCE_NAN, _NAN).view(torch.float8_e4m3fnuz)


def doubled(scale: torch.Tensor) -> torch.Tensor:
    """Scales times two, in their dtype. Raises CheckpointError where that cannot hold them."""
    wide = scale.float()
    found = (wide * 2).to(scale.dtype)
    if not torch.equal(found.float().isfinite(), wide.isfinite()):
        raise CheckpointError(
            f"a scale of {float(wide.abs().max()):g} cannot be doubled in {dtype_name(scale.dtype)}, and this device's "
            f"{_TO} needs that; store these scales in float32"
        )
    return found


def _is_scaled(spec: QuantSpec) -> bool:
    return spec.element == _FROM and not spec.is_plain


def _converted(spec: QuantSpec) -> QuantSpec:
    return replace(spec, element=_TO, definition=None) if _is_scaled(spec) else spec


def _reader(
    stored: StoredTensor, changes: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
) -> Callable[[torch.Tensor], Mapping[str, torch.Tensor]]:
    def read(tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {slot: changes[slot](x) if slot in changes else x for slot, x in stored.read(tensor).items()}

    return read

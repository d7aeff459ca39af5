"""Torch dtypes by name, the form in which manifests, requests and configs hold them."""

from __future__ import annotations

import torch

from hardpoint_plugin_api import UnknownNameError

_NAMES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``; raises UnknownNameError, with the nearest name, for anything else."""
    if name not in _NAMES:
        raise UnknownNameError("dtype", name, _NAMES)
    return _NAMES[name]

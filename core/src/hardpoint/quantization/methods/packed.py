"""Integers packed into int32 words, the first in the lowest bits: what GPTQ, AWQ and compressed-tensors store.

On the little-endian machines that this runs on, the bytes of such words along a row are the spec's own form: nibbles,
the low one first, or whole bytes. So 4 and 8 bits are read by viewing memory, without unpacking.
"""

from __future__ import annotations

import torch

from hardpoint_plugin_api import QuantSpec, Scale

_SIGN = {4: 0x88, 8: 0x80}
"""The top bit of each element of a byte: flipping it turns q + 2^(bits - 1) into two's complement, and back."""


def integer_spec(bits: int, symmetric: bool, scale: Scale, permuted: bool = False) -> QuantSpec:
    """Symmetric weights are signed and have no zero point; asymmetric ones are unsigned, as is their zero point."""
    element = f"int{bits}" if symmetric else f"uint{bits}"
    return QuantSpec(element, scales=(scale,), zero_point=not symmetric, permuted=permuted)


def elements_of_rows(words: torch.Tensor, bits: int, symmetric: bool) -> torch.Tensor:
    """int32 [out, in * bits / 32], with 2^(bits - 1) added where symmetric -> ``weight`` of ``integer_spec``."""
    stored = words.contiguous().view(torch.uint8)
    if not symmetric:
        return stored
    signed = stored ^ _SIGN[bits]
    return signed if bits == 4 else signed.view(torch.int8)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits]. Of 3 bits, eight are in three bytes, and n is a multiple of 3."""
    stored = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stored
    if bits == 3:
        first, second, third = stored.int().unflatten(-1, (-1, 3)).unbind(-1)
        octets = first | (second << 8) | (third << 16)
        return torch.stack([octets >> shift & 7 for shift in range(0, 24, 3)], dim=-1).flatten(-2).to(torch.uint8)
    mask = (1 << bits) - 1
    return torch.stack([stored >> shift & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)

"""torchao's formats by its documented layouts: those that it packs on GPUs alone, and settings that fixtures lack."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from tests.quantization.writers import by_blocks, integers
from tests.quantization.writing import Format, Stored

CONFIG: dict[str, Any] = {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig", "_data": {}}}}


def described(kind: str, block: tuple[int, int], **data: Any) -> str:
    """The metadata of a weight of one class."""
    return json.dumps({"_type": kind, "_data": {"block_size": list(block)} | data})


def with_minima(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q from -8 to 7 [N, K], scales and zeros bfloat16 [N, K / group], and the numbers q * scale + zero."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(-1), parts.amax(-1)
    scale = ((high - low).clamp(min=1e-6) / 15).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    q = ((parts - zero.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7)
    numbers = q * scale.float()[..., None] + zero.float()[..., None]
    return q.flatten(1).long(), scale, zero, numbers.flatten(1)


def int4_plain(name: str, weight: torch.Tensor) -> Stored:
    """Int4Tensor: two a byte, the first in the low bits."""
    q, scale, zero, numbers = with_minima(weight, 32)
    stored = ((q[:, ::2] & 15) | (q[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    return {"_weight_qdata": stored, "_weight_scale": scale.t(), "_weight_zero_point": zero.t()}, numbers


def int4_tiles(name: str, weight: torch.Tensor) -> Stored:
    """Int4TilePackedTo4dTensor, word by word as ``matrix_to_m16n8k16_Bint4_layout`` of PyTorch writes them."""
    q, scale, zero, numbers = with_minima(weight, 32)
    rows, columns = q.shape
    pad = (0, -columns % 1024, 0, -rows % 8)
    codes = torch.nn.functional.pad(q + 8, pad)
    bytes_ = (codes[:, ::2] << 4 | codes[:, 1::2]).tolist()
    words = torch.zeros(codes.shape[0] // 8, codes.shape[1] // 128, 32, 4, dtype=torch.int64)
    for n_tile in range(words.shape[0]):
        for k_tile in range(-(-columns // 128)):
            for t in range(32):
                row = bytes_[n_tile * 8 + t // 4]
                for inner in range(0, 8, 2):
                    base = (k_tile * 8 + inner) * 8
                    v = [row[k] for k in (base + t % 4, base + t % 4 + 4, base + 8 + t % 4, base + 12 + t % 4)]
                    low = [byte >> 4 for byte in v] + [byte & 15 for byte in v]
                    words[n_tile, k_tile, t, inner // 2] = sum(x << (4 * place) for place, x in enumerate(low))
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    groups = (0, -rows % 8, 0, codes.shape[1] // 32 - scale.shape[1])
    both = torch.stack([torch.nn.functional.pad(x.t(), groups) for x in (scale, zero)], dim=-1)
    return {"_weight_qdata": words, "_weight_scale_and_zero": both}, numbers


def intx(bits: int, group: int, symmetric: bool) -> Callable[[str, torch.Tensor], Stored]:
    """IntxUnpackedToInt8Tensor: a byte for each element."""

    def write(name: str, weight: torch.Tensor) -> Stored:
        of = torch.arange(weight.shape[1]) // group
        q, zeros, scales, numbers = integers(weight, group, bits, symmetric, torch.bfloat16, of)
        middle = 2 ** (bits - 1)
        stored = {"_weight_qdata": q - middle, "_weight_zero_point": zeros - middle}
        return {key: x.to(torch.int8) for key, x in stored.items()} | {"_weight_scale": scales}, numbers

    return write


def float8_tiles(name: str, weight: torch.Tensor) -> Stored:
    """Float8Tensor with a scale for 32 x 32 elements."""
    scales, each = by_blocks(weight, 32, 32, 448)
    q = (weight / each).to(torch.float8_e4m3fn)
    return {"_weight_qdata": q, "_weight_scale": scales}, q.float() * each


def _intx(bits: int, symmetric: bool) -> Format:
    mapping = {"mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC" if symmetric else "ASYMMETRIC"}}
    config = CONFIG | {"quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": mapping}}}
    target = {"_type": "torch.dtype", "_data": f"int{bits}"}
    metadata = described("IntxUnpackedToInt8Tensor", (1, 32), target_dtype=target, activation_quantization=None)
    name = f"torchao-intx{bits}" + ("" if symmetric else "-asymmetric")
    return Format(name, config, intx(bits, 32, symmetric), metadata=metadata)


TORCHAO = [
    Format("torchao-int4", CONFIG, int4_plain, metadata=described("Int4Tensor", (1, 32), shape=[])),
    Format("torchao-int4-tiles", CONFIG, int4_tiles, metadata=described("Int4TilePackedTo4dTensor", (1, 32), shape=[])),
    _intx(3, True),
    _intx(4, False),
    _intx(8, False),
    Format("torchao-float8-tiles", CONFIG, float8_tiles, metadata=described("Float8Tensor", (32, 32))),
]

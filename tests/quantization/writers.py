"""Writers of the formats, by the layouts that the formats' tools document, with nothing of core's code.

A writer turns one float32 weight [out, in] into the tensors that the format stores for its module, and into the numbers
that those mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tests.quantization.writing import Stored

# Rounding


def by_blocks(weight: torch.Tensor, n: int, k: int, top: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest magnitude of each n x k block over ``top``, [blocks, blocks], and the same for each element."""
    rows, columns = weight.shape
    scales = torch.stack(
        [
            torch.stack([weight[r : r + n, c : c + k].abs().max() / top for c in range(0, columns, k)])
            for r in range(0, rows, n)
        ]
    )
    each = torch.stack([scales[r // n][torch.arange(columns) // k] for r in range(rows)])
    return scales, each


def integers(weight: torch.Tensor, group: int, bits: int, symmetric: bool, dtype: torch.dtype, of: torch.Tensor) -> Any:
    """q in 0 .. 2^bits - 1, zero points and scales [out, groups]: rounded to nearest. ``of`` is each column's group."""
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    count = int(of.max()) + 1
    scales, zeros = torch.zeros(len(weight), count), torch.zeros(len(weight), count, dtype=torch.int64)
    for g in range(count):
        some = weight[:, of == g]
        if symmetric:
            scales[:, g], zeros[:, g] = some.abs().amax(1) / (middle - 1), middle
        else:
            low, high = some.amin(1).clamp(max=0), some.amax(1).clamp(min=0)
            scales[:, g] = (high - low) / top
            zeros[:, g] = (-low / scales[:, g]).round().long()
    scales = scales.to(dtype)
    q = (weight / scales.float()[:, of] + zeros[:, of]).round().clamp(0, top).long()
    numbers = (q - zeros[:, of]).float() * scales.float()[:, of]
    return q, zeros, scales, numbers


def words_along(values: torch.Tensor, axis: int, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack along ``axis`` into int32: element ``order[i]`` of each word's into bits i * bits and up."""
    per = 32 // bits
    values = values.movedim(axis, -1)
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % per)).unflatten(-1, (-1, per))
    words = torch.zeros(values.shape[:-1], dtype=torch.int64)
    for i in range(per):
        words |= (values[..., order[i] if order else i] & (2**bits - 1)) << (i * bits)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, axis)


def threes_along(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Pack 3 bits along ``axis`` into int32: 32 elements in 96 bits of three words, the first in the lowest bits."""
    values = values.movedim(axis, -1)
    words = torch.zeros(*values.shape[:-1], values.shape[-1] * 3 // 32, dtype=torch.int64)
    for element in range(values.shape[-1]):
        for bit in range(3):
            place = 3 * element + bit
            words[..., place // 32] |= (values[..., element] >> bit & 1) << (place % 32)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, axis)


# fp8


def fp8_tensor(name: str, weight: torch.Tensor) -> Stored:
    """AutoFP8: one scale."""
    scale = weight.abs().max() / 448
    q = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def fp8_channel(name: str, weight: torch.Tensor) -> Stored:
    """One scale for each output channel."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    q = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def fp8_block(n: int, k: int) -> Callable[[str, torch.Tensor], Stored]:
    """DeepSeek's tiles."""

    def write(name: str, weight: torch.Tensor) -> Stored:
        scales, each = by_blocks(weight, n, k, 448)
        q = (weight / each).to(torch.float8_e4m3fn)
        return {"weight": q, "weight_scale_inv": scales}, q.float() * each

    return write


def static(
    write: Callable[[str, torch.Tensor], Stored], key: str, scale: float
) -> Callable[[str, torch.Tensor], Stored]:
    """The same with a scale for activations beside the weight."""

    def both(name: str, weight: torch.Tensor) -> Stored:
        stored, numbers = write(name, weight)
        return stored | {key: torch.tensor([scale])}, numbers

    return both


def fp8_inputs(k: int | None = None, scale: float | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Round activations to e4m3: with one given ``scale``, or one for each token, or for each ``k`` of its elements."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        parts = x.split(k or x.shape[-1], dim=-1)
        done = []
        for part in parts:
            s = torch.tensor(scale) if scale is not None else part.abs().amax(-1, keepdim=True) / 448
            s = torch.where(s == 0, 1.0, s)
            done.append((part / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s)
        return torch.cat(done, dim=-1)

    return rounded


def int8_inputs(x: torch.Tensor) -> torch.Tensor:
    """Round activations to int8, one scale for each token."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def int8_static_asymmetric(scale: float, zero: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Round activations to int8 by a given scale and zero point."""
    return lambda x: ((x / scale + zero).round().clamp(-128, 127) - zero) * scale


# gptq and awq


def gptq(group: int, bits: int, symmetric: bool, desc_act: bool, version: str) -> Callable[[str, torch.Tensor], Stored]:
    """AutoGPTQ's tensors. With ``desc_act``, columns' groups are drawn at random, alike for what is merged."""

    def write(name: str, weight: torch.Tensor) -> Stored:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        of = torch.arange(columns) // size
        if desc_act:
            seed = int(name.split(".")[2]) * 10 + ("mlp" in name) + 2 * ("o_proj" in name or "down_proj" in name)
            of = of[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
        q, zeros, scales, numbers = integers(weight, size, bits, symmetric, torch.float16, of)
        pack = threes_along if bits == 3 else partial(words_along, bits=bits)
        stored = {
            "qweight": pack(q.t(), 0),
            "qzeros": pack((zeros.t() - int(version == "gptq")) % 2**bits, 1),
            "scales": scales.t(),
            "g_idx": of.int(),
        }
        return stored, numbers

    return write


def awq(group: int) -> Callable[[str, torch.Tensor], Stored]:
    """AutoAWQ's tensors, version gemm."""

    def write(name: str, weight: torch.Tensor) -> Stored:
        of = torch.arange(weight.shape[1]) // group
        q, zeros, scales, numbers = integers(weight, group, 4, False, torch.float16, of)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        stored = {
            "qweight": words_along(q.t(), 1, 4, order),
            "qzeros": words_along(zeros.t(), 1, 4, order),
            "scales": scales.t(),
        }
        return stored, numbers

    return write


def awq_gemv(group: int) -> Callable[[str, torch.Tensor], Stored]:
    """AutoAWQ's tensors, version gemv: rows in order, the groups' in words of which four belong together."""

    def write(name: str, weight: torch.Tensor) -> Stored:
        of = torch.arange(weight.shape[1]) // group
        q, zeros, scales, numbers = integers(weight, group, 4, False, torch.float16, of)
        padded = [torch.nn.functional.pad(x, (0, -x.shape[1] % 32)) for x in (zeros, scales)]
        stored = {"qweight": words_along(q, 1, 4), "qzeros": words_along(padded[0], 1, 4), "scales": padded[1]}
        return stored, numbers

    return write


# compressed-tensors


def ct_packed(group: int, bits: int, symmetric: bool, actorder: bool = False) -> Callable[[str, torch.Tensor], Stored]:
    """Format pack-quantized: what is packed is q - 2^(bits - 1) in two's complement, with that added again."""

    def write(name: str, weight: torch.Tensor) -> Stored:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        of = torch.arange(columns) // size
        if actorder:
            seed = int(name.split(".")[2]) * 10 + ("mlp" in name) + 2 * ("o_proj" in name or "down_proj" in name)
            of = of[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
        q, zeros, scales, numbers = integers(weight, size, bits, symmetric, torch.bfloat16, of)
        stored = {
            "weight_packed": words_along(q, 1, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = words_along(zeros, 0, bits)
        if actorder:
            stored["weight_g_idx"] = of.int()
        return stored, numbers

    return write


def ct_int8(name: str, weight: torch.Tensor) -> Stored:
    """Format int-quantized, a scale for each channel."""
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    q = (weight / scale).round().clamp(-128, 127)
    return {"weight": q.to(torch.int8), "weight_scale": scale}, q * scale


def ct_int8_asymmetric(name: str, weight: torch.Tensor) -> Stored:
    """The same with zero points, signed."""
    q, zeros, scales, numbers = integers(
        weight, weight.shape[1], 8, False, torch.float32, torch.zeros(weight.shape[1], dtype=torch.int64)
    )
    stored = {"weight": (q - 128).to(torch.int8), "weight_scale": scales}
    return stored | {"weight_zero_point": (zeros - 128).to(torch.int8)}, numbers


def ct_fp8_block(n: int, k: int) -> Callable[[str, torch.Tensor], Stored]:
    """Format float-quantized, strategy block."""

    def write(name: str, weight: torch.Tensor) -> Stored:
        scales, each = by_blocks(weight, n, k, 448)
        q = (weight / each).to(torch.float8_e4m3fn)
        return {"weight": q, "weight_scale": scales}, q.float() * each

    return write


def ct_config(
    format_: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """A compressed-tensors config of one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | more


def ct_numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """One set of quantization args."""
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


# floats with 8-bit scales


def nearest(x: torch.Tensor, element: str) -> torch.Tensor:
    """The nearest numbers of e4m3, or of e2m1: of two, the one with the even code."""
    if element == "e4m3":
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    middles = (values[1:] + values[:-1]) / 2
    code = (x.abs()[..., None] > middles).sum(-1)
    tie = (x.abs()[..., None] == middles).any(-1)
    return values[code + (tie & (code % 2 == 1)).int()] * x.sign()


def powers(top: int, element: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounded to ``element``, whose largest power of two is 2^top, with a power of two for 32 columns (OCP MX 1.0)."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, 32))
        scale = mx_scale(groups, top)
        return (nearest(groups / scale, element) * scale).flatten(-2)

    return rounded


def mx_scale(groups: torch.Tensor, top: int) -> torch.Tensor:
    """The powers of two [..., 1] of ``groups`` [..., 32]."""
    scale: torch.Tensor = 2 ** (groups.abs().amax(-1, keepdim=True).log2().floor() - top)
    return torch.where(scale == 0, 1.0, scale)


def e2m1_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of e2m1 [out, in] as bytes [out, in / 2], the first in the low bits."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = torch.tensor([values.index(abs(x)) for x in numbers.flatten().tolist()]).view(numbers.shape)
    codes = codes + 8 * numbers.signbit()
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def mx(name_: str, top: int, element: str) -> Callable[[str, torch.Tensor], Stored]:
    """Elements under ``name_``, and exponents with 127 added under ``weight_scale``."""

    def write(name: str, weight: torch.Tensor) -> Stored:
        groups = weight.unflatten(-1, (-1, 32))
        scale = mx_scale(groups, top)
        numbers = nearest(groups / scale, element)
        stored = numbers.flatten(-2)
        elements = e2m1_bytes(stored) if element == "e2m1" else stored.to(torch.float8_e4m3fn)
        exponents = (scale.log2() + 127).to(torch.uint8)[..., 0]
        return {name_: elements, "weight_scale": exponents}, (numbers * scale).flatten(-2)

    return write


def nvfp4(outer: str, names: tuple[str, str, str], divides: bool) -> Callable[[str, torch.Tensor], Stored]:
    """Elements, scales of e4m3 for 16 columns, and one float32 that multiplies or ``divides``, under ``names``.

    ``outer`` is the name of such a float32 for activations, with 1 / 32 in it ("": none).
    """

    def write(name: str, weight: torch.Tensor) -> Stored:
        factor = weight.abs().max() / (6 * 448)
        groups = (weight / factor).unflatten(-1, (-1, 16))
        scale = (groups.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn)
        numbers = nearest(groups / scale.float(), "e2m1")
        outers = torch.tensor([float(factor), 1 / 32])
        outers = 1 / outers if divides else outers
        stored = {names[0]: e2m1_bytes(numbers.flatten(-2)), names[1]: scale[..., 0], names[2]: outers[:1]}
        stored |= {outer: outers[1:]} if outer else {}
        return stored, (numbers * scale.float()).flatten(-2) * factor

    return write


def nvfp4_inputs(x: torch.Tensor) -> torch.Tensor:
    """Round activations to e2m1 with scales of e4m3 for 16 of a token's, beneath 1 / 32."""
    groups = (x * 32).unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, 1.0, scale)
    return (nearest(groups / scale, "e2m1") * scale).flatten(-2) / 32


def fp8_vector(name: str, weight: torch.Tensor) -> Stored:
    """Model Optimizer's: the scales of channels are one axis."""
    stored, numbers = fp8_channel(name, weight)
    return stored | {"weight_scale": stored["weight_scale"][:, 0]}, numbers


def ct_four_bits_in_bytes(name: str, weight: torch.Tensor) -> Stored:
    """Format int-quantized with 4 bits."""
    scale = weight.abs().amax(1, keepdim=True) / 7
    q = (weight / scale).round()
    return {"weight": q.to(torch.int8), "weight_scale": scale}, q * scale

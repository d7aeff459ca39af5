"""Matrices as the formats that core reads store them, written bit by bit with nothing of the readers' code.

Codes, scales and zero points are drawn, so that all codes occur; the numbers that they mean are computed from these.
Axes: N rows (out), K columns (in).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.conformance.families.gguf_samples import q4_0, q4_k, q6_k, q8_0, write_blocks

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of one module by their names behind its own, and the weight [N, K] that they mean, float32."""


@dataclass(frozen=True)
class Sample:
    """One variant of a format. ``config`` is the checkpoint's ``quantization_config``.

    ``write(rows, columns, generator)`` draws a matrix. ``shapes`` are [N, K] that the format can hold, also
    with any multiple of N.
    """

    name: str
    config: Mapping[str, Any]
    write: Callable[[int, int, torch.Generator], Written]
    shapes: Sequence[tuple[int, int]] = ((96, 64), (32, 192))


def words(values: torch.Tensor, axis: int, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Whole numbers in int32 words along ``axis``: of each word's elements, number ``order[i]`` has the i-th bits."""
    per = 32 // bits
    lines = values.movedim(axis, -1).tolist() if values.dim() == 2 else [values.tolist()]
    packed = []
    for line in lines:
        line = line + [0] * (-len(line) % per)
        row = []
        for start in range(0, len(line), per):
            word = 0
            for place, element in enumerate(order or range(per)):
                word |= line[start + element] << (place * bits)
            row.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(row)
    return torch.tensor(packed, dtype=torch.int32).movedim(-1, axis).contiguous()


def _draw_scales(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return (0.002 + 0.02 * torch.rand(shape, generator=generator)).to(dtype)


def _each(per_block: torch.Tensor, n: int, k: int, rows: int, columns: int) -> torch.Tensor:
    """Values of blocks of n x k, repeated for each element [rows, columns], float32."""
    return per_block.float()[torch.arange(rows)[:, None] // n, torch.arange(columns)[None] // k]


def _fp8(block: tuple[int, int] | None, *, name: str = "weight_scale", static: bool = False, stored: str = "2d") -> Any:
    def write(rows: int, columns: int, generator: torch.Generator) -> Written:
        n, k = block or (rows, columns)
        n, k = (rows if n == -1 else n), (columns if k == -1 else k)
        elements = (torch.randn(rows, columns, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = _draw_scales((-(-rows // n), -(-columns // k)), generator, torch.float32)
        numbers = elements.float() * _each(scales, n, k, rows, columns)
        shape = {"scalar": (), "1d": (-1,), "2d": scales.shape}[stored]
        tensors = {"weight": elements, name: scales.reshape(shape)}
        return tensors | ({"input_scale": torch.tensor([0.02])} if static else {}), numbers

    return write


def _nvfp4(static: bool) -> Callable[[int, int, torch.Generator], Written]:
    """Two elements e2m1 a byte, the first in the low bits, and a scale e4m3 for 16 columns, of all codes but NaN."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def write(rows: int, columns: int, generator: torch.Generator) -> Written:
        codes = torch.randint(16, (rows, columns), generator=generator)
        scales = torch.randint(127, (rows, columns // 16), generator=generator, dtype=torch.uint8)
        outer = torch.tensor(3 * 2.0**-13)  # products of all three are exact
        numbers = magnitudes[codes & 7] * (1 - 2 * (codes >> 3))
        tensors = {
            "weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
            "weight_scale": scales.view(torch.float8_e4m3fn),
            "weight_scale_2": outer,
        }
        each = tensors["weight_scale"].float().repeat_interleave(16, 1) * outer
        return tensors | ({"input_scale": torch.tensor(0.02)} if static else {}), numbers * each

    return write


def _mxfp8(rows: int, columns: int, generator: torch.Generator) -> Written:
    elements = (torch.randn(rows, columns, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    exponents = torch.randint(112, 124, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    each = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {"weight": elements, "weight_scale": exponents}, elements.float() * each


def _model_opt(algorithm: str, write: Any, shapes: Sequence[tuple[int, int]] = ((96, 64), (32, 192))) -> Sample:
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    return Sample(algorithm, config, write, shapes)


def _integers(rows: int, groups: int, bits: int, symmetric: bool, generator: torch.Generator, columns: int) -> Any:
    """Codes [N, K] and zero points [N, groups], unsigned."""
    codes = torch.randint(1 << bits, (rows, columns), generator=generator)
    middle = torch.full((rows, groups), 1 << (bits - 1))
    return codes, middle if symmetric else torch.randint(1, 1 << bits, (rows, groups), generator=generator)


def _groups_of(columns: int, group: int, mixed: bool, generator: torch.Generator) -> torch.Tensor:
    of = torch.arange(columns) // (columns if group == -1 else group)
    return of[torch.randperm(columns, generator=generator)] if mixed else of


def _gptq(bits: int, group: int, symmetric: bool, *, desc_act: bool = False, version: str = "gptq") -> Sample:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": desc_act}

    def write(rows: int, columns: int, generator: torch.Generator) -> Written:
        of = _groups_of(columns, group, desc_act, generator)
        codes, zeros = _integers(rows, int(of.max()) + 1, bits, symmetric, generator, columns)
        scales = _draw_scales(tuple(zeros.shape), generator, torch.float16)
        numbers = (codes - zeros[:, of]).float() * scales.float()[:, of]
        kept = zeros - 1 if version == "gptq" else zeros
        tensors = {
            "qweight": words(codes.t(), 0, bits),
            "qzeros": words(kept.t(), 1, bits),
            "scales": scales.t().contiguous(),
            "g_idx": of.int(),
        }
        return tensors, numbers

    kind = "symmetric" if symmetric else "asymmetric"
    name = f"{bits}-bit-{group}-{kind}-{version}" + ("-desc-act" if desc_act else "")
    return Sample(name, config | {"checkpoint_format": version}, write)


def _awq(rows: int, columns: int, generator: torch.Generator) -> Written:
    codes, zeros = _integers(rows, columns // 32, 4, False, generator, columns)
    scales, order = _draw_scales(tuple(zeros.shape), generator, torch.float16), (0, 2, 4, 6, 1, 3, 5, 7)
    numbers = (codes - zeros.repeat_interleave(32, 1)).float() * scales.float().repeat_interleave(32, 1)
    tensors = {
        "qweight": words(codes.t(), 1, 4, order),
        "qzeros": words(zeros.t(), 1, 4, order),
        "scales": scales.t().contiguous(),
    }
    return tensors, numbers


def _ct(
    name: str, format_: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, write: Any, **more: Any
) -> Sample:
    numbers = {"symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": numbers | dict(weights),
        "input_activations": inputs and numbers | dict(inputs),
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return Sample(name, config, write, **more)


def _ct_packed(bits: int, group: int, symmetric: bool, mixed: bool = False) -> Sample:
    def write(rows: int, columns: int, generator: torch.Generator) -> Written:
        of = _groups_of(columns, group, mixed, generator)
        codes, zeros = _integers(rows, int(of.max()) + 1, bits, symmetric, generator, columns)
        scales = _draw_scales(tuple(zeros.shape), generator, torch.bfloat16)
        tensors = {
            "weight_packed": words(codes, 1, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros, 0, bits)
        if mixed:
            tensors["weight_g_idx"] = of.int()
        return tensors, (codes - zeros[:, of]).float() * scales.float()[:, of]

    strategy = "channel" if group == -1 else "group"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": symmetric}
    name = f"packed-{bits}-bit-{strategy}" + ("" if symmetric else "-asymmetric") + ("-actorder" if mixed else "")
    return _ct(name, "pack-quantized", weights | ({"actorder": "group"} if mixed else {}), None, write)


def _ct_int8(symmetric: bool) -> Callable[[int, int, torch.Generator], Written]:
    def write(rows: int, columns: int, generator: torch.Generator) -> Written:
        codes = torch.randint(-128, 128, (rows, columns), generator=generator)
        zeros = torch.randint(-20, 20, (rows, 1), generator=generator) * (not symmetric)
        scales = _draw_scales((rows, 1), generator, torch.float32)
        tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
        more = {} if symmetric else {"weight_zero_point": zeros.to(torch.int8)}
        return tensors | more, (codes - zeros).float() * scales

    return write


_GGUF, _WIDE, _NARROW = {"quant_method": "gguf"}, ((32, 256), (5, 512)), ((96, 64), (5, 96))
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_PER_TOKEN = {"strategy": "token", "dynamic": True}
_RAGGED = ((96, 64), (72, 80))

_NVFP4 = (_model_opt("NVFP4", _nvfp4(static=True)), _model_opt("W4A16_NVFP4", _nvfp4(static=False)))

SAMPLES: Mapping[str, Sequence[Sample]] = {
    "fp8": (
        Sample("tensor", _FP8, _fp8(None, stored="scalar"), ((96, 64), (5, 33))),
        Sample("channel", _FP8, _fp8((1, -1)), ((96, 64), (5, 33))),
        Sample("static", _FP8 | {"activation_scheme": "static"}, _fp8(None, static=True, stored="scalar")),
        Sample("tiles", _FP8 | {"weight_block_size": [32, 16]}, _fp8((32, 16), name="weight_scale_inv"), _RAGGED),
    ),
    "gptq": (
        _gptq(4, 32, True),
        _gptq(4, 16, False),
        _gptq(4, 32, False, version="gptq_v2"),
        _gptq(4, 16, False, desc_act=True),
        _gptq(8, 32, True),
        _gptq(8, -1, False),
    ),
    "gguf": (
        Sample("Q4_0", _GGUF, write_blocks("Q4_0", 32, q4_0), _NARROW),
        Sample("Q8_0", _GGUF, write_blocks("Q8_0", 32, q8_0), _NARROW),
        Sample("Q4_K", _GGUF, write_blocks("Q4_K", 256, q4_k), _WIDE),
        Sample("Q6_K", _GGUF, write_blocks("Q6_K", 256, q6_k), _WIDE),
    ),
    "awq": (
        Sample(
            "gemm", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, _awq
        ),
    ),
    "modelopt": (
        _model_opt("FP8", _fp8(None, static=True, stored="scalar"), ((96, 64), (5, 33))),
        _model_opt("FP8_PER_CHANNEL_PER_TOKEN", _fp8((1, -1), stored="1d"), ((96, 64), (5, 33))),
        *_NVFP4,
        _model_opt("MXFP8", _mxfp8),
    ),
    "modelopt_fp4": _NVFP4,
    "modelopt_mxfp8": (_model_opt("MXFP8", _mxfp8),),
    "compressed-tensors": (
        _ct_packed(4, 16, True),
        _ct_packed(4, 32, False),
        _ct_packed(4, 16, True, mixed=True),
        _ct_packed(4, -1, True),
        _ct_packed(8, 32, False),
        _ct(
            "int8-channel",
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {"num_bits": 8, "type": "int"} | _PER_TOKEN,
            _ct_int8(True),
        ),
        _ct(
            "int8-channel-asymmetric",
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
            None,
            _ct_int8(False),
        ),
        _ct(
            "fp8-channel",
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            {"num_bits": 8, "type": "float"} | _PER_TOKEN,
            _fp8((1, -1)),
        ),
        _ct(
            "fp8-tiles",
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]},
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 16, "dynamic": True},
            _fp8((32, 16)),
            shapes=_RAGGED,
        ),
    ),
}
"""By the name that the checkpoint's config gives the method."""

"""The formats of checkpoints: the config of each, its writer, and what it does to inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.quantization.writers import (
    awq,
    awq_gemv,
    ct_config,
    ct_four_bits_in_bytes,
    ct_fp8_block,
    ct_int8,
    ct_int8_asymmetric,
    ct_numbers,
    ct_packed,
    fp8_block,
    fp8_channel,
    fp8_inputs,
    fp8_tensor,
    fp8_vector,
    gptq,
    int8_inputs,
    int8_static_asymmetric,
    mx,
    nvfp4,
    nvfp4_inputs,
    powers,
    static,
)
from tests.quantization.writing import Format, Stored


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "config_groups": {}} | more


_MODELOPT_NVFP4 = ("weight", "weight_scale", "weight_scale_2")
_CT_NVFP4 = ("weight_packed", "weight_scale", "weight_global_scale")
_FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def _gptq(name: str, group: int, bits: int, symmetric: bool, desc_act: bool = False, version: str = "gptq") -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": desc_act}
    return Format(name, config | {"checkpoint_format": version}, gptq(group, bits, symmetric, desc_act, version))


def _packed(name: str, group: int, bits: int, symmetric: bool, actorder: str | None = None) -> Format:
    strategy = "channel" if group == -1 else "group"
    numbers = ct_numbers(bits, "int", strategy, group_size=group, symmetric=symmetric, actorder=actorder)
    return Format(name, ct_config("pack-quantized", numbers, None), ct_packed(group, bits, symmetric, bool(actorder)))


_ASYMMETRIC_INPUTS = ct_numbers(8, "int", "tensor", symmetric=False)


def _with_zero_point(write: Callable[[str, torch.Tensor], Stored]) -> Callable[[str, torch.Tensor], Stored]:
    def both(name: str, weight: torch.Tensor) -> Stored:
        stored, numbers = static(write, "input_scale", 0.02)(name, weight)
        return stored | {"input_zero_point": torch.tensor([-7], dtype=torch.int8)}, numbers

    return both


FORMATS = [
    Format("fp8-tensor", _FP8_CONFIG, fp8_tensor, fp8_inputs()),
    Format("fp8-channel", _FP8_CONFIG, fp8_channel, fp8_inputs()),
    Format(
        "fp8-static",
        _FP8_CONFIG | {"activation_scheme": "static"},
        static(fp8_tensor, "input_scale", 0.01),
        fp8_inputs(scale=0.01),
    ),
    Format(
        "fp8-block",
        _FP8_CONFIG | {"weight_block_size": [32, 32]},
        fp8_block(32, 32),
        fp8_inputs(32),
    ),
    Format(
        "fp8-block-apart",
        _FP8_CONFIG | {"weight_block_size": [128, 128]},
        fp8_block(128, 128),
        fp8_inputs(128),
    ),
    _gptq("gptq-4", 32, 4, True),
    _gptq("gptq-4-asymmetric", 16, 4, False),
    _gptq("gptq-4-v2", 32, 4, False, version="gptq_v2"),
    _gptq("gptq-4-desc-act", 16, 4, False, desc_act=True),
    _gptq("gptq-8", 32, 8, True, desc_act=True),
    _gptq("gptq-3", 32, 3, True),
    _gptq("gptq-2-asymmetric", 32, 2, False),
    _gptq("gptq-8-asymmetric", -1, 8, False),
    Format("awq", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq(32)),
    Format(
        "awq-gemv",
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemv"},
        awq_gemv(32),
    ),
    Format(
        "fp8-act-scale",
        _FP8_CONFIG | {"activation_scheme": "static"},
        static(fp8_tensor, "act_scale", 0.01),
        fp8_inputs(scale=0.01),
    ),
    Format(
        "ct-int8",
        ct_config("int-quantized", ct_numbers(8, "int", "channel"), ct_numbers(8, "int", "token", dynamic=True)),
        ct_int8,
        int8_inputs,
    ),
    Format(
        "ct-int8-asymmetric",
        ct_config("int-quantized", ct_numbers(8, "int", "channel", symmetric=False), _ASYMMETRIC_INPUTS),
        _with_zero_point(ct_int8_asymmetric),
        int8_static_asymmetric(0.02, -7),
    ),
    Format(
        "ct-fp8",
        ct_config("float-quantized", ct_numbers(8, "float", "channel"), ct_numbers(8, "float", "token", dynamic=True)),
        fp8_channel,
        fp8_inputs(),
    ),
    Format(
        "ct-fp8-block",
        ct_config(
            "float-quantized",
            ct_numbers(8, "float", "block", block_structure=[32, 16]),
            ct_numbers(8, "float", "group", group_size=16, dynamic=True),
        ),
        ct_fp8_block(32, 16),
        fp8_inputs(16),
    ),
    Format(
        "ct-w4a8",
        ct_config("int-quantized", ct_numbers(4, "int", "channel"), ct_numbers(8, "int", "token", dynamic=True)),
        ct_four_bits_in_bytes,
        int8_inputs,
    ),
    Format(
        "ct-nvfp4",
        ct_config(
            "nvfp4-pack-quantized",
            ct_numbers(4, "float", "tensor_group", group_size=16),
            ct_numbers(4, "float", "tensor_group", group_size=16, dynamic="local"),
        ),
        nvfp4("input_global_scale", _CT_NVFP4, divides=True),
        nvfp4_inputs,
    ),
    Format(
        "ct-nvfp4a16",
        ct_config("nvfp4-pack-quantized", ct_numbers(4, "float", "tensor_group", group_size=16), None),
        nvfp4("", _CT_NVFP4, divides=True),
    ),
    Format(
        "ct-mxfp4",
        ct_config(
            "mxfp4-pack-quantized",
            ct_numbers(4, "float", "group", group_size=32),
            ct_numbers(4, "float", "group", group_size=32, dynamic=True),
        ),
        mx("weight_packed", 2, "e2m1"),
        powers(2, "e2m1"),
    ),
    Format(
        "ct-mxfp4a16",
        ct_config("mxfp4-pack-quantized", ct_numbers(4, "float", "group", group_size=32), None),
        mx("weight_packed", 2, "e2m1"),
    ),
    Format(
        "ct-mxfp8",
        ct_config(
            "mxfp8-quantized",
            ct_numbers(8, "float", "group", group_size=32),
            ct_numbers(8, "float", "group", group_size=32, dynamic=True, scale_dtype="torch.uint8"),
        ),
        mx("weight", 8, "e4m3"),
        powers(8, "e4m3"),
    ),
    Format("modelopt-fp8", _modelopt("FP8"), static(fp8_tensor, "input_scale", 0.01), fp8_inputs(scale=0.01)),
    Format("modelopt-fp8-channel", _modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fp8_vector, fp8_inputs()),
    Format("modelopt-nvfp4", _modelopt("NVFP4"), nvfp4("input_scale", _MODELOPT_NVFP4, divides=False), nvfp4_inputs),
    Format("modelopt-mxfp8", _modelopt("MXFP8"), mx("weight", 8, "e4m3"), powers(8, "e4m3")),
    _packed("ct-w4a16", 16, 4, True),
    _packed("ct-w4a16-asymmetric", 32, 4, False),
    _packed("ct-w4a16-actorder", 16, 4, True, "group"),
    _packed("ct-w4a16-channel", -1, 4, True),
    _packed("ct-w8a16", 32, 8, True),
    _packed("ct-w8a16-asymmetric", 32, 8, False),
]
"""Every format that is read, by name."""

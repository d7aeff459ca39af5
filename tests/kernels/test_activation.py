"""Activation functions in Triton."""

from __future__ import annotations

import pytest
import torch

from hardpoint.kernels import activation
from hardpoint.kernels.quantize import whole_rows
from hardpoint.ops.act_and_mul import GATED
from hardpoint_plugin_api import ConfigError, UnknownNameError
from tests.kernels.compiling import PAIRS_OF_TARGETS, Job, compile_kernels
from tests.kernels.judged import failures, variants


@pytest.mark.parametrize(("name", "dtype", "device"), variants("activation", "act_and_mul", "act_and_mul_quantized"))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    failed = failures(name, getattr(activation, name), dtype, device)
    assert not failed, "\n".join(failed)


def test_says_what_does_not_fit() -> None:
    with pytest.raises(UnknownNameError, match="unknown activation 'sillu'; did you mean 'silu'"):
        activation.act_and_mul(torch.ones(2, 8), activation="sillu")
    with pytest.raises(UnknownNameError, match="unknown activation 'swiglu_oai'"):
        activation.activation(torch.ones(2, 8), activation="swiglu_oai")
    with pytest.raises(ConfigError, match="act_and_mul: rows must be a gate and as many elements again, got 7"):
        activation.act_and_mul(torch.ones(2, 7), activation="silu")


@pytest.mark.parametrize("targets", PAIRS_OF_TARGETS)
def test_compiles_to_wide_reads_without_spills(targets: tuple[str, ...]) -> None:
    integers = {"n": "i32:16", "x_stride": "i32:16"}
    plain = [
        Job(
            "hardpoint.kernels.activation:activation_kernel",
            {"x_ptr": "*bf16", "out_ptr": "*bf16", **integers},
            {"ACTIVATION": name, "GATE": True, "BLOCK": 1024},
            target,
        )
        for target in targets
        for name in (GATED if target == "sm_90" else ["gelu"])
    ]
    rows, block, warps = whole_rows(14336)
    rounded = [
        Job(
            "hardpoint.kernels.activation:act_and_mul_quantized_kernel",
            {"x_ptr": "*bf16", "codes_ptr": "*i8", "scale_ptr": "*fp32", "num_rows": "i32", **integers},
            {"ACTIVATION": "silu", "LARGEST": 127.0, "GROUP": 0, "ROWS": rows, "BLOCK": block},
            target,
            warps,
            1,
        )
        for target in targets
    ]
    for compiled in compile_kernels([*plain, *rounded]):
        assert compiled.spilled == 0
        assert compiled.registers <= 64
        if compiled.job.target.startswith("sm_"):
            assert compiled.count("ld.global.v4.b32") == compiled.count("ld.global") >= 2

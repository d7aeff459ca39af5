"""Activation functions in Triton."""

from __future__ import annotations

import itertools

import pytest
import torch

from hardpoint.kernels import activation
from hardpoint.kernels.quantize import quantize_rows
from hardpoint.ops.act_and_mul import GATED
from hardpoint_plugin_api import ConfigError, QuantSpec, Scale, UnknownNameError
from tests.kernels.compiling import PAIRS_OF_TARGETS, Job, compile_kernels
from tests.kernels.judged import failures, variants


@pytest.mark.parametrize(("name", "dtype", "device"), variants("activation", "act_and_mul", "act_and_mul_quantized"))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    failed = failures(name, getattr(activation, name), dtype, device)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("n", [3072, 2056, 8200, 16386])
@pytest.mark.parametrize("activation_name", ["silu", "swiglu_oai"])
def test_long_rows_are_rounded_as_short_ones_are(n: int, activation_name: str) -> None:
    spec = QuantSpec("int8", scales=(Scale("float32", (1, -1)),), static=False)
    x = torch.randn(5, 2 * n + 1, generator=torch.Generator().manual_seed(n)).bfloat16()[:, : 2 * n]
    x[1], x[2, n - 1], x[3, n] = 0.0, float("nan"), float("inf")
    codes, scales = activation.act_and_mul_quantized(x, activation=activation_name, spec=spec)
    wanted, wanted_scales = quantize_rows(activation.act_and_mul(x, activation=activation_name), spec=spec)
    torch.testing.assert_close(scales, wanted_scales, rtol=0, atol=0, equal_nan=True)
    finite = scales[:, 0].isfinite()
    assert finite[[0, 1, 4]].all()
    assert torch.equal(codes[finite], wanted[finite])


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
    rows, block, _, warps = activation.tile_of_rows(2048, 0)
    constants = {"ACTIVATION": "silu", "LARGEST": 127.0, "GROUP": 0}
    rounded = [
        Job(
            "hardpoint.kernels.activation:act_and_mul_quantized_kernel",
            {"x_ptr": "*bf16", "codes_ptr": "*i8", "scale_ptr": "*fp32", "num_rows": "i32", **integers},
            {**constants, "ROWS": rows, "BLOCK": block, "PIECES": 1, "WHOLE": True},
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


@pytest.mark.parametrize("targets", PAIRS_OF_TARGETS)
def test_a_long_row_is_read_at_once(targets: tuple[str, ...]) -> None:
    jobs = []
    for target, n in itertools.product(targets, (14336, 3072, 11008)):
        rows, block, pieces, warps = activation.tile_of_rows(n, 0)
        tile = {"ROWS": rows, "BLOCK": block, "PIECES": pieces, "WHOLE": n % block == 0}
        jobs.append(
            Job(
                "hardpoint.kernels.activation:act_and_mul_quantized_kernel",
                {
                    "x_ptr": "*bf16",
                    "codes_ptr": "*fp8e4nv" if target.startswith("sm_") else "*i8",
                    "scale_ptr": "*fp32",
                    "num_rows": "i32",
                    "n": "i32:16",
                    "x_stride": "i32:16",
                },
                {"ACTIVATION": "silu", "LARGEST": 127.0, "GROUP": 0, **tile},
                target,
                warps,
                1,
            )
        )
    for compiled in compile_kernels(jobs):
        assert compiled.spilled == 0
        assert compiled.registers <= 128
        if compiled.job.target.startswith("sm_"):
            pieces = compiled.job.constexprs["PIECES"]
            assert compiled.count("ld.global.v2.b32") == compiled.count("ld.global") == 2 * pieces
            reads, _, rest = compiled.assembly.partition("ex2.approx")
            assert reads.count("ld.global") == 2 * pieces, compiled.assembly
            assert rest.count("bar.sync") == 2

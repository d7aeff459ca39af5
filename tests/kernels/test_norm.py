"""Norms in Triton."""

from __future__ import annotations

import pytest
import torch

from hardpoint.kernels import norm
from hardpoint.kernels.quantize import whole_rows
from tests.kernels.compiling import PAIRS_OF_TARGETS, Job, compile_kernels
from tests.kernels.judged import failures, variants

OPS = ("rms_norm", "add_rms_norm", "rms_norm_quantized", "add_rms_norm_quantized")


@pytest.mark.parametrize(("name", "dtype", "device"), variants(*OPS))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    failed = failures(name, getattr(norm, name), dtype, device)
    assert not failed, "\n".join(failed)


def test_the_sum_takes_the_residuals_place() -> None:
    x, residual = torch.randn(2, 3, 64)
    wanted = x + residual
    _, total = norm.add_rms_norm(x, residual, torch.ones(64), eps=1e-6)
    assert total is residual
    assert torch.equal(total, wanted)


def test_heads_of_a_merged_projection_are_read_where_they_lie() -> None:
    merged, weight = torch.randn(5, 7, 64), torch.randn(64)
    heads = merged[:, 2:5]
    assert torch.equal(norm.rms_norm(heads, weight, eps=1e-6), norm.rms_norm(heads.contiguous(), weight, eps=1e-6))


def test_a_row_has_the_same_bits_among_any_others() -> None:
    x, weight = torch.randn(37, 48), torch.randn(48)
    whole = norm.rms_norm(x, weight, eps=1e-6)
    assert torch.equal(whole[36:], norm.rms_norm(x[36:], weight, eps=1e-6))


def job(n: int, largest: float, group: int, codes: str, target: str) -> Job:
    rows, block, warps = whole_rows(n, group, operands=2)
    pointers = {
        "x_ptr": "*bf16",
        "residual_ptr": "*bf16",
        "weight_ptr": "*bf16",
        "out_ptr": codes,
        "total_ptr": "*bf16",
    }
    integers = dict.fromkeys(("n", "x_stride", "residual_stride", "total_stride"), "i32:16")
    constants = {"heads": 1, "x_head_stride": 0, "ADD": True, "LARGEST": largest, "GROUP": group}
    return Job(
        "hardpoint.kernels.norm:rms_norm_kernel",
        {**pointers, "scale_ptr": "*fp32", **integers, "num_rows": "i32", "eps": "fp32"},
        {**constants, "ROWS": rows, "BLOCK": block, **({} if largest else {"scale_ptr": None})},
        target,
        warps,
        1,
    )


@pytest.mark.parametrize("targets", PAIRS_OF_TARGETS)
def test_compiles_to_wide_reads_without_spills(targets: tuple[str, ...]) -> None:
    jobs = [job(8192, 0.0, 0, "*bf16", target) for target in targets]
    jobs += [job(1024, 127.0, 0, "*i8", target) for target in targets]
    jobs += [job(4096, 448.0, group, "*fp8e4nv", targets[0]) for group in (0, 128)]
    for compiled in compile_kernels(jobs):
        assert compiled.spilled == 0
        assert compiled.registers <= 64
        if compiled.job.target.startswith("sm_"):
            assert compiled.count("ld.global.v4.b32") == compiled.count("ld.global") >= 3
            first, _, rest = compiled.assembly.partition("bar.sync")
            assert first.count("ld.global") == 1, compiled.assembly  # the weight: read before what it is to multiply
            assert rest.partition("bar.sync")[0].count("ld.global") == 2, compiled.assembly

"""The product with 4-bit weights, compiled for devices that are not here: it fits, and codes take the short way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardpoint.kernels.int4_tuning import Int4Configuration, int4_configuration
from tests.kernels.compiling import SHARED_KIB, TARGETS, Compiled, Job, compile_in_stages_that_fit, compile_kernels

_ROWS = (1, 8, 16, 32, 64, 300)
_STEPS = {"bf16": 2.0**-6, "fp16": 2.0**-9, "fp32": 1.0}


def _job(
    target: str,
    cut: Int4Configuration,
    element: str = "bf16",
    group: int = 128,
    zero_point: bool = False,
    whole: bool = True,
    e2m1: bool = False,
) -> Job:
    scales = "*u8" if e2m1 else "*bf16"
    pointers = {"x_ptr": f"*{element}", "words_ptr": "*i32", "scale_ptr": scales, "out_ptr": f"*{element}"}
    absent = dict.fromkeys(("bias_ptr", "zero_point_ptr", "outer_ptr"))
    if zero_point:
        pointers["zero_point_ptr"] = f"*{element}"
        del absent["zero_point_ptr"]
    if group == 16:
        pointers["outer_ptr"] = "*fp32"
        del absent["outer_ptr"]
    constexprs = {
        **absent,
        "x_stride_k": 1,
        "GROUP": group,
        "ZERO_POINT": 8,
        "STEP": 1.0 if e2m1 else _STEPS[element],
        "E2M1": e2m1,
        "TILE": 128 if group <= 32 else 256,
        "WHOLE": whole,
        "EVEN": whole,
        "SPLIT": cut.num_warps if cut.split else 1,
        "PIECES": cut.pieces,
        "BLOCK_M": cut.block_m,
        "BLOCK_N": cut.block_n,
        "TILES_TOGETHER": 1 if cut.block_m < 64 else 8,
        "STAGES": cut.num_stages,
    }
    signature = {**pointers, "num_rows": "i32", **dict.fromkeys(("N", "K", "T", "x_stride_m"), "i32:16")}
    kernel = "hardpoint.kernels.weight_only:_int4_matmul"
    return Job(kernel, signature, constexprs, target, cut.num_warps, cut.num_stages)


def _fits(compiled: Compiled) -> None:
    assert compiled.shared <= SHARED_KIB[compiled.job.target] << 10, compiled
    if compiled.job.target in TARGETS:
        assert compiled.spilled <= 64, compiled  # the widest tile lacks a few registers, beside 256 columns of work


@pytest.mark.parametrize("n", [pytest.param(28672, marks=pytest.mark.nightly), 4096])
def test_codes_go_from_memory_to_matrix_units(n: int) -> None:
    cuts = [int4_configuration(num_rows, n, 2) for num_rows in _ROWS]
    jobs = [_job("sm_90", cut) for cut in cuts] + [_job("sm_90", cut, group=64, zero_point=True) for cut in cuts[::2]]
    for compiled in compile_kernels(jobs):
        _fits(compiled)
        cut = compiled.job.constexprs
        numbers = cut["BLOCK_N"] * 256 * cut["SPLIT"] // (32 * compiled.job.num_warps)
        # Two at a time, none twice, zero points in the same instruction.
        assert compiled.count("fma.rn.bf16x2") == numbers // 2, compiled.assembly
        if cut["SPLIT"] > 1:
            products = numbers // 8 * max(1, cut["BLOCK_M"] // 8)
            assert compiled.count("mma.sync") == products, compiled.assembly
            # Of x and of codes 16 bytes at a time, a group's scales and zero points, and at the end what warps found.
            assert compiled.count("ld.shared") <= numbers // 8 + 12, compiled.assembly
        else:
            assert compiled.count("wgmma.mma_async"), compiled.assembly
            assert not compiled.count("st.shared"), compiled.assembly


@pytest.mark.parametrize(
    "group", [pytest.param(32, id="mxfp4"), pytest.param(16, id="nvfp4", marks=pytest.mark.nightly)]
)
def test_four_bit_floats_compile(group: int) -> None:
    cuts = [int4_configuration(num_rows, 4096, 2) for num_rows in (1, 300)]
    for compiled in compile_kernels([_job("sm_90", cut, group=group, e2m1=True) for cut in cuts]):
        _fits(compiled)


def test_sizes_that_are_no_whole_number_of_blocks() -> None:
    cuts = [int4_configuration(num_rows, 4096, 2) for num_rows in (1, 32)]
    for compiled in compile_kernels([_job("sm_90", cut, group=64, zero_point=True, whole=False) for cut in cuts]):
        _fits(compiled)


def test_numbers_and_pieces_are_moved_16_bytes_at_a_time() -> None:
    pointers = {"words_ptr": "*i32", "scale_ptr": "*bf16", "zero_point_ptr": "*bf16", "out_ptr": "*bf16"}
    signature = {**pointers, **dict.fromkeys(("N", "K", "T"), "i32:16")}
    constexprs = {"GROUP": 128, "ZERO_POINT": 8, "STEP": 2.0**-6, "TILE": 256}
    numbers = Job("hardpoint.kernels.weight_only:_int4_dequantize", signature, constexprs)
    signature = {"found_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16", "num_rows": "i32", "N": "i32:16"}
    pieces = Job("hardpoint.kernels.weight_only:_sum_pieces", signature, {"PIECES": 4, "BLOCK": 1024})
    dequantized, added = compile_kernels([numbers, pieces])
    assert dequantized.count("st.global.v4") == 16 * 256 // (128 * 8), dequantized.assembly
    assert added.count("ld.global.v4") >= 4 * 1024 // (128 * 4), added.assembly


@pytest.mark.nightly
@pytest.mark.parametrize("target", [*TARGETS, "sm_80", "sm_89", "sm_120"])
def test_all_that_is_chosen_fits(target: str) -> None:
    """All that conformance reaches, and more."""
    nvidia = target.startswith("sm_")
    jobs = [
        _job(target, cut if nvidia else replace(cut, num_stages=1), element, group, zero_point, whole)
        for whole in (True, False)
        for element in _STEPS
        for num_rows in (_ROWS if nvidia else (16, 32))
        for group in (0, 32, 64, 128)
        for zero_point in (False, True)
        for n in ((4096, 28672) if num_rows <= 32 else (4096,))
        for cut in [int4_configuration(num_rows, n, 4 if element == "fp32" else 2)]
    ]
    found = compile_in_stages_that_fit(jobs, seconds=1800)
    for compiled in found:
        _fits(compiled)
    if SHARED_KIB[target] > 100:
        assert [compiled.job for compiled in found] == jobs, "in all their stages"

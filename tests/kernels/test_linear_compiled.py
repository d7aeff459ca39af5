"""Linear kernels compiled for devices that are not here: how they read, and that what they hold fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernels.compiling import TARGETS, Compiled, Job, compile_kernels

_SIZES = ("N", "K", "W", "G", "x_stride_m", "weight_stride_n")
_OF_PLAIN = ("x_scale_stride_m", "weight_scale_stride_n", "X_GROUP", "WEIGHT_GROUP")


def _product(kernel: str, target: str, element: str, group: int = 0, num_stages: int = 1, **cut: Any) -> Job:
    """A product of bfloat16, or of both operands' 8-bit elements with scales for groups."""
    pointers = dict.fromkeys(("x_ptr", "weight_ptr"), f"*{element}") | {"out_ptr": "*bf16"}
    constexprs: dict[str, Any] = {"bias_ptr": None, "x_stride_k": 1, "WEIGHT_TILE_ROWS": group or 1, **cut}
    if element == "bf16":
        constexprs |= {"x_scale_ptr": None, "weight_scale_ptr": None, **dict.fromkeys(_OF_PLAIN, 0)}
    else:
        pointers |= dict.fromkeys(("x_scale_ptr", "weight_scale_ptr"), "*fp32")
        constexprs |= {**dict.fromkeys(_OF_PLAIN[:2], 1), **dict.fromkeys(_OF_PLAIN[2:], group)}
    if kernel.endswith("_gemv"):
        constexprs |= {"ROUND_X": False, "LARGEST": 448.0, "UNROLL": 1}
    else:
        constexprs["TILES_TOGETHER"] = 8
    signature = {**pointers, "num_rows": "i32", **dict.fromkeys(_SIZES, "i32:16")}
    warps = 8 if cut.get("BLOCK_M") == 128 else 4
    return Job(f"hardpoint.kernels.{kernel}", signature, constexprs, target, warps, num_stages)


def _int4(kernel: str, target: str, num_stages: int = 1, **cut: Any) -> Job:
    pointers = {
        "x_ptr": "*bf16",
        "words_ptr": "*i32",
        "scale_ptr": "*bf16",
        "zero_point_ptr": "*u8",
        "out_ptr": "*bf16",
    }
    fixed = {"bias_ptr": None, "x_stride_k": 1, "GROUP": 128, "ZERO_POINT": 8, "EXACT": False}
    signature = {**pointers, "num_rows": "i32", **dict.fromkeys(_SIZES, "i32:16")}
    return Job(f"hardpoint.kernels.weight_only:{kernel}", signature, {**fixed, **cut}, target, 4, num_stages)


def _jobs(target: str) -> Iterator[Job]:
    nvidia = target.startswith("sm_")
    yield _product("gemv:_gemv", target, "bf16", ROWS=1, BLOCK_N=8, VECTOR=8, VECTORS=128)
    yield _product("gemv:_gemv", target, "bf16", ROWS=8, BLOCK_N=2, VECTOR=8, VECTORS=128)
    yield _int4("_int4_gemv", target, ROWS=1, BLOCK_N=8, VECTORS=128, UNROLL=1)
    yield _int4("_int4_gemm", target, 5 if nvidia else 1, BLOCK_M=16, BLOCK_N=32, TILES_TOGETHER=8)
    tiles = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128}
    yield _product("gemm:_gemm", target, "bf16", num_stages=6 if nvidia else 1, **tiles)
    if nvidia:  # elsewhere the elements are others
        yield _product("gemv:_gemv", target, "fp8e4nv", ROWS=1, BLOCK_N=8, VECTOR=16, VECTORS=128)
        tiles = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128}
        yield _product("gemm:_gemm", target, "fp8e4nv", group=128, num_stages=3, **tiles)


def _kernel(compiled: Compiled) -> tuple[str, str]:
    return compiled.job.kernel.partition(":")[2], compiled.job.signature["x_ptr"]


@pytest.mark.parametrize(
    "target", [target if target == "sm_90" else pytest.param(target, marks=pytest.mark.nightly) for target in TARGETS]
)
def test_kernels_compile_without_spills(target: str) -> None:
    for compiled in compile_kernels(list(_jobs(target))):
        assert not compiled.spilled, compiled
        shared = 227 if target.startswith("sm_") else 64
        assert compiled.shared <= shared * 1024, compiled
        if _kernel(compiled)[0].endswith("gemv"):
            assert compiled.registers <= 168, compiled  # three programs of four warps in each multiprocessor
        if target == "sm_90" and _kernel(compiled)[0] == "_gemv":
            cut = compiled.job.constexprs
            assert compiled.count("ld.global.v4.b32") >= cut["BLOCK_N"] + cut["ROWS"], compiled.assembly
        if target == "sm_90" and _kernel(compiled) == ("_gemm", "*fp8e4nv"):
            assert ".e4m3.e4m3" in compiled.assembly  # not converted: matrix units take the elements
            assert compiled.count("wgmma.mma_async"), compiled.assembly

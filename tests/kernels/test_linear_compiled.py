"""Linear kernels compiled for devices that are not here: how they read, and that what they hold fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.kernels.compiling import SHARED_KIB, TARGETS, Compiled, Job, compile_kernels

_SIZES = ("N", "K", "x_stride_m", "weight_stride_n")
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
        constexprs["UNROLL"] = 1
    else:
        constexprs = {"WHOLE": True, "TURNED": False, "PARTS": 1, "APART": True, "TILES_TOGETHER": 8} | constexprs
    signature = {**pointers, "num_rows": "i32", **dict.fromkeys(_SIZES, "i32:16")}
    warps = 8 if cut.get("BLOCK_M") == 128 else 4
    return Job(f"hardpoint.kernels.{kernel}", signature, constexprs, target, warps, num_stages)


def _skinny(x: str, weight: str, num_stages: int, group: int = 0, round_x: bool = False, **cut: Any) -> Job:
    pointers = {"x_ptr": f"*{x}", "weight_ptr": f"*{weight}", "out_ptr": "*bf16"}
    constexprs: dict[str, Any] = {
        "bias_ptr": None,
        "x_stride_k": 1,
        "x_scale_stride_m": 1,
        "weight_scale_stride_n": 1,
        "ROUND_X": round_x,
        "LARGEST": 448.0,
        "X_GROUP": group if x == weight else 0,
        "WEIGHT_TILE_ROWS": group or 1,
        "WEIGHT_GROUP": group,
        "SPAN": 32 if weight == "bf16" else 64,
        "STEPS": 1,
        "WHOLE": True,
        "WARPS": 8,
        "EARLY": 0,
        **cut,
    }
    scaled = {"x_scale_ptr": x == weight != "bf16" or round_x, "weight_scale_ptr": weight != "bf16"}
    pointers |= {name: "*fp32" for name, there in scaled.items() if there}
    constexprs |= {name: None for name, there in scaled.items() if not there}
    signature = {**pointers, "num_rows": "i32", **dict.fromkeys(_SIZES, "i32:16")}
    return Job("hardpoint.kernels.skinny:_skinny", signature, constexprs, "sm_90", constexprs["WARPS"], num_stages)


def _jobs(target: str) -> Iterator[Job]:
    nvidia = target.startswith("sm_")
    yield _product("gemv:_gemv", target, "bf16", ROWS=1, BLOCK_N=8, VECTOR=8, VECTORS=128)
    yield _product("gemv:_gemv", target, "bf16", ROWS=8, BLOCK_N=2, VECTOR=8, VECTORS=128)
    tiles = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128}
    yield _product("gemm:_gemm", target, "bf16", num_stages=6 if nvidia else 1, **tiles)
    yield replace(_skinny("bf16", "bf16", 7 if nvidia else 1, X_TILES=4, WEIGHT_TILES=4), target=target)
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
        assert compiled.spilled <= 16, compiled  # what the stack pointer itself needs is no spill
        assert compiled.shared <= SHARED_KIB[target] << 10, compiled
        if _kernel(compiled)[0].endswith("gemv"):
            assert compiled.registers <= 168, compiled  # three programs of four warps in each multiprocessor
        if target == "sm_90" and _kernel(compiled)[0] == "_gemv":
            cut = compiled.job.constexprs
            assert compiled.count("ld.global.v4.b32") >= cut["BLOCK_N"] + cut["ROWS"], compiled.assembly
        if target == "sm_90" and _kernel(compiled) == ("_gemm", "*fp8e4nv"):
            assert ".e4m3.e4m3" in compiled.assembly  # not converted: matrix units take the elements
            assert compiled.count("wgmma.mma_async"), compiled.assembly


def test_few_rows_of_8_bits_are_read_in_wide_copies_and_multiplied_in_one_go() -> None:
    """Of 64 rows or parts of the weight and 16 of x: one wait for matrix units each block of columns."""
    shapes = ((16, 64, 1), (8, 32, 2), (4, 16, 4), (2, 8, 8))
    jobs = [
        _product("gemm:_gemm", "sm_90", "fp8e4nv", 0, 4, BLOCK_M=m, BLOCK_N=n, BLOCK_K=256, TURNED=True, PARTS=parts)
        for m, n, parts in shapes
    ]
    for compiled in compile_kernels(jobs):
        assert compiled.count("wgmma.mma_async.sync.aligned.m64n16k32") == 256 // 32, compiled
        assert compiled.count("wgmma.wait_group") <= 3, compiled.assembly  # in the loop, and behind it
        assert compiled.count("cp.async.cg") == (64 + 16) * 256 // 16 // 128 * 4, compiled  # 16 bytes a thread
        assert compiled.registers <= 64, compiled
        assert compiled.spilled == 0, compiled


def test_skinny_products_convert_each_element_once_and_move_none() -> None:
    few: dict[str, Any] = {"X_TILES": 1, "WEIGHT_TILES": 2}
    many: dict[str, Any] = {"X_TILES": 4, "WEIGHT_TILES": 4}
    jobs = [
        _skinny("fp8e4nv", "fp8e4nv", 6, **few),
        _skinny("fp8e4nv", "fp8e4nv", 6, group=128, **few),
        _skinny("bf16", "fp8e4nv", 5, **few),
        _skinny("bf16", "fp8e4nv", 5, round_x=True, **few),
        _skinny("fp8e4nv", "fp8e4nv", 4, **many),
        _skinny("i8", "i8", 6, **few),
        _skinny("bf16", "i8", 5, **few),
        _skinny("bf16", "bf16", 8, **few),
        _skinny("bf16", "bf16", 7, **many),
        _skinny("bf16", "bf16", 5, X_TILES=4, WEIGHT_TILES=8, WARPS=4),
    ]
    for compiled in compile_kernels(jobs):
        cut, x, weight = compiled.job.constexprs, *(compiled.job.signature[name] for name in ("x_ptr", "weight_ptr"))
        wider = 2 if (x, weight) in (("*bf16", "*fp8e4nv"), ("*bf16", "*i8")) else 1
        lines = cut["WEIGHT_TILES"] + cut["X_TILES"] * wider  # 16 bytes a thread, of each tile
        assert compiled.count("cp.async.cg") == lines * compiled.job.num_stages, compiled.assembly
        products = compiled.assembly.rpartition("mma.sync")[0]
        assert products.count("ld.shared.v4") == lines, compiled.assembly  # straight into the operands' places
        assert not compiled.count("ldmatrix")
        spans = cut["WEIGHT_TILES"] // 2 * cut["X_TILES"]
        assert compiled.count("mma.sync") == spans * (2 if x == "*i8" or weight == "*bf16" else 4)
        pairs = 8 * (cut["WEIGHT_TILES"] + (cut["X_TILES"] if x == weight or cut["ROUND_X"] else 0))
        assert len(re.findall(r"cvt\.rn\.f16x2\.e4m3x2", compiled.assembly)) == (pairs if weight == "*fp8e4nv" else 0)
        assert compiled.spilled <= 16, compiled
        assert compiled.registers * 32 * cut["WARPS"] <= 32768, compiled  # two programs in each multiprocessor

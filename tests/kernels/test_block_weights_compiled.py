"""Products with weights in GGUF's blocks, compiled for devices that are not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.kernels.block_tiles import BlockTiles
from hardpoint.kernels.block_tuning import BlockCut, block_cut, block_table
from hardpoint_plugin_api import QuantSpec
from tests.kernels.compiling import SHARED_KIB, Job, compile_in_stages_that_fit, compile_kernels
from tests.kernels.test_tables import context_of

_ROWS = (1, 64)
_MORE = ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K")
_TARGETS = ("sm_90", "gfx942", "gfx1201")
_MATRIX_UNITS = {"sm_90": ("wgmma.mma_async", "mma.sync"), "gfx942": ("v_mfma",), "gfx1201": ("v_wmma",)}


def _weight(spec: QuantSpec) -> tuple[dict[str, str], dict[str, Any]]:
    """The types of the pointers to a weight, and the constants for it."""
    tiles = BlockTiles(spec, 4096, torch.bfloat16)
    record = "*i64" if (128 // tiles.group) * (16 if len(spec.scales) == 1 else 8) == 64 else "*i32"
    pointers = {"words_ptr": "*i32", "scale_ptr": record}
    there = {"high_ptr": spec.number_format.bits > 4, "outer_ptr": len(spec.scales) > 1, "min_ptr": spec.minimum}
    kinds = {"high_ptr": "*i16", "outer_ptr": "*fp16", "min_ptr": record, "outer_min_ptr": "*fp16"}
    there["outer_min_ptr"] = there["outer_ptr"] and there["min_ptr"]
    pointers |= {name: kinds[name] for name, is_there in there.items() if is_there}
    absent = {name: None for name, is_there in there.items() if not is_there}
    return pointers, {**absent, "GROUP": tiles.group, "BIAS": tiles.bias, "SIGNED": tiles.is_signed}


def _cut(target: str, rows: int) -> BlockCut:
    """By the target's own tables."""
    return block_cut(rows, 4096, 2, block_table(context_of(target)))


def _product(target: str, spec: QuantSpec, cut: BlockCut) -> Job:
    pointers, constexprs = _weight(spec)
    pointers |= {"x_ptr": "*bf16", "out_ptr": "*fp32" if cut.pieces > 1 else "*bf16"}
    constexprs |= {
        "bias_ptr": None,
        "x_stride_k": 1,
        "WHOLE": True,
        "PIECES": cut.pieces,
        "BLOCK_M": cut.block_m,
        "BLOCK_N": cut.block_n,
        "NUMBERS_FIRST": cut.numbers_first,
        "STAGES": cut.num_stages,
    }
    signature = {**pointers, "num_rows": "i32", **dict.fromkeys(("N", "K", "T", "x_stride_m"), "i32:16")}
    kernel = "hardpoint.kernels.block_weights:_block_matmul"
    return Job(kernel, signature, constexprs, target, cut.num_warps, cut.num_stages)


def _numbers(target: str, spec: QuantSpec) -> Job:
    pointers, constexprs = _weight(spec)
    signature = {**pointers, "out_ptr": "*bf16", **dict.fromkeys(("N", "K", "T"), "i32:16")}
    return Job("hardpoint.kernels.block_weights:_block_numbers", signature, constexprs, target, 4, 3)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", *(pytest.param(name, marks=pytest.mark.nightly) for name in _MORE)])
def test_products_run_on_matrix_units_and_fit(name: str) -> None:
    targets = _TARGETS if name == "Q4_K" else ("sm_90",)
    jobs = [_product(target, SPECS[name].spec, _cut(target, rows)) for target in targets for rows in _ROWS]
    for compiled in compile_in_stages_that_fit(jobs, 300.0):
        assert compiled.shared <= SHARED_KIB[compiled.job.target] << 10, compiled
        assert compiled.spilled == 0, compiled
        assert any(map(compiled.count, _MATRIX_UNITS[compiled.job.target])), compiled.assembly


@pytest.mark.parametrize(
    "name", ["Q6_K", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("Q4_K", *_MORE))]
)
def test_numbers_of_whole_weights_compile(name: str) -> None:
    for compiled in compile_kernels([_numbers(target, SPECS[name].spec) for target in _TARGETS]):
        assert compiled.spilled == 0, compiled

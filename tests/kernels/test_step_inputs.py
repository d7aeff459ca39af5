"""Inputs of a step, in Triton."""

from __future__ import annotations

import pytest
import torch

from hardpoint.kernels import step_inputs
from hardpoint.ops.slot_mapping import slot_mapping
from tests.kernels.compiling import PAIRS_OF_TARGETS, Job, compile_kernels
from tests.kernels.judged import failures, variants

SLOW = {"slot_mapping": ("many",), "decode_inputs": ("many",), "embedding_lookup": ("many_tokens",)}


@pytest.mark.parametrize(("name", "dtype", "device"), variants(*SLOW))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    failed = failures(name, getattr(step_inputs, name), dtype, device, without=SLOW)
    assert not failed, "\n".join(failed)


def test_a_long_prompt_is_cut_over_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_inputs, "_TOKENS", 16)
    monkeypatch.setattr(step_inputs, "_MOST_PARTS", 3)
    positions = torch.cat([torch.arange(200), torch.arange(7, 20), torch.zeros(9, dtype=torch.int64)])
    inputs = positions, torch.tensor([2, 0], dtype=torch.int32), torch.tensor([0, 200, 213], dtype=torch.int32)
    tables = torch.randperm(60, dtype=torch.int32).view(3, 20) + 1
    found = step_inputs.slot_mapping(*inputs, tables, block_size=16)
    assert torch.equal(found, slot_mapping.reference(*inputs, tables, block_size=16))


@pytest.mark.parametrize("targets", PAIRS_OF_TARGETS)
def test_compiles_without_spills(targets: tuple[str, ...]) -> None:
    pointers = {"positions_ptr": "*i64", "rows_ptr": "*i32", "starts_ptr": "*i32", "tables_ptr": "*i32"}
    pointers |= dict.fromkeys(("slots_ptr", "lengths_ptr", "block_table_ptr", "mapping_ptr"), "*i32")
    pointers |= dict.fromkeys(("ids_ptr", "last_tokens_ptr"), "*i64") | {"weight_ptr": "*bf16", "out_ptr": "*bf16"}
    counts = dict.fromkeys(("num_tokens", "num_requests", "parts", "rows_stride", "mapping_stride"), "i32")
    strides = [f"{name}_stride" for name in ("table", "tables", "tables_group", "block_table", "block_table_group")]
    signature = {**pointers, **counts, **dict.fromkeys([*strides, "weight_stride", "block_size", "H"], "i32:16")}
    jobs = [
        Job(f"hardpoint.kernels.step_inputs:{name}_kernel", signature, {"BLOCK": block}, target, 4, 1)
        for target in targets
        for name, block in (("slot_mapping", 512), ("decode_inputs", 1024), ("embedding_lookup", 1024))
    ]
    for compiled in compile_kernels(jobs):
        assert compiled.spilled == 0, compiled.job
        assert compiled.registers <= 64, compiled.job

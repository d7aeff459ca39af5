"""Norm, rotation and the write to the cache, in Triton."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from hardpoint.kernels import rope_store
from hardpoint.ops.qk_norm_rope_store import qk_norm_rope_store
from hardpoint.reference.quantized_cache_attention import QuantizedCacheAttention
from hardpoint_plugin_api import AttentionSpec, ConfigError, OpWorkload, PluginLoadError, ScaledLayout, StoreCall
from tests.kernels.compiling import PAIRS_OF_TARGETS, Job, compile_kernels
from tests.kernels.judged import failures, variants


@pytest.mark.parametrize(("name", "dtype", "device"), variants("qk_norm_rope_store", "rotary_embedding", "store_kv"))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    failed = failures(name, getattr(rope_store, name), dtype, device)
    assert not failed, "\n".join(failed)


def drawn(name: str = "random") -> tuple[tuple[Any, ...], Any]:
    cases = qk_norm_rope_store.cases(torch.Generator().manual_seed(0), torch.bfloat16, torch.device("cpu"))
    case = next(case for case in cases if case.name == name)
    return case.args, case.kwargs


def test_queries_and_keys_are_changed_in_place() -> None:
    (q, k, *rest), settings = drawn()
    turned_q, turned_k = rope_store.qk_norm_rope_store(q, k, *rest, **settings)
    assert turned_q is q
    assert turned_k is k


def test_padding_leaves_the_null_page_alone() -> None:
    args, settings = drawn("padded")
    before = args[5]["k"][0].clone()
    rope_store.qk_norm_rope_store(*args, **settings)
    assert torch.equal(args[5]["k"][0], before)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_stores_to_a_scaled_cache_as_its_reference_does(kv_dtype: str, static: bool) -> None:
    (q, k, v, table, positions, plain, slots, *weights), settings = drawn()
    _, block_size, heads, size = plain["k"].shape
    spec = AttentionSpec(heads, heads, size, size**-0.5, "bfloat16", kv_dtype, block_size, static_cache_scales=static)
    backend = QuantizedCacheAttention(cast(Any, None), spec)
    if static:
        backend.set_cache_scales(torch.tensor([0.03]), torch.tensor([0.05]))
    layout, cache_spec = ScaledLayout(), spec.cache_spec
    count = plain["k"].shape[0]
    buffers = [torch.zeros(count * layout.page_bytes(cache_spec, block_size), dtype=torch.uint8) for _ in range(2)]
    mine, wanted = (layout.views(buffer, count, cache_spec, block_size) for buffer in buffers)
    workload = OpWorkload(of="qk_norm_rope_store", dtype="bfloat16", layout=layout.name)
    function = rope_store.scaled_store(cast(Any, None), workload, {"store": backend.store})
    expected = qk_norm_rope_store.reference(q, k, v, table, positions, plain, slots, *weights, **settings)
    turned_q, turned_k = function(q, k, v, table, positions, mine, slots, *weights, **settings)
    torch.testing.assert_close((turned_q, turned_k), expected)
    backend.store(StoreCall(turned_k, v, wanted, slots))
    pages = torch.arange(count)
    ours, theirs = layout.to_logical(mine, pages), layout.to_logical(wanted, pages)
    for name, found in ours.items():
        stored = theirs[name]
        if not static:
            torch.testing.assert_close(mine[f"{name}_scale"], wanted[f"{name}_scale"], rtol=1e-6, atol=0)
        apart = (found - stored).abs() > 1e-5 * stored.abs()
        assert apart.float().mean() < 0.01, "where a quotient lies between two elements either is as near"
        torch.testing.assert_close(found, stored, rtol=0.26, atol=0.05)


def test_says_what_does_not_fit() -> None:
    (q, k, v, table, *rest), settings = drawn()
    with pytest.raises(ConfigError, match="an even number of columns, at most 64, got 66"):
        rope_store.qk_norm_rope_store(q, k, v, torch.ones(50, 66), *rest, **settings)
    with pytest.raises(ConfigError, match=r"values must be as keys, \[9, 2, 64\], got \[9, 1, 64\]"):
        rope_store.qk_norm_rope_store(q, k, v[:, :1], table, *rest, **settings)
    workload = OpWorkload(of="qk_norm_rope_store", dtype="bfloat16", layout="plain_scaled")
    with pytest.raises(PluginLoadError, match="needs the part 'store'"):
        rope_store.scaled_store(cast(Any, None), workload, {})


def job(size: int, rotary: int, normed: bool, element: str, target: str) -> Job:
    heads, pairs, still = rope_store._tile(size, rotary)
    strides = [f"{x}_stride" for x in ("q", "q_head", "k", "k_head", "v", "v_head", "table", "scale_page")]
    strides += [f"{x}_{y}_stride" for x in "kv" for y in ("page", "offset", "slot_head")]
    constants: dict[str, Any] = {"H": 16, "K": 8, "D": size, "R": rotary, "INTERLEAVED": False, "K_CHANGES": True}
    constants |= {"Q_PROGRAMS": -(-16 // heads), "HEADS": heads, "PAIRS": pairs, "STILL": still}
    constants |= {"position_stride": 1, "slot_stride": 1, "scale_offset_stride": 8}
    constants |= {"LARGEST": 0.0 if element == "*bf16" else 448.0}
    if not normed:
        constants |= {"q_weight_ptr": None, "k_weight_ptr": None}
    signature = dict.fromkeys((f"{x}_ptr" for x in ("q", "k", "v", "q_weight", "k_weight")), "*bf16")
    signature |= dict.fromkeys(("cos_sin_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32") | {"positions_ptr": "*i64"}
    signature |= {"k_cache_ptr": element, "v_cache_ptr": element, "slots_ptr": "*i32", "eps": "fp32"}
    signature |= dict.fromkeys([*strides, "block_size"], "i32:16")
    return Job("hardpoint.kernels.rope_store:qk_norm_rope_store_kernel", signature, constants, target, 2, 1)


@pytest.mark.parametrize("targets", PAIRS_OF_TARGETS)
def test_compiles_to_wide_reads_without_spills(targets: tuple[str, ...]) -> None:
    jobs = [job(128, 128, True, "*bf16", target) for target in targets]
    jobs += [job(128, 128, False, "*bf16", targets[0]), job(128, 128, True, "*fp8e4nv", targets[0])]
    jobs += [job(80, 32, True, "*bf16", target) for target in targets]
    for compiled in compile_kernels(jobs):
        assert compiled.spilled == 0
        assert compiled.registers <= 80  # a norm's weights among them, while it waits
        if compiled.job.target == "sm_90" and compiled.job.constexprs["D"] == 128:
            lone = compiled.count("ld.global.b")  # a position and a slot
            assert compiled.count("ld.global.v4.b32") == compiled.count("ld.global") - lone >= 10
            assert lone == 2

"""The compiled ops, each against the op's own reference and cases, at every level of this CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

import pytest
import torch

from hardpoint import ops
from hardpoint.ops.judge import judge
from hardpoint.ops.qk_norm_rope_store import qk_norm_rope_store
from hardpoint.reference.quantized_cache_attention import QuantizedCacheAttention
from hardpoint_plugin_api import AttentionSpec, ConfigError, OpWorkload, QuantSpec, Scale, ScaledLayout, StoreCall
from tests.cpu.building import levels, needs_kernels
from tests.ops.judging import expected_cases

needs_kernels()


_MODULES = {
    "activation": ("act_and_mul", "act_and_mul_quantized", "activation"),
    "norm": ("add_rms_norm", "add_rms_norm_quantized", "rms_norm", "rms_norm_quantized"),
    "quantize": ("quantize_rows",),
    "rope_store": ("qk_norm_rope_store", "rotary_embedding", "store_kv"),
    "logits": ("apply_logit_bias", "apply_penalties", "mask_tokens"),
    "sparse_index": ("store_index_keys", "index_scores", "topk_positions"),
    "recurrence": (
        "causal_conv",
        "gated_rms_norm",
        "linear_recurrence_chunks",
        "linear_recurrence_step",
        "recurrence_gates",
    ),
    "routing": ("grouped_topk", "moe_permute", "moe_unpermute", "route_topk", "topk_sigmoid", "topk_softmax"),
    "sampling": ("argmax_tokens", "philox_uniform", "sample_tokens", "token_logprobs"),
    "step_inputs": ("decode_inputs", "embedding_lookup", "keep_tokens", "slot_mapping"),
}
_INT8_ROWS = "int8@float32:row+dynamic"
_OPS = [(name, module) for module, names in _MODULES.items() for name in names]


def _op(name: str, module: str) -> Any:
    return getattr(import_module(f"hardpoint_cpu.ops.{module}"), name)


@pytest.mark.parametrize("level", levels(), indirect=True)  # changes first: the levels share what is expected
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "module"), _OPS)
def test_meets_the_error_model(level: str, name: str, module: str, dtype: torch.dtype) -> None:
    op = ops.get(name)
    verdicts = [
        judge(op, _op(name, module), case, dtype=dtype, expected=expected)
        for case, expected in expected_cases(op, dtype)
        if str(case.workload.get("spec", _INT8_ROWS)) == _INT8_ROWS
    ]
    assert len(verdicts) > 1
    failed = [str(v) for v in verdicts if not v.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_stores_to_a_scaled_cache_as_its_reference_does(level: str, kv_dtype: str, static: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    case = next(qk_norm_rope_store.cases(generator, torch.bfloat16, torch.device("cpu")))
    q, k, v, table, positions, plain, slots, *weights = case.args
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
    function = _op("scaled_store", "rope_store")(None, workload, {"store": backend.store})
    turned_q, turned_k = function(q, k, v, table, positions, mine, slots, *weights, **case.kwargs)
    backend.store(StoreCall(turned_k, v, wanted, slots))
    assert torch.equal(*buffers)
    plain_q, plain_k = _op("qk_norm_rope_store", "rope_store")(
        q, k, v, table, positions, plain, slots, *weights, **case.kwargs
    )
    assert torch.equal(turned_q, plain_q)
    assert torch.equal(turned_k, plain_k)


def test_says_which_argument_does_not_fit() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(ConfigError, match=r"rms_norm: weight must be float32 \[8\], got bfloat16 \[8\]"):
        _op("rms_norm", "norm")(x, torch.ones(8, dtype=torch.bfloat16), eps=1e-6)
    with pytest.raises(ConfigError, match=r"sample_tokens: top_k must be int32 \[2\], got float32 \[2\]"):
        _op("sample_tokens", "sampling")(x, *[torch.ones(2)] * 5)


@pytest.mark.parametrize("temperature", [1e-38, 1e36, 1e38, 3.4e38])
def test_draws_from_logits_that_are_nearly_one(level: str, temperature: float) -> None:
    """Their spread over the temperature is denormal, or nothing."""
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)) * 3
    rows = logits.shape[0]
    settings = [torch.full((rows,), value) for value in (temperature, 0.9, 0.0)]
    uniform = torch.linspace(0, 0.999, rows)
    top_k = torch.full((rows,), 5, dtype=torch.int32)
    drawn = _op("sample_tokens", "sampling")(logits, settings[0], top_k, *settings[1:], uniform)
    kept = logits.topk(5).indices
    assert (kept == drawn[:, None]).any(1).all()


def test_nothing_in_a_row_with_nan_has_a_probability(level: str) -> None:
    logits = torch.tensor([[1.0, 2.0, float("nan"), 0.0], [1.0, 2.0, 3.0, 0.0]])
    _, logprobs, _ = _op("token_logprobs", "sampling")(logits, torch.tensor([1, 1]), top_n=2)
    assert logprobs[0].isnan().all()
    assert not logprobs[1].isnan().any()


@pytest.mark.parametrize("width", [16, 37])
def test_rounds_rows_whose_scale_is_denormal(level: str, width: int) -> None:
    """The scale itself is rounded then, and quotients exceed 127."""
    spec = QuantSpec("int8", scales=(Scale("float32", (1, -1)),), static=False)
    x = torch.full((1, width), 2.65e-43)
    x[0, ::3] *= -1
    codes, scale = _op("quantize_rows", "quantize")(x, spec=spec)
    wanted, wanted_scale = ops.get("quantize_rows").reference(x, spec=spec)
    assert torch.equal(codes, wanted)
    assert torch.equal(scale, wanted_scale)

"""The kernels of vllm-xpu-kernels through a stand-in, on tensors of the host."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.conformance.families.ops import verdicts
from hardpoint.conformance.site import op_of
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import (
    AttentionSpec,
    BuildContext,
    ExpertsWorkload,
    LinearKernel,
    LinearWorkload,
    OpWorkload,
    PlatformError,
    QuantSpec,
    Scale,
    dequantize,
)
from hardpoint_xpu import vllm_library
from hardpoint_xpu.vllm_attention import XpuFlashAttention
from hardpoint_xpu.vllm_experts import XpuGroupedExperts
from hardpoint_xpu.vllm_library import FLASH, SCHEMAS, operator, reasons_against
from hardpoint_xpu.vllm_linear import XpuFp8WeightLinear, XpuInt4Linear
from hardpoint_xpu.vllm_ops import XpuActAndMul, XpuAddRmsNorm, XpuRmsNorm
from tests.support.attention import MIXED, Piece, brute_force, run_backend
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import SMALL, prompt_logits, small_llm
from tests.support.on_host_settings import without_triton
from tests.support.xpu_stand_in import CALLS
from tests.xpu.conftest import B580

SPEC = AttentionSpec(4, 2, 64, 64**-0.5, "float16", "float16", 16)
CONTEXT: Any = None
"""Ops of the library ask nothing of it."""

PROMPT = list(b"It was a bright cold day, and the clocks")
OWN = {"xpu_kernels", "xpu_flash", "xpu_fp8", "xpu_fp8_weight", "xpu_int4", "xpu_grouped"}
OFF = (
    "op.rms_norm=xpu_kernels",
    "op.add_rms_norm=xpu_kernels",
    "op.act_and_mul=xpu_kernels",
    "attention.causal=xpu_flash",
    "linear=xpu_fp8",
    "linear=xpu_fp8_weight",
    "linear=xpu_int4",
    "experts=xpu_grouped",
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_norms(xpu_kernels: Path, name: str, dtype: torch.dtype) -> None:
    kinds: dict[str, Any] = {"rms_norm": XpuRmsNorm, "add_rms_norm": XpuAddRmsNorm}
    kind = kinds[name]
    workload = OpWorkload(of=name)
    assert not kind.supports(workload, B580)
    found = verdicts(op_of(discover(), name), kind(CONTEXT, workload, {}), dtype)
    assert found
    assert not [fault for verdict in found for fault in verdict.faults]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_activations(xpu_kernels: Path, activation: str) -> None:
    workload = OpWorkload(of="act_and_mul", activation=activation)
    assert not XpuActAndMul.supports(workload, B580)
    op, made = op_of(discover(), "act_and_mul"), XpuActAndMul(CONTEXT, workload, {})
    cases = list(op.cases(torch.Generator().manual_seed(0), torch.bfloat16, torch.device("cpu")))
    tried = [case for case in cases if case.kwargs["activation"] == activation]
    assert tried
    for case in tried:
        wanted = op.reference(*case.args, **case.kwargs)
        torch.testing.assert_close(made(*case.args, **case.kwargs), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pieces", [MIXED, (Piece(4, 4), Piece(4, 9)), (Piece(1, 3),)])
def test_attention_of_a_step(xpu_kernels: Path, pieces: tuple[Piece, ...]) -> None:
    """Against the definition, in a cache full of NaN."""
    assert not XpuFlashAttention.supports(SPEC.workload(), B580)
    out, requests = run_backend(XpuFlashAttention, SPEC, pieces)
    torch.testing.assert_close(out.double(), brute_force(SPEC, requests), rtol=0.002, atol=0.002)


@pytest.mark.parametrize(
    ("options", "kernel", "call"),
    [
        ({}, "xpu_flash", "flash_attn_varlen_func"),
        ({"quantization": "fp8"}, "xpu_fp8", "fp8_gemm"),
        ({"quantization": "fp8", "quantization_options": ("scales=block",)}, "xpu_fp8", "fp8_gemm"),
        ({"quantization": "fp8", "quantization_options": ("activations=none",)}, "xpu_fp8_weight", "fp8_gemm_w8a16"),
        (
            {"quantization": "fp8", "quantization_options": ("activations=none", "scales=block")},
            "xpu_fp8_weight",
            "fp8_gemm_w8a16",
        ),
        ({"quantization": "int4"}, "xpu_int4", "int4_gemm_w4a16"),
        ({"quantization": "int4", "quantization_options": ("symmetric=true",)}, "xpu_int4", "int4_gemm_w4a16"),
    ],
    ids=["plain", "fp8", "fp8-blocks", "w8a16", "w8a16-blocks", "int4", "int4-symmetric"],
)
def test_an_engine(xpu_kernels: Path, b580: None, options: dict[str, Any], kernel: str, call: str) -> None:
    """Tokens are the references'. Where the library's kernels are off, the next ones serve."""

    def run(**more: Any) -> tuple[list[int], torch.Tensor, set[str]]:
        with LLM("demo", **(SMALL | without_triton("xpu", **options) | more)) as llm:
            (output,) = llm.generate(["The whale"], SamplingParams(temperature=0.0, max_tokens=12))
            return list(output.outputs[0].token_ids), prompt_logits(llm, PROMPT), {row.chosen for row in llm.table.rows}

    tokens, logits, chosen = run()
    assert {kernel, "xpu_flash", "xpu_kernels"} <= chosen
    assert {call, "rms_norm", "fused_add_rms_norm", "silu_and_mul"} <= CALLS.keys()
    calls = dict(CALLS)
    expected_tokens, expected, chosen = run(deny=(*without_triton("xpu")["deny"], *OFF))
    assert not chosen & OWN
    assert calls == CALLS
    assert tokens == expected_tokens
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min() > 0.999


@pytest.mark.parametrize(
    "options", [{}, {"quantization": "fp8", "quantization_options": ("activations=none", "scales=block")}]
)
def test_an_engine_with_experts(xpu_kernels: Path, b580: None, tmp_path: Path, options: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    write_checkpoint(tmp_path, "qwen3_moe", head_dim=64, num_hidden_layers=2, **sizes)

    def run(**more: Any) -> tuple[list[list[int]], set[str]]:
        with small_llm(tmp_path, **(without_triton("xpu", max_num_batched_tokens=16, **options) | more)) as llm:
            prompts = [{"prompt_token_ids": ids} for ids in random_prompts(2, 30, shortest=10)]
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
            return [list(o.outputs[0].token_ids) for o in outputs], {row.chosen for row in llm.table.rows}

    tokens, chosen = run()
    assert {"xpu_grouped", "xpu_flash"} <= chosen
    assert {"remap_hidden_states", "cutlass_grouped_gemm_interface", "moe_gather"} <= CALLS.keys()
    expected, chosen = run(deny=(*without_triton("xpu")["deny"], *OFF))
    assert not chosen & OWN
    assert tokens == expected


@pytest.mark.parametrize("element", ["int4", "uint4"])
@pytest.mark.parametrize("zero_point", [False, True])
def test_weights_of_4_bits_are_read_back(element: str, zero_point: bool) -> None:
    spec = QuantSpec(element, scales=(Scale("float16", (1, 32)),), zero_point=zero_point)
    workload = LinearWorkload(spec=(spec, QuantSpec("float16")), in_features=64, out_features=16)
    kernel = XpuInt4Linear(cast(BuildContext, SimpleNamespace(dtype=torch.float16)), workload)
    weights = {"weight": torch.randint(0, 256, (16, 32), dtype=torch.uint8), "weight_scale": torch.rand(16, 2).half()}
    if zero_point:
        low, dtype = (-8, torch.int8) if element == "int4" else (0, torch.uint8)
        weights["weight_zero_point"] = torch.randint(low, low + 16, (16, 2), dtype=dtype)
    packed, expected = kernel.prepack(weights), dequantize(weights, spec, torch.float16)
    assert torch.equal(kernel.unpack(packed), expected)
    ids = torch.tensor([5, 0, 5])
    assert torch.equal(kernel.rows(packed, ids), expected[ids])


def test_sizes_that_no_operator_takes_are_refused(xpu_kernels: Path) -> None:
    def linear(kernel: type[LinearKernel], n: int, k: int, block: tuple[int, int], element: str) -> set[str]:
        spec = QuantSpec(element, scales=(Scale("float32", block),), zero_point=element == "uint4")
        workload = LinearWorkload(spec=(spec, QuantSpec("float16")), in_features=k, out_features=n)
        return {reason.code for reason in kernel.supports(workload, B580)}

    assert linear(XpuFp8WeightLinear, 256, 256, (128, 128), "float8_e4m3fn") == set()
    assert linear(XpuFp8WeightLinear, 200, 128, (128, 128), "float8_e4m3fn") == {"in-features", "out-features"}
    assert linear(XpuFp8WeightLinear, 200, 100, (1, -1), "float8_e4m3fn") == set()
    assert linear(XpuInt4Linear, 20, 96, (1, 64), "uint4") == {"out-features", "group"}
    experts = ExpertsWorkload(
        top_k=3, num_experts=2000, hidden_size=60, intermediate_size=64, activation="silu_and_mul"
    )
    codes = [reason.code for reason in XpuGroupedExperts.supports(experts, B580)]
    assert codes == ["hidden-size", "top-k", "num-experts"]


@pytest.mark.parametrize("name", [*SCHEMAS, FLASH])
def test_another_schema_is_refused(xpu_kernels: Path, name: str) -> None:
    """Without the module being loaded."""
    assert not reasons_against(name)
    module, _, own = name.rpartition(".")
    file = xpu_kernels / (f"{module}.py" if module else "flash_attn_interface.py")
    file.rename(xpu_kernels / "kept")
    vllm_library._schema_reason.cache_clear()
    vllm_library._flash_reason.cache_clear()
    (missing,) = reasons_against(name)
    assert missing.message.startswith("this vllm-xpu-kernels has no")
    vllm_library._schema_reason.cache_clear()
    vllm_library._flash_reason.cache_clear()
    file.write_text(f"{own}(Tensor X) -> Tensor" if module else f"def {own}(q, k): ...")
    (reason,) = reasons_against(name)
    assert (reason.code, reason.message) == ("schema", f"{own} of this vllm-xpu-kernels takes other arguments")
    assert reason.supported in ("q, k", f"{own}(Tensor X) -> Tensor")
    assert vllm_library.PACKAGE not in sys.modules


def test_a_library_that_cannot_be_loaded_is_an_error(xpu_kernels: Path) -> None:
    (xpu_kernels / "_xpu_C.py").write_text("raise ImportError('libsycl.so.9: cannot open shared object file')")
    importlib.invalidate_caches()
    with pytest.raises(PlatformError, match=r"vllm_xpu_kernels._xpu_C cannot be loaded: libsycl.so.9: cannot open"):
        operator("_xpu_C.fp8_gemm")


def test_the_stand_in_refuses_what_the_real_one_does(xpu_kernels: Path) -> None:
    """So that a test above could have failed."""
    a, b = torch.ones(3, 64).half(), torch.full((16, 8), 0x11111111, dtype=torch.int32).t()
    scale, zero = torch.ones(2, 16).half(), torch.zeros(1, dtype=torch.int8)
    good: dict[str, Any] = {
        "A": a,
        "B": b,
        "bias": None,
        "B_scale": scale,
        "B_zp": zero,
        "group_size": 32,
        "g_idx": None,
    }
    multiply = operator("_xpu_C.int4_gemm_w4a16")
    assert multiply(**good).eq(64).all()
    for change, error in (
        ({"A": a.float()}, AssertionError),
        ({"B": b.contiguous()}, AssertionError),
        ({"B_scale": scale.t()}, AssertionError),
        ({"B_zp": zero.int()}, AssertionError),
        ({"group_size": 64}, AssertionError),
        ({"bias": torch.ones(16)}, AssertionError),
        ({"weight": b}, RuntimeError),
    ):
        with pytest.raises(error):
            multiply(**{**good, **change})

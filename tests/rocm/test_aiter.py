"""AITER's kernels through a stand-in, on tensors of the host."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.conformance.families.ops import verdicts
from hardpoint.conformance.site import op_of
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import PlatformError
from hardpoint_rocm import aiter_kernels
from hardpoint_rocm.aiter_library import SIGNATURES, function, reason_against
from tests.support import aiter_stand_in
from tests.support.aiter_calls import CALLS
from tests.support.engines import SMALL, prompt_logits
from tests.support.on_host_settings import without_triton

PROMPT = list(b"It was a bright cold day, and the clocks")


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms(aiter: None, name: str, dtype: torch.dtype) -> None:
    op = op_of(discover(), name)
    found = verdicts(op, getattr(aiter_kernels, name), dtype)
    assert found
    assert not [fault for verdict in found for fault in verdict.faults]


@pytest.mark.parametrize(
    ("options", "kernel", "call"),
    [
        ({"quantization": "int8"}, "aiter_int8", "gemm_a8w8"),
        ({"quantization": "fp8"}, "aiter_fp8", "gemm_a8w8"),
        (
            {"quantization": "fp8", "quantization_options": ("scales=block",)},
            "aiter_fp8_blocks",
            "gemm_a8w8_blockscale",
        ),
    ],
    ids=["int8", "fp8", "fp8-blocks"],
)
def test_an_engine(aiter: None, mi300x: None, options: dict[str, Any], kernel: str, call: str) -> None:
    """Norms and products are AITER's; tokens are the references'. Where AITER is off, the next kernels serve."""

    def run(**more: Any) -> tuple[list[int], torch.Tensor, set[str]]:
        with LLM("demo", **(SMALL | without_triton("rocm", **options, **more))) as llm:
            (output,) = llm.generate(["The whale"], SamplingParams(temperature=0.0, max_tokens=16))
            chosen = {f"{row.of or row.family} {row.chosen}" for row in llm.table.rows}
            return list(output.outputs[0].token_ids), prompt_logits(llm, PROMPT), chosen

    tokens, logits, chosen = run()
    assert {f"linear {kernel}", "rms_norm aiter", "add_rms_norm aiter"} <= chosen
    calls = dict(CALLS)
    assert {call, "rmsnorm2d_fwd_with_add"} <= calls.keys()
    off = (*without_triton("rocm")["deny"], f"linear={kernel}", "op.rms_norm=aiter", "op.add_rms_norm=aiter")
    off += ("attention.causal=aiter_paged", "attention.causal=aiter_unified")
    others, expected, chosen = run(deny=off)
    assert {"linear emulated", "rms_norm reference"} <= chosen
    assert calls == CALLS
    assert tokens == others
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min() > 0.999


@pytest.mark.parametrize("name", SIGNATURES)
def test_another_signature_is_refused(aiter: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    inner, _, own = name.rpartition(".")
    module = importlib.import_module(f"aiter.{inner}" if inner else "aiter")
    assert reason_against(name) is None
    monkeypatch.setattr(module, own, lambda input, scale: None)
    reason = reason_against(name)
    assert reason is not None
    assert (reason.code, reason.supported) == ("aiter-signature", "input, scale")
    with pytest.raises(PlatformError, match="takes other arguments"):
        function(name)
    monkeypatch.delattr(module, own)
    gone = reason_against(name)
    assert gone is not None
    assert gone.message == f"this AITER has no function {name}"


def test_the_stand_in_refuses_what_the_real_one_does(aiter: None) -> None:
    """So that a test above could have failed."""
    x, w = torch.ones(3, 32, dtype=torch.int8), torch.ones(16, 32, dtype=torch.int8)
    scales = torch.ones(3, 1), torch.ones(1, 16)
    good: dict[str, Any] = {"XQ": x, "WQ": w, "x_scale": scales[0], "w_scale": scales[1], "dtype": torch.bfloat16}
    assert aiter_stand_in.gemm_a8w8(**good).shape == (3, 16)
    for change, error in (
        ({"XQ": x.to(torch.float8_e4m3fn)}, RuntimeError),
        ({"dtype": torch.float32}, RuntimeError),
        ({"x_scale": scales[0].half()}, RuntimeError),
        ({"bias": torch.ones(16)}, RuntimeError),
        ({"XQ": torch.ones(32, 3, dtype=torch.int8).t()}, AssertionError),
        ({"x": x}, TypeError),
    ):
        with pytest.raises(error):
            aiter_stand_in.gemm_a8w8(**{**good, **change})

"""AITER's latent attention and experts through a stand-in, on tensors of the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.reference.latent_attention import ReferenceLatentAttention
from hardpoint_plugin_api import BuildContext, DeviceInfo, ExpertsWorkload, LatentSpec
from hardpoint_rocm.aiter_experts import AiterFusedExperts
from hardpoint_rocm.aiter_latent import AiterLatentAttention
from hardpoint_rocm.platform import RocmPlatform, describe_arch
from tests.support.aiter_calls import CALLS
from tests.support.attention import MIXED, Piece
from tests.support.checkpoints import DEEPSEEK_V2, random_prompts, write_checkpoint
from tests.support.engines import small_llm
from tests.support.latent import run_latent_backend
from tests.support.on_host_settings import without_triton

SPEC = LatentSpec(16, 512, 64, 192**-0.5, "bfloat16", "bfloat16", 16)
DEEPSEEK = DEEPSEEK_V2 | {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
}
OFF = ("attention.latent=aiter_latent", "experts=aiter_fused", "experts=aiter_fused_fp8")


@pytest.mark.parametrize("pieces", [MIXED, MIXED[:4], MIXED[4:]])
def test_latent_attention_of_a_step(aiter: None, pieces: tuple[Piece, ...]) -> None:
    assert not AiterLatentAttention.supports(SPEC.workload(), describe_arch("MI300X", "gfx942"))
    found, expected = (
        run_latent_backend(kind, SPEC, pieces) for kind in (AiterLatentAttention, ReferenceLatentAttention)
    )
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_other_numbers_of_heads_are_refused(aiter: None) -> None:
    (reason,) = AiterLatentAttention.supports(replace(SPEC, num_heads=20).workload(), describe_arch("MI300X", "gfx942"))
    assert (reason.code, reason.wanted, reason.supported) == ("num-heads", "20", "16 or 128")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_tiles_are_read_back(aiter: None, dtype: torch.dtype) -> None:
    kernel = AiterFusedExperts(cast(BuildContext, SimpleNamespace(dtype=torch.bfloat16)), ExpertsWorkload())
    weights = {"w13.weight": torch.randn(2, 256, 128).to(dtype), "w2.weight": torch.randn(2, 128, 128).to(dtype)}
    packed = kernel.prepack(weights)
    assert not torch.equal(packed["w2.weight"].float(), weights["w2.weight"].float())
    found = kernel.unpack(packed)
    assert all(torch.equal(found[name].float(), weights[f"{name}.weight"].float()) for name in ("w13", "w2"))


def engine(folder: Path, **more: Any) -> tuple[list[list[int]], set[str]]:
    """Tokens of prompts that are read in several steps, and what was chosen."""
    with small_llm(folder, **without_triton("rocm", max_num_batched_tokens=24, **more)) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(3, 40, shortest=20)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        return [list(o.outputs[0].token_ids) for o in outputs], {row.chosen for row in llm.table.rows}


def test_an_engine_with_latents_and_experts(aiter: None, mi300x: None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v2", **DEEPSEEK)
    tokens, chosen = engine(tmp_path, dtype="bfloat16")
    assert {"aiter_latent", "aiter_fused"} <= chosen
    assert {"mla_decode_fwd", "mla_prefill_fwd", "fused_moe"} <= CALLS.keys()
    expected, chosen = engine(tmp_path, dtype="bfloat16", deny=(*without_triton("rocm")["deny"], *OFF))
    assert not chosen & {"aiter_latent", "aiter_fused"}
    assert tokens == expected


def test_an_engine_with_experts_of_8_bits(
    aiter: None, mi300x: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On gfx950 alone, whose format AITER rounds to as core does."""
    sizes: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8}
    write_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2, num_experts_per_tok=2, **sizes)
    settings: dict[str, Any] = {"quantization": "fp8", "dtype": "bfloat16"}
    _, chosen = engine(tmp_path, **settings)
    assert "aiter_fused_fp8" not in chosen
    info: DeviceInfo = describe_arch("AMD Instinct MI355X", "gfx950")
    host = replace(info, torch_type="cpu", memory_bytes=2**30, features=info.features - {"pinned_memory"})
    monkeypatch.setattr(RocmPlatform, "detect", classmethod(lambda cls: host))
    CALLS.clear()
    tokens, chosen = engine(tmp_path, **settings)
    assert "aiter_fused_fp8" in chosen
    assert "fused_moe" in CALLS
    expected, _ = engine(tmp_path, **settings, deny=(*without_triton("rocm")["deny"], *OFF))
    assert tokens == expected

"""AITER's attention through a stand-in, on tensors of the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import AttentionBackend, AttentionSpec, CacheSpec, ConfigError, EngineLimits, SelectionError
from hardpoint_rocm.aiter_attention import AiterFlashAttention, AiterPagedAttention, parts_within
from hardpoint_rocm.aiter_shuffled import AiterShuffledAttention, ShuffledLayout
from hardpoint_rocm.aiter_unified import AiterUnifiedAttention
from hardpoint_rocm.platform import describe_arch
from tests.support import aiter_stand_in
from tests.support.aiter_calls import CALLS
from tests.support.attention import MIXED, Piece, PluginConfigOnly, brute_force, run_backend
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import prompt_logits, small_llm
from tests.support.on_host_settings import without_triton

MI300X = describe_arch("AMD Instinct MI300X", "gfx942")
SPEC = AttentionSpec(4, 2, 128, 128**-0.5, "float16", "float16", 16)
DECODES, PROMPTS = MIXED[:4], MIXED[4:]
WHOLE = (Piece(9, 9), Piece(20, 20))
SHUFFLED = {"plugin_config": {"rocm": {"kv_layout": "shuffle"}}}


_LIMITS = EngineLimits(max_tokens=64, max_sequences=8, max_model_len=64)


@dataclass(frozen=True)
class _Context(PluginConfigOnly):
    limits: EngineLimits = _LIMITS


@pytest.mark.parametrize(
    ("backend", "spec", "pieces", "call"),
    [
        (AiterFlashAttention, SPEC, WHOLE, "flash_attn_varlen_func"),
        (AiterFlashAttention, SPEC, PROMPTS, "mha_batch_prefill_func"),
        (AiterFlashAttention, replace(SPEC, soft_cap=5.0), PROMPTS, "mha_batch_prefill_func"),
        (AiterFlashAttention, replace(SPEC, alibi=True, dtype="bfloat16", kv_dtype="bfloat16"), WHOLE, ""),
        (AiterPagedAttention, SPEC, DECODES, "paged_attention_v1"),
        (AiterPagedAttention, replace(SPEC, alibi=True, block_size=32), DECODES, "paged_attention_v1"),
        (AiterUnifiedAttention, SPEC, MIXED, "unified_attention"),
        (AiterUnifiedAttention, replace(SPEC, block_size=544, head_size=64, sinks=True), MIXED, "unified_attention"),
        (AiterUnifiedAttention, replace(SPEC, block_size=32, alibi=True), DECODES, "unified_attention"),
        (AiterShuffledAttention, SPEC, MIXED, "pa_fwd_asm"),
        (AiterShuffledAttention, replace(SPEC, scale=0.25), WHOLE, "flash_attn_varlen_func"),
        (AiterShuffledAttention, replace(SPEC, scale=0.25), DECODES, "pa_fwd_asm"),
        (AiterShuffledAttention, replace(SPEC, kv_dtype="float8_e4m3fnuz"), MIXED, "pa_fwd_asm"),
    ],
)
def test_a_step(
    aiter: None, backend: type[AttentionBackend], spec: AttentionSpec, pieces: tuple[Piece, ...], call: str
) -> None:
    """Against the definition, in a cache full of NaN."""
    assert not backend.supports(spec.workload(), MI300X)
    slopes = torch.linspace(0.1, 0.4, 4) if spec.alibi else None
    sinks = torch.linspace(-1.0, 2.0, 4) if spec.sinks else None
    ctx = _Context({"rocm": {"aiter_workspace_mib": 0}})
    out, requests = run_backend(backend, spec, pieces, sinks=sinks, alibi_slopes=slopes, ctx=ctx)
    assert call in {*CALLS, ""}
    coarse = {"float8_e4m3fnuz": 0.06, "bfloat16": 0.01}.get(spec.kv_dtype, 0.002)
    expected = brute_force(spec, requests, sinks, slopes)
    torch.testing.assert_close(out.double(), expected, rtol=coarse, atol=coarse)


def test_steps_too_large_for_the_workspace_are_divided() -> None:
    assert parts_within([10, 300, 600, 256], room=4) == [(slice(0, 2), 300), (slice(2, 3), 600), (slice(3, 4), 256)]
    assert parts_within([5000], room=1) == [(slice(0, 1), 5000)]
    assert parts_within([1] * 5, room=100) == [(slice(0, 5), 1)]


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fnuz"])
def test_pages_go_through_the_shuffled_layout(dtype: str) -> None:
    spec = CacheSpec.keys_values(2, 128, dtype, scaling="row" if "8" in dtype[:6] else "none")
    layout = ShuffledLayout()
    buffer = torch.zeros(3 * layout.page_bytes(spec, 16), dtype=torch.uint8)
    views = layout.views(buffer, 3, spec, 16)
    pages = torch.tensor([2, 1])
    planes = {name: torch.randn(2, 16, 2, 128).half() for name in "kv"}
    layout.from_logical(views, pages, planes)
    first = layout.to_logical(views, pages)
    for name, x in planes.items():
        torch.testing.assert_close(first[name].float(), x.float(), rtol=0.07 if "8" in dtype[:6] else 0, atol=0.001)
    unit = 16 if "8" in dtype[:6] else 8
    one = views["k"].view(torch.uint8 if unit == 16 else torch.float16)[2, 1, 3, 5]
    assert one.shape == (unit,)
    layout.from_logical(views, pages, first)
    again = layout.to_logical(views, pages)
    assert all(torch.equal(first[name], again[name]) for name in "kv")


def engine(folder: Path, **more: Any) -> tuple[list[list[int]], dict[str, str]]:
    """Tokens of prompts that are read in several steps, and what was chosen for attention, by phase."""
    with small_llm(folder, **without_triton("rocm", max_num_batched_tokens=24, max_num_seqs=4, **more)) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(3, 40, shortest=20)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        rows = [row for row in llm.table.rows if row.family == "attention"]
        return [list(o.outputs[0].token_ids) for o in outputs], {row.range: row.chosen for row in rows}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose heads are as large as AITER's kernels want."""
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(folder, "qwen3", head_dim=128, num_hidden_layers=2)
    return folder


def test_an_engine(aiter: None, mi300x: None, checkpoint: Path) -> None:
    """Tokens are the reference's. Where AITER is off, the next backend serves."""
    tokens, chosen = engine(checkpoint)
    assert set(chosen.values()) == {"aiter_flash", "aiter_paged"}
    assert {"flash_attn_varlen_func", "mha_batch_prefill_func", "paged_attention_v1"} <= CALLS.keys()
    names = ("aiter_flash", "aiter_paged", "aiter_unified")
    off = (*without_triton("rocm")["deny"], *(f"attention.causal={name}" for name in names))
    expected, chosen = engine(checkpoint, deny=off)
    assert set(chosen.values()) == {"reference"}
    assert tokens == expected


@pytest.mark.parametrize("block_size", [16, 32, 544])
def test_an_engine_with_pages_of_other_sizes(aiter: None, mi300x: None, checkpoint: Path, block_size: int) -> None:
    """AITER's other kernels keep the sizes that they take; tokens are the reference's."""
    pages = {"block_size": block_size}
    tokens, chosen = engine(checkpoint, **pages)
    flash, paged = block_size == 16, block_size <= 32
    wanted = ["aiter_paged" if paged else "aiter_unified", "aiter_flash" if flash else "aiter_unified"]
    assert set(chosen.values()) == set(wanted)
    assert ("unified_attention" in CALLS) == ("aiter_unified" in wanted)
    CALLS.clear()
    asked, chosen = engine(checkpoint, **pages, attention_backend="aiter_unified")
    assert set(chosen.values()) == {"aiter_unified"}
    assert CALLS.keys() & {"flash_attn_varlen_func", "paged_attention_v1"} == set()
    expected, _ = engine(checkpoint, **pages, attention_backend="reference")
    assert tokens == asked == expected


def test_pages_and_groups_that_tiles_do_not_take(aiter: None) -> None:
    def refused(**changes: Any) -> list[str]:
        return [r.code for r in AiterUnifiedAttention.supports(replace(SPEC, **changes).workload(), MI300X)]

    assert refused(block_size=48) == refused(block_size=8) == ["block-size"]
    assert refused(num_heads=260) == ["head-group"]
    assert refused(kv_dtype="bfloat16") == ["kv-dtype"]
    assert not refused(block_size=96)


def test_an_engine_with_the_shuffled_layout(aiter: None, mi300x: None, checkpoint: Path) -> None:
    tokens, chosen = engine(checkpoint, **SHUFFLED)
    assert set(chosen.values()) == {"aiter_shuffled"}
    assert {"flash_attn_varlen_func", "pa_fwd_asm"} <= CALLS.keys()
    expected, _ = engine(checkpoint, attention_backend="reference")
    assert tokens == expected


def test_an_engine_with_the_shuffled_layout_in_8_bits(aiter: None, mi300x: None, checkpoint: Path) -> None:
    """Logits, not tokens: keys of this step are read as they come, which the reference reads from the cache."""

    def logits(**more: Any) -> torch.Tensor:
        with small_llm(checkpoint, **without_triton("rocm", kv_cache_dtype="fp8", **more)) as llm:
            return prompt_logits(llm, list(range(40, 80)), chunk=13)

    found, expected = logits(**SHUFFLED), logits(attention_backend="reference_quantized_cache")
    assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).min() > 0.995


def test_the_shuffled_layout_says_what_it_does_not_take(aiter: None, mi300x: None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mistral", head_dim=128, num_hidden_layers=1, sliding_window=16)
    with pytest.raises(SelectionError, match=r"(?s)aiter_shuffled.*sliding_window not supported"):
        small_llm(tmp_path, **without_triton("rocm", **SHUFFLED))
    with pytest.raises(SelectionError, match=r"(?s)aiter_shuffled.*head_size not supported"):
        LLM("demo", **without_triton("rocm", **SHUFFLED))
    with pytest.raises(ConfigError, match=r"--rocm.kv-layout wide: it is not one of plain, shuffle"):
        LLM("demo", **without_triton("rocm", plugin_config={"rocm": {"kv_layout": "wide"}}))
    refused = AiterShuffledAttention.supports(replace(SPEC, kv_dtype="bfloat16", num_heads=64).workload(), MI300X)
    assert {reason.code for reason in refused} == {"kv-dtype", "head-group"}


def test_the_stand_in_refuses_what_the_real_one_does() -> None:
    """So that a test above could have failed."""
    q, cache = torch.ones(2, 4, 128).half(), torch.ones(3, 2, 16, 2, 128).half()
    good: dict[str, Any] = {
        "out": torch.empty_like(q),
        "workspace_buffer": torch.empty(2 * 4 * (256 + 8), dtype=torch.uint8),
        "query": q,
        "key_cache": cache[:, 0],
        "value_cache": cache[:, 1],
        "scale": 1.0,
        "block_tables": torch.tensor([[1], [2]], dtype=torch.int32),
        "cu_query_lens": None,
        "context_lens": torch.tensor([3, 16], dtype=torch.int32),
        "max_context_len": 16,
        "alibi_slopes": None,
        "kv_cache_dtype": "auto",
        "kv_cache_layout": "NHD",
        "logits_soft_cap": 0.0,
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
    }
    assert aiter_stand_in.paged_attention_v1(**good).eq(1).all()
    wide = torch.ones(2, 3, dtype=torch.int32)[:, :2]
    for change, error in (
        ({"workspace_buffer": torch.empty(8)}, ValueError),
        ({"query": q.float()}, ValueError),
        ({"max_context_len": 17}, ValueError),
        ({"block_tables": wide}, AssertionError),
        ({"context_lens": torch.tensor([3, 16])}, AssertionError),
        ({"query": q.transpose(0, 1).contiguous().transpose(0, 1)}, AssertionError),
        ({"value_cache": cache[:, 1].contiguous()}, AssertionError),
        ({"softmax_scale": 1.0}, TypeError),
    ):
        with pytest.raises(error):
            aiter_stand_in.paged_attention_v1(**{**good, **change})

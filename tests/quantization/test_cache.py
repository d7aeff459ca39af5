"""Caches of 8-bit elements: rounded by a scale for each token and head, or by the checkpoint's own scales."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hardpoint.reference.quantized_cache_attention import QuantizedCacheAttention
from hardpoint_plugin_api import AttentionBackend, AttentionSpec, BuildContext, CacheSpec, ScaledLayout, SelectionError
from tests.quantization.fixtures.base_model import FIXTURES, calibration, write_tokenizer
from tests.quantization.writing import change_tensors
from tests.support.attention import MIXED, brute_force, run_backend
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, scale=0.3, dtype="float32", kv_dtype="int8", block_size=16
)
TOPS = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0, "float8_e5m2": 57344.0}


def rounded(x: torch.Tensor, dtype: str, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Keys or values [T, K, D] as a cache holds them."""
    if scale is None:
        scale = x.abs().amax(-1, keepdim=True) / TOPS[dtype]
    scaled = (x / scale).clamp(-TOPS[dtype], TOPS[dtype])
    return (scaled.round() if dtype == "int8" else scaled.to(getattr(torch, dtype)).float()) * scale


@pytest.mark.parametrize("dtype", TOPS)
@pytest.mark.parametrize("changes", [{}, {"window": 9}, {"soft_cap": 5.0, "head_size": 33}], ids=str)
def test_a_scale_for_each_token(dtype: str, changes: dict[str, float]) -> None:
    spec = replace(SPEC, kv_dtype=dtype, **changes)  # type: ignore[arg-type]  # one dict for fields of several types
    out, requests = run_backend(QuantizedCacheAttention, spec, MIXED)
    expected = brute_force(spec, [(q, rounded(k, dtype), rounded(v, dtype)) for q, k, v in requests])
    assert (out - expected).abs().max() < 1e-5


def test_given_scales() -> None:
    given = torch.tensor([0.02]), torch.tensor([0.005])

    class Scaled(QuantizedCacheAttention):
        """The backend as a layer sets it up."""

        def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
            super().__init__(ctx, spec)
            self.set_cache_scales(*given)

    spec = replace(SPEC, kv_dtype="float8_e4m3fn", static_cache_scales=True)
    out, requests = run_backend(Scaled, spec, MIXED)
    expected = brute_force(
        spec, [(q, rounded(k, spec.kv_dtype, given[0]), rounded(v, spec.kv_dtype, given[1])) for q, k, v in requests]
    )
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [1, 3])
def test_the_layout(heads: int) -> None:
    """Pages are a little over a quarter of float32's; pages taken out and put back elsewhere hold the same numbers."""
    layout, spec = ScaledLayout(), CacheSpec.keys_values(heads, 33, "int8", scaling="row")
    size = layout.page_bytes(spec, 5)
    assert 5 * heads * (2 * 33 + 8) <= size < 5 * heads * (2 * 33 + 8) + 3 + layout.alignment
    views = layout.views(torch.zeros(4 * size, dtype=torch.uint8), 4, spec, 5)
    k, v = torch.randn(2, 2, 5, heads, 33)
    layout.from_logical(views, torch.tensor([1, 3]), {"k": k, "v": v})
    once = layout.to_logical(views, torch.tensor([1, 3]))
    layout.from_logical(views, torch.tensor([2, 0]), once)
    torch.testing.assert_close(once, layout.to_logical(views, torch.tensor([2, 0])), rtol=2e-7, atol=0)
    assert (once["k"] - k).abs().max() <= k.abs().max() / 254 * 1.01


@pytest.mark.parametrize(("dtype", "most"), [("fp8_e4m3", 0.4), ("fp8_e5m2", 0.8), ("int8", 0.1)])
def test_an_engine(tmp_path: Path, dtype: str, most: float) -> None:
    """Logits are near those of the whole cache, do not depend on chunks, and the cache holds far more tokens."""
    write_checkpoint(tmp_path, "qwen3", head_dim=32)
    ids = random_prompts(1, 60, seed=4, shortest=60)[0]
    with small_llm(tmp_path, kv_cache_memory="1MiB") as llm:
        plain, pages = prompt_logits(llm, ids), llm.core.scheduler.cache.pool.num_usable
    with small_llm(tmp_path, kv_cache_memory="1MiB", kv_cache_dtype=dtype) as llm:
        got = prompt_logits(llm, ids, chunk=7)
        assert (got - prompt_logits(llm, ids)).abs().max() < 1e-4
        assert llm.core.scheduler.cache.pool.num_usable > 3 * pages
        assert {row.chosen for row in llm.table.rows if row.family == "attention"} == {"cpu_native_quantized_cache"}
    assert 1e-3 < (got - plain).abs().max() < most


def test_scales_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "llmcompressor"
    shutil.copytree(FIXTURES / "llmcompressor-fp8-static", folder)
    write_tokenizer(folder)
    ids = calibration()[0].tolist()
    with small_llm(folder, dtype="float32") as llm:
        plain = prompt_logits(llm, ids)
    with small_llm(folder, dtype="float32", kv_cache_dtype="fp8_e4m3") as llm:
        got = prompt_logits(llm, ids)
        backend = llm.core.blueprint.ctx.cache_users.users[0].planner
        assert isinstance(backend, AttentionBackend)
        stored = load_file(folder / "model.safetensors")["model.layers.0.self_attn.v_scale"]
        assert backend.cache_scales[1] == stored.float()
    assert (got - plain).abs().max() > 1e-5
    assert torch.nn.functional.cosine_similarity(got, plain, dim=-1).min() > 0.98


def test_scales_as_they_were_stored_before_august_2024(tmp_path: Path) -> None:
    """The projections' own ``output_scale``: the checkpoint loads without them in use, too."""
    folder = tmp_path / "llmcompressor"
    shutil.copytree(FIXTURES / "llmcompressor-fp8-static", folder)
    write_tokenizer(folder)
    ids = calibration()[0].tolist()
    with small_llm(folder, dtype="float32", kv_cache_dtype="fp8_e4m3") as llm:
        expected = prompt_logits(llm, ids)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("attn.k_scale", "attn.v_scale"))]:
            tensors[name.replace("_scale", "_proj.output_scale")] = tensors.pop(name)

    change_tensors(folder, rename)
    with small_llm(folder, dtype="float32", kv_cache_dtype="fp8_e4m3") as llm:
        assert torch.equal(prompt_logits(llm, ids), expected)
    small_llm(folder, dtype="float32").close()


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(
        SelectionError, match=r"cpu_paged: it cannot serve attention .*(?s:.*)wanted int8, supported float"
    ):
        small_llm(tmp_path, kv_cache_dtype="int8", attention_backend="cpu_paged")

"""A cache of NVFP4: elements of e2m1, e4m3 scales for groups of 16, a float32 scale for a layer's keys or values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hardpoint import SamplingParams
from hardpoint.cli.main import run
from hardpoint.reference.nvfp4_cache_attention import Nvfp4CacheAttention
from hardpoint_plugin_api import (
    NVFP4,
    AttentionBackend,
    AttentionSpec,
    BuildContext,
    CacheSpec,
    GroupScaledLayout,
    SelectionError,
    StoreCall,
)
from tests.quantization.formats import FORMATS
from tests.quantization.writing import write_quantized
from tests.support.attention import MIXED, PluginConfigOnly, brute_force, run_backend
from tests.support.checkpoints import DEEPSEEK_V2, random_prompts, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=32, scale=0.3, dtype="float32", kv_dtype=NVFP4, block_size=16
)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
TEXT = "The whale, my dear Watson, is a truth universally acknowledged."


def dequantized(x: torch.Tensor, outer: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` [..., D] in NVFP4 and back, number by number; ties go to the even code."""
    groups = (x if outer is None else x / outer).reshape(-1, 16)
    result = torch.empty_like(groups)
    for row, group in zip(result, groups, strict=True):
        scale = (group.abs().max() / torch.tensor(6.0)).clamp(max=448.0).to(torch.float8_e4m3fn).float()
        scale = torch.where(scale == 0, torch.tensor(1.0), scale)
        distances = ((group / scale).abs()[:, None] - E2M1).abs()
        nearest = distances == distances.amin(1, keepdim=True)
        codes = torch.where(nearest[:, ::2].any(1), 2 * nearest[:, ::2].int().argmax(1), nearest.int().argmax(1))
        row[:] = torch.copysign(E2M1[codes], group) * scale
    result = result.view_as(x)
    return result if outer is None else result * outer


@pytest.mark.parametrize("outer", [None, 0.03])
def test_dequantized_values_are_a_plain_computations_to_the_bit(outer: float | None) -> None:
    """Magnitudes below the least scale and beyond the largest; zeros; numbers in the middle of two elements."""
    x = torch.randn(5, 2, 32) * torch.tensor([1e-5, 0.1, 1.0, 300.0, 1e5])[:, None, None]
    x[1, 0, :16] = 0.0
    x[2, 1, :16] = torch.tensor([6.0, 5.0, 2.5, 1.75, -0.25, -0.75, 3.5, 1.25, *[0.0] * 8])
    spec = replace(SPEC, block_size=5, static_cache_scales=outer is not None)
    backend = Nvfp4CacheAttention(cast(BuildContext, PluginConfigOnly({})), spec)
    given = None if outer is None else torch.tensor([outer])
    if given is not None:
        backend.set_cache_scales(given, 2 * given)
    size = backend.layout.page_bytes(spec.cache_spec, 5)
    views = backend.layout.views(torch.zeros(2 * size, dtype=torch.uint8), 2, spec.cache_spec, 5)
    backend.store(StoreCall(x, 3 * x, views, torch.arange(5, 10, dtype=torch.int32)))
    k, v = backend.read(views, torch.tensor([1]))
    assert torch.equal(k[0], dequantized(x, given))
    assert torch.equal(v[0], dequantized(3 * x, None if given is None else 2 * given))


@pytest.mark.parametrize("changes", [{}, {"window": 9}, {"soft_cap": 5.0, "head_size": 48}], ids=str)
def test_attention_over_what_is_stored(changes: dict[str, Any]) -> None:
    spec = replace(SPEC, **changes)
    out, requests = run_backend(Nvfp4CacheAttention, spec, MIXED)
    expected = brute_force(spec, [(q, dequantized(k), dequantized(v)) for q, k, v in requests])
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [1, 3])
def test_the_layout(heads: int) -> None:
    """Nine bytes for 16 elements; what is taken out and put back elsewhere holds the same numbers."""
    layout, spec = GroupScaledLayout(), replace(SPEC, num_kv_heads=heads, head_size=48).cache_spec
    size = layout.page_bytes(spec, 5)
    assert 5 * heads * 2 * (24 + 3) <= size < 5 * heads * 2 * (24 + 3) + 16 + layout.alignment
    views = layout.views(torch.zeros(4 * size, dtype=torch.uint8), 4, spec, 5)
    k, v = torch.randn(2, 2, 5, heads, 48)
    layout.from_logical(views, torch.tensor([1, 3]), {"k": k, "v": v})
    once = layout.to_logical(views, torch.tensor([1, 3]))
    assert torch.equal(once["k"], dequantized(k))
    assert torch.equal(once["v"], dequantized(v))
    low = int(views["k"][1, 0, 0, 0]) & 0xF
    scale = views["k_scale"][1, 0, 0, 0].float()
    assert torch.copysign(E2M1[low & 7] * scale, torch.tensor(8.0 - low)) == once["k"][0, 0, 0, 0], "the first is low"


def test_the_layout_is_for_groups_alone() -> None:
    for spec in (replace(SPEC, head_size=40).cache_spec, CacheSpec.keys_values(2, 32, "int8", scaling="row")):
        with pytest.raises(ValueError, match="multiple of 16"):
            GroupScaledLayout().page_bytes(spec, 16)


@pytest.fixture(scope="module", params=["whole", "windows"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    changes = WINDOWS | {"num_hidden_layers": 4} if request.param == "windows" else {}
    model = write_checkpoint(folder, "qwen3", head_dim=32, **changes)
    (folder.parent / "text.txt").write_text(TEXT)
    return folder, model


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16, "attention_backend": "reference_nvfp4_cache"},
        {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
        {"enforce_eager": True},
        {"kv_cache_memory": "31KB", "max_model_len": 88},
    ],
    ids=str,
)
def test_greedy_tokens_do_not_depend_on_scheduling(
    checkpoint: tuple[Path, PreTrainedModel], settings: dict[str, Any]
) -> None:
    """Chunks of prompts, cached prefixes, pools that are too small: the tokens of whole prompts, each alone."""
    prompts = random_prompts(5, 60, seed=4, shortest=30)
    prompts += [[*prompts[0], 1, 2], prompts[1][:40]]
    with small_llm(checkpoint[0], kv_cache_dtype="nvfp4", enable_prefix_caching=False, dtype="float32") as llm:
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    with small_llm(checkpoint[0], kv_cache_dtype="nvfp4", dtype="float32", **settings) as llm:
        outputs = llm.generate(prompts, GREEDY)
        again = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert [output.outputs[0].token_ids for output in again] == alone
    if "kv_cache_memory" in settings:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0, "the pool is meant to be too small"
    elif settings.get("enable_prefix_caching", True):
        assert sum(output.num_cached_tokens or 0 for output in again) > 100


def test_heads_divided_among_ranks(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    prompts = random_prompts(3, 40, seed=9, shortest=20)
    found = []
    for ranks in (1, 2):
        with small_llm(checkpoint[0], kv_cache_dtype="nvfp4", dtype="float32", tensor_parallel_size=ranks) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)])
    assert found[0] == found[1]


def test_an_engine_holds_more_tokens(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """3.5 times as many tokens as bfloat16, and logits near those of the whole cache."""
    ids = random_prompts(1, 60, seed=4, shortest=60)[0]
    with small_llm(checkpoint[0], dtype="bfloat16", kv_cache_memory="4MiB") as llm:
        plain, pages = prompt_logits(llm, ids), llm.core.scheduler.cache.pool.num_usable
    with small_llm(checkpoint[0], dtype="bfloat16", kv_cache_memory="4MiB", kv_cache_dtype="nvfp4") as llm:
        got = prompt_logits(llm, ids, chunk=7)
        assert llm.core.scheduler.cache.pool.num_usable > 3.5 * pages
        assert {row.chosen for row in llm.table.rows if row.family == "attention"} == {"cpu_native_nvfp4_cache"}
    assert (got - plain).abs().max() > 1e-3
    assert torch.nn.functional.cosine_similarity(got, plain, dim=-1).min() > 0.9


def test_a_head_that_is_no_multiple_of_16_is_padded(tmp_path: Path) -> None:
    """By core's adapter, which the table names; the numbers are those of whole heads, whose last elements are zeros."""
    write_checkpoint(tmp_path, "qwen3", head_dim=24)
    ids = random_prompts(1, 40, seed=4, shortest=40)[0]
    with small_llm(tmp_path, dtype="float32", kv_cache_dtype="nvfp4", use={"attention.causal": PADDED}) as llm:
        got = prompt_logits(llm, ids)
        assert {row.chosen for row in llm.table.rows if row.family == "attention"} == {PADDED}
    with small_llm(tmp_path, dtype="float32") as llm:
        assert torch.nn.functional.cosine_similarity(got, prompt_logits(llm, ids), dim=-1).min() > 0.9


PADDED = "reference_nvfp4_cache+pad16"


def test_backends_that_do_not_claim_it_are_rejected_with_a_reason(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", head_dim=32)
    for name in ("cpu_native", "cpu_paged", "reference", "cpu_native_quantized_cache"):
        with pytest.raises(
            SelectionError, match=rf"{name}: it cannot serve attention .*(?s:.*)wanted nvfp4, supported"
        ):
            small_llm(tmp_path, kv_cache_dtype="nvfp4", attention_backend=name)
    write_checkpoint(tmp_path / "latents", "deepseek_v2", **DEEPSEEK_V2)
    with pytest.raises(SelectionError, match=r"latent(?s:.*)wanted nvfp4, supported"):
        small_llm(tmp_path / "latents", kv_cache_dtype="nvfp4")


def calibrated(folder: Path, out: Path) -> int:
    """The exit code of the command."""
    flags = ["--data", str(folder.parent / "text.txt"), "--output", str(out), "--kv-cache-dtype", "nvfp4"]
    return run(["calibrate", str(folder), *flags, "--platform", "cpu", "--dtype", "float32"])


def test_calibrated_scales(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """The largest key over 448 times 6; an NVFP4 cache takes them, an fp8 cache leaves them."""
    folder, model = checkpoint
    assert calibrated(folder, tmp_path / "out") == 0
    scales = load_file(tmp_path / "out" / "model-kv-scales.safetensors")
    with small_llm(folder) as llm:
        ids = llm.tokenizer.encode(TEXT)
    with torch.inference_mode():
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    largest = cache.layers[1].keys.abs().max().view(1)
    torch.testing.assert_close(scales["model.layers.1.self_attn.k_scale"], largest / 2688, rtol=1e-4, atol=0)
    scheme = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["group_size"]) == (4, "float", 16)
    for dtype, taken in (("nvfp4", True), ("fp8", False)):
        with small_llm(tmp_path / "out", kv_cache_dtype=dtype) as llm:
            backend = llm.core.blueprint.ctx.cache_users.users[1].planner
            assert isinstance(backend, AttentionBackend)
            assert backend.spec.static_cache_scales is taken
            found = backend.cache_scales[0]
            assert (found is not None and torch.equal(found, scales["model.layers.1.self_attn.k_scale"])) is taken


@pytest.mark.parametrize("form", ["modelopt-nvfp4", "fp8-channel"])
def test_scales_beside_other_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    """Model Optimizer's ``kv_cache_quant_algo`` says NVFP4; ``fp8`` has no word for it."""
    write_quantized(tmp_path / "model", {f.name: f for f in FORMATS}[form])
    (tmp_path / "text.txt").write_text(TEXT)
    if form == "fp8-channel":
        assert calibrated(tmp_path / "model", tmp_path / "out") == 2
        assert "has scales of 8-bit floats alone for a cache" in capsys.readouterr().err
        return
    assert calibrated(tmp_path / "model", tmp_path / "out") == 0
    with small_llm(tmp_path / "out", kv_cache_dtype="nvfp4") as llm:
        backend = llm.core.blueprint.ctx.cache_users.users[0].planner
        assert isinstance(backend, AttentionBackend)
        assert backend.spec.static_cache_scales

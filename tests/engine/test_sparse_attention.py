"""Sparse attention in whole engines: index keys beside latents, 8-bit index keys, shared indexers, refusals.

Prefixes, chunks, preemption and drafts are in test_latent_attention.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint_plugin_api import CheckpointError, ConfigError
from tests.parallel.ranks import ranks_in_threads
from tests.support.checkpoints import (
    DEEPSEEK_V32,
    random_prompts,
    reference_logits,
    write_checkpoint,
)
from tests.support.engines import prompt_logits, small_llm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("deepseek_v32")
    return folder, write_checkpoint(folder, "deepseek_v32", **DEEPSEEK_V32)


@pytest.mark.parametrize("native", [True, False], ids=["compiled", "reference"])
def test_kernels_and_references(checkpoint: tuple[Path, PreTrainedModel], native: bool) -> None:
    """The compiled kernels are chosen here; the references, asked for by name, give the same logits."""
    folder, model = checkpoint
    names = ("store_index_keys", "index_scores", "topk_positions")
    references = {"attention.latent": "reference"} | {f"op.{name}": "reference" for name in names}
    (prompt,) = random_prompts(1, 70, seed=6, shortest=70)
    with small_llm(folder, use={} if native else references) as llm:
        chosen = {row.of: row.chosen for row in llm.table.rows if row.of in ("latent", *names)}
        assert set(chosen.values()) == ({"cpu_native_latent", "cpu_native"} if native else {"reference"})
        for chunk in (None, 9):
            assert (prompt_logits(llm, prompt, chunk) - reference_logits(model, prompt)).abs().max() < 1e-4


def test_a_layer_has_two_caches_in_one_group(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    with small_llm(checkpoint[0]) as llm:
        caches = llm.core.blueprint.ctx.cache_users
        (group,) = caches.cache_groups()
        assert len(group.users) == len(caches.users) == 6
        assert {p.name: p.shape for user in caches.users for p in user.spec.planes} == {
            "index_key": (1, 24),
            "latent": (24,),
            "rope_key": (8,),
        }


def test_index_keys_of_8_bits(tmp_path: Path) -> None:
    """Keys have a scale for each 128 elements. Most queries choose the same positions, and what is left is the error
    of rounding latents."""
    model = write_checkpoint(tmp_path, "deepseek_v32", **DEEPSEEK_V32 | {"index_head_dim": 256, "index_topk": 40})
    (prompt,) = random_prompts(1, 60, seed=5, shortest=60)
    expected = reference_logits(model, prompt)
    with small_llm(tmp_path, kv_cache_dtype="fp8_e4m3") as llm:
        planes = {p.name: (p.shape, p.dtype) for u in llm.core.blueprint.ctx.cache_users.users for p in u.spec.planes}
        assert planes["index_key"] == ((2, 128), "float8_e4m3fn")
        errors = (prompt_logits(llm, prompt) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 1e-4 < errors.median() < 0.05


def test_a_pipeline_stage_does_not_begin_with_a_shared_indexer(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]}
    write_checkpoint(tmp_path, "glm_moe_dsa", **DEEPSEEK_V32 | changes)
    with (
        pytest.raises(ConfigError, match=r"blocks\.2\.mixer(.|\n)* --pipeline-parallel-size"),
        ranks_in_threads(tmp_path, 1, pipeline_parallel_size=2),
    ):
        pass
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"indexer_types": ["full", "shared", "full", "shared"]}))
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.indexer"):
        small_llm(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v32", {"q_lora_rank": None}, "'q_lora_rank' must not be null"),
        ("deepseek_v32", {"index_head_dim": 4}, "'index_head_dim' must be at least 'qk_rope_head_dim', got 4 and 8"),
        ("deepseek_v32", {"mlp_layer_types": ["dense", "thin", "sparse"]}, "'mlp_layer_types' must name 3 layers"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "the first layer has no earlier one"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "'indexer_types' must name 3 layers, each full or shared"),
    ],
)
def test_configs_that_are_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, **DEEPSEEK_V32)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        small_llm(tmp_path)


def test_which_glm_layers_have_indexers(tmp_path: Path) -> None:
    """The schedule that a config's keys mean is Transformers' own."""
    from transformers import GlmMoeDsaConfig

    from hardpoint.checkpoint.hf_config import HFConfig
    from hardpoint.models.glm_moe_dsa import _layers_with_indexers

    schedules: list[dict[str, Any]] = [{}, {"index_topk_freq": 3}, {"index_topk_freq": 2, "index_skip_topk_offset": 3}]
    for keys in schedules:
        theirs = GlmMoeDsaConfig(num_hidden_layers=9, **keys).indexer_types
        ours = _layers_with_indexers(HFConfig(Path(), {"num_hidden_layers": 9, **keys}))
        assert ["full" if own else "shared" for own in ours] == theirs
    pattern = _layers_with_indexers(HFConfig(Path(), {"num_hidden_layers": 4, "index_topk_pattern": "FSSF"}))
    assert pattern == (True, False, False, True)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "fp8"}], ids=["bfloat16", "fp8"])
def test_other_numbers(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Rounding changes choices, of positions too, from where a list leaves some out; before that it is all there is."""
    model = write_checkpoint(tmp_path, "deepseek_v32", **DEEPSEEK_V32)
    (prompt,) = random_prompts(1, 50, seed=5, shortest=50)
    expected = reference_logits(model, prompt)
    if "dtype" in settings:
        model.bfloat16().save_pretrained(tmp_path)
    with small_llm(tmp_path, **settings) as llm:
        errors = (prompt_logits(llm, prompt).float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 1e-4 < errors[: DEEPSEEK_V32["index_topk"]].median() < 0.15

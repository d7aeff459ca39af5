"""Prompts of latent attention in the unabsorbed form, in whole engines, against Transformers' code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint.layers.latent_prompts import ContextChunk, FormsMetadata, LatentForms, Prompts
from hardpoint.layers.mla import MLA
from hardpoint_cpu.native_latent_attention import NativeLatentAttention
from hardpoint_plugin_api import AttentionBatch, AttentionMetadata, LatentCall
from tests.engine.test_latent_attention import GREEDY
from tests.support.checkpoints import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    LARGE_LATENT,
    check_tokens_equal,
    random_prompts,
    reference_logits,
    write_checkpoint,
)
from tests.support.engines import prompt_logits, small_llm

_V3 = DEEPSEEK_V3 | LARGE_LATENT
_LENGTH = 70


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("deepseek_v3")
    return folder, write_checkpoint(folder, "deepseek_v3", **_V3)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Prompts]:
    """The prompts that took the unabsorbed form, a layer's after the other's. Chunks of context have 16 tokens."""
    found: list[Prompts] = []
    compute, init = MLA._unabsorbed, LatentForms.__init__

    def noted(self: MLA, *args: Any) -> torch.Tensor:
        found.append(args[-1])
        return compute(self, *args)

    def small(self: LatentForms, *args: Any, **options: Any) -> None:
        init(self, *args, **options | {"most_tokens": 16})

    monkeypatch.setattr(MLA, "_unabsorbed", noted)
    monkeypatch.setattr(LatentForms, "__init__", small)
    return found


@pytest.mark.parametrize("chunk", [None, 9, 16, 33])
@pytest.mark.parametrize("backend", ["cpu_native_latent", "reference"])
def test_logits(checkpoint: tuple[Path, PreTrainedModel], made: list[Prompts], chunk: int | None, backend: str) -> None:
    folder, model = checkpoint
    (prompt,) = random_prompts(1, _LENGTH, seed=4, shortest=_LENGTH)
    with small_llm(folder, use={"attention.latent": backend}) as llm:
        logits = prompt_logits(llm, prompt, chunk)
    assert (logits - reference_logits(model, prompt)).abs().max() < 1e-4
    assert len(made) == 3 * (_LENGTH // chunk + (_LENGTH % chunk >= 8) if chunk else 1)
    cached = sum(part.keys.starts[-1] for prompts in made for part in prompts.context)
    assert cached == 3 * sum(begin for begin in range(0, _LENGTH, chunk or _LENGTH) if _LENGTH - begin >= 8)


def test_a_query_that_is_not_compressed(tmp_path: Path, made: list[Prompts]) -> None:
    model = write_checkpoint(tmp_path, "deepseek_v2", **DEEPSEEK_V2 | LARGE_LATENT | {"q_lora_rank": None})
    (prompt,) = random_prompts(1, _LENGTH, seed=4, shortest=_LENGTH)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt, 20) - reference_logits(model, prompt)).abs().max() < 1e-4
    assert any(len(prompts.context) > 1 for prompts in made)


@pytest.mark.parametrize("settings", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "bfloat16"}])
def test_both_forms_compute_the_same(
    checkpoint: tuple[Path, PreTrainedModel],
    made: list[Prompts],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:
    """With rounded numbers both forms stray alike from the model's own logits."""
    folder, model = checkpoint
    (prompt,) = random_prompts(1, _LENGTH, seed=4, shortest=_LENGTH)
    expected, errors = reference_logits(model, prompt), []
    with small_llm(folder, **settings) as llm:
        for form in (True, False):
            monkeypatch.setattr(LatentForms, "is_unabsorbed", lambda self, queries, total, form=form: form)
            logits = prompt_logits(llm, prompt, 20)
            errors.append(((logits - expected).norm() / expected.norm()).item())
    assert made
    assert errors[0] < 1.2 * errors[1] < 0.3


@pytest.fixture
def several(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[tuple[Any, list[list[int]], PreTrainedModel]]:
    """An engine whose steps have 40 tokens, and prompts, some of which begin alike."""
    folder, model = checkpoint
    prompts = random_prompts(5, 60, seed=3, shortest=20)
    prompts += [[*prompts[0], *prompt[:20]] for prompt in prompts[1:]]
    with small_llm(folder, max_num_batched_tokens=40, max_model_len=128) as llm:
        yield llm, prompts, model


def test_decodes_short_chunks_and_prompts_share_steps(
    several: tuple[Any, list[list[int]], PreTrainedModel], made: list[Prompts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend gets all rows between in one plan, and chunks of context reach from one request into the next."""
    llm, prompts, model = several
    planned: list[AttentionMetadata] = []
    rows: list[slice | torch.Tensor] = []
    plan, attend, by_forms = NativeLatentAttention.plan, NativeLatentAttention.forward, MLA._by_forms

    def noted(self: NativeLatentAttention, batch: AttentionBatch) -> AttentionMetadata:
        planned.append(plan(self, batch))
        return planned[-1]

    def newest(self: NativeLatentAttention, call: LatentCall) -> None:
        assert call.metadata is planned[-1], "valid until the next plan of its group"
        attend(self, call)

    def divided(self: MLA, cache: Any, metadata: FormsMetadata, *tensors: torch.Tensor) -> None:
        rows.append(metadata.rows)
        by_forms(self, cache, metadata, *tensors)

    monkeypatch.setattr(NativeLatentAttention, "plan", noted)
    monkeypatch.setattr(NativeLatentAttention, "forward", newest)
    monkeypatch.setattr(MLA, "_by_forms", divided)
    monkeypatch.setattr(LatentForms, "is_unabsorbed", lambda self, queries, total: queries % 2 == 0)
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)
    chunks: list[ContextChunk] = [chunk for one in made for chunk in one.context]
    assert llm.stats.cached_tokens > 0
    assert any(one.rows.start > 0 for one in made)
    assert any(chunk.rows.start > 0 for chunk in chunks)
    assert any(isinstance(one, torch.Tensor) for one in rows)


def in_base_2(layer: MLA) -> None:
    """Sums as kernels keep them that compute exponentials of base 2."""
    for name in ("_attend_new", "_attend_cached"):
        attend = getattr(layer, name)

        def scaled(*args: Any, attend: Any = attend, **scalars: Any) -> tuple[torch.Tensor, torch.Tensor]:
            out, sums = attend(*args, **scalars)
            return out, sums / math.log(2)

        setattr(layer, name, scaled)


def without_mask(layer: MLA) -> None:
    attend = layer._attend_new
    layer._attend_new = lambda *args, **scalars: attend(*args, **scalars | {"causal": False})


def without_merge(layer: MLA) -> None:
    layer._merge = lambda *args: None


LAYERS = {"sums in base 2": in_base_2, "new tokens read later ones": without_mask, "parts not merged": without_merge}
PLANS: dict[str, Callable[[tuple[ContextChunk, ...]], tuple[ContextChunk, ...]]] = {
    "last chunk dropped": lambda chunks: chunks[:-1],
    "first chunk dropped": lambda chunks: chunks[1:],
    "a chunk counted twice": lambda chunks: (*chunks, *chunks[:1]),
}


@pytest.mark.parametrize("fault", [None, *LAYERS, *PLANS])
def test_planted_faults_change_logits(
    checkpoint: tuple[Path, PreTrainedModel], made: list[Prompts], monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    folder, model = checkpoint
    (prompt,) = random_prompts(1, _LENGTH, seed=4, shortest=_LENGTH)
    if fault in PLANS:
        plan = LatentForms._prompts

        def planted(*args: Any) -> Prompts:
            prompts = plan(*args)
            return replace(prompts, context=PLANS[fault](prompts.context))

        monkeypatch.setattr(LatentForms, "_prompts", planted)
    with small_llm(folder) as llm:
        for layer in llm.core.blueprint.model.modules():
            if isinstance(layer, MLA) and fault in LAYERS:
                LAYERS[fault](layer)
        difference = (prompt_logits(llm, prompt, 35) - reference_logits(model, prompt)).abs().max()
    assert difference < 1e-4 if fault is None else difference > 1e-3

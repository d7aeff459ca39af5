"""Batch-invariant mode over latent and sparse attention, and forms of attention that a flag chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.layers.mla import MLA, AbsorbedMLA, UnabsorbedMLA
from hardpoint_plugin_api import SelectionError
from tests.support.checkpoints import (
    DEEPSEEK_V2,
    DEEPSEEK_V32,
    LARGE_LATENT,
    random_prompts,
    reference_logits,
    write_checkpoint,
)
from tests.support.engines import prompt_logits, small_llm

MODELS: dict[str, dict[str, Any]] = {"deepseek_v2": DEEPSEEK_V2 | LARGE_LATENT, "deepseek_v32": DEEPSEEK_V32}
PROMPTS = random_prompts(4, 60, seed=11, shortest=25)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=4, prompt_logprobs=2)
REFERENCES = {
    "attention.latent": "reference_batch_invariant",
    "op.index_scores": "row_by_row",
    "op.topk_positions": "reference",
    "op.store_index_keys": "reference",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family, changes in MODELS.items():
        found[family] = tmp_path_factory.mktemp(family)
        write_checkpoint(found[family], family, **changes)
    return found


def bits(llm: LLM, prompts: list[list[int]]) -> list[object]:
    """Tokens and log-probabilities of each prompt."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("native", [True, False], ids=["compiled", "reference"])
@pytest.mark.parametrize("family", MODELS)
def test_a_request_has_its_bits_in_every_crowd(folders: dict[str, Path], family: str, native: bool, dtype: str) -> None:
    settings: dict[str, Any] = {"batch_invariant": True, "dtype": dtype, "use": {} if native else REFERENCES}
    if family == "deepseek_v2" and not native:
        settings["use"] = {"attention.latent": "reference_batch_invariant"}
    with small_llm(folders[family], enable_prefix_caching=False, **settings) as llm:
        expected = [bits(llm, [prompt])[0] for prompt in PROMPTS]
        chosen = {row.of: row.chosen for row in llm.table.rows if row.of in ("latent", "mla")}
        latent = "cpu_native_latent_batch_invariant" if native else "reference_batch_invariant"
        assert chosen == {"latent": latent, "mla": "absorbed"}
        assert bits(llm, PROMPTS) == expected
    for more in ({"max_num_batched_tokens": 8}, {"max_num_batched_tokens": 33, "max_num_seqs": 3}):
        with small_llm(folders[family], **settings, **more) as llm:
            crowd = bits(llm, [*random_prompts(3, 60, seed=3), *PROMPTS])
            assert crowd[-len(PROMPTS) :] == expected
            assert bits(llm, PROMPTS[::-1])[::-1] == expected, "with cached prefixes"


@pytest.mark.parametrize("family", MODELS)
def test_it_computes_the_model(folders: dict[str, Path], family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family, **MODELS[family])
    with small_llm(tmp_path, batch_invariant=True) as llm:
        assert (prompt_logits(llm, PROMPTS[0], 9) - reference_logits(model, PROMPTS[0])).abs().max() < 1e-4


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("latent", ["cpu_native_latent", "reference"])
def test_latents_of_8_bits(folders: dict[str, Path], latent: str, kv_dtype: str) -> None:
    name = f"{latent}_batch_invariant_quantized_cache"
    settings: dict[str, Any] = {"batch_invariant": True, "kv_cache_dtype": kv_dtype, "use": {"attention.latent": name}}
    with small_llm(folders["deepseek_v2"], enable_prefix_caching=False, **settings) as llm:
        expected = [bits(llm, [prompt])[0] for prompt in PROMPTS]
        assert bits(llm, PROMPTS) == expected
    with small_llm(folders["deepseek_v2"], max_num_batched_tokens=33, max_num_seqs=3, **settings) as llm:
        crowd = bits(llm, [*random_prompts(3, 60, seed=3), *PROMPTS])
        assert crowd[-len(PROMPTS) :] == expected
        assert bits(llm, PROMPTS[::-1])[::-1] == expected, "with cached prefixes"


@pytest.mark.parametrize(("form", "kind"), [("absorbed", AbsorbedMLA), ("unabsorbed", UnabsorbedMLA)])
def test_a_form_is_chosen_by_flag(tmp_path: Path, form: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ``explain`` says by which rule; an absorbed layer keeps no matrix of keys and values as a whole."""
    model = write_checkpoint(tmp_path, "deepseek_v2", **DEEPSEEK_V2)
    made: list[int] = []
    unabsorbed = UnabsorbedMLA._unabsorbed

    def noted(self: UnabsorbedMLA, q: torch.Tensor, *args: Any) -> torch.Tensor:
        made.append(len(q))
        return unabsorbed(self, q, *args)

    monkeypatch.setattr(UnabsorbedMLA, "_unabsorbed", noted)
    with small_llm(tmp_path, use={"layer.mla": form}) as llm:
        (row,) = [row for row in llm.table.rows if row.of == "mla"]
        assert (row.chosen, row.rule) == (form, "flag")
        layers = [layer for layer in llm.core.blueprint.model.modules() if isinstance(layer, kind)]
        assert len(layers) == 3
        whole = [name for name in cast(MLA, layers[0]).kv_up.weights if name.startswith("whole.")]
        assert bool(whole) == (form == "unabsorbed")
        assert (prompt_logits(llm, PROMPTS[0], 9) - reference_logits(model, PROMPTS[0])).abs().max() < 1e-4
    assert bool(made) == (form == "unabsorbed")


def test_sparse_attention_has_one_form(folders: dict[str, Path]) -> None:
    with pytest.raises(SelectionError, match="index_lists not supported"):
        small_llm(folders["deepseek_v32"], use={"layer.mla": "unabsorbed"})

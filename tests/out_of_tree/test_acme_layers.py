"""A model of a plugin's own, of layers that core does not know: mixers with a cache or a state, a feed-forward."""

from __future__ import annotations

from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.conformance.families.model_samples import Reference
from hardpoint.engine.execution.forward import Forward
from hardpoint_plugin_api import CheckpointError, UnknownNameError
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_tokenizer
from tests.support.engines import counted, small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Defined:
    """The definition of the model, called as Transformers' models are."""

    def __init__(self, folder: Path) -> None:
        write = cast("Any", import_module("acme_hp.samples")).write_means
        self._logits: Reference = write(folder, 5)
        write_tokenizer(folder)

    def __call__(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self._logits(ids[0].tolist(), torch.float32)[None])


@pytest.mark.parametrize(
    ("settings", "replays"),
    [
        ({"enforce_eager": True}, False),
        ({"max_num_batched_tokens": 16}, True),
        ({"attention_backend": "reference", "block_size": 32}, False),
        ({"attention_backend": "acme_paged+pad32", "kv_cache_memory": "1MiB"}, False),
        ({"use": {"layer.acme_fading": "acme_fading_pairs"}, "max_num_batched_tokens": 16}, True),
    ],
    ids=str,
)
def test_a_model_of_its_own_layers(acme: Path, tmp_path: Path, settings: dict[str, Any], replays: bool) -> None:
    """Eagerly and in prepared steps, in chunks, over several backends: whatever serves attention serves the mixer."""
    model, prompts = cast("Any", Defined(tmp_path)), random_prompts(6, 60, seed=8)
    with small_llm(tmp_path, **settings) as llm:
        chosen = {(row.family, row.of): (row.chosen, row.plugin) for row in llm.table.rows}
        for own in ("acme_mean", "acme_fading", "acme_stripes"):
            assert chosen["layer", own] == (settings.get("use", {}).get(f"layer.{own}", "default"), "acme")
        assert chosen["layer", "mlp"] == ("default", "core"), "the other feed-forward of the model"
        assert ("layer", "attention") not in chosen
        for _ in range(2):  # again, with prefixes from the cache
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert bool(counted(llm).get("graph_replays_total")) == replays


def test_copies_of_one_plane_alone_change_tokens(acme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is copied with all of its planes."""
    model, (prompt,) = cast("Any", Defined(tmp_path)), random_prompts(1, 40, seed=8, shortest=40)
    views = Forward._views
    monkeypatch.setattr(Forward, "_views", lambda forward, group: islice(views(forward, group), 1))
    with small_llm(tmp_path, use={"layer.acme_fading": "acme_fading_pairs"}, enforce_eager=True) as llm:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    with pytest.raises(AssertionError):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_its_tensors_are_missed_by_name(acme: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    Defined(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.stripes"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.1\.stripes$"):
        small_llm(tmp_path)


def test_a_layer_that_nobody_declares(acme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Defined(tmp_path)
    monkeypatch.setattr(import_module("acme_hp.means").StripesArgs, "layer", "acme_strips")
    where = r"It stands in StripesArgs\.layer, at stack\.blocks\.1\.feed_forward\."
    with pytest.raises(UnknownNameError, match=rf"layer 'acme_strips'; did you mean 'acme_stripes'\?.*{where}"):
        small_llm(tmp_path)

"""A third party's latent attention, over a cache layout of its own: chosen by flag, right in its tokens, certified."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.conformance.certify import certify
from hardpoint.conformance.generators import generator_for
from hardpoint.conformance.kit import Order
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.engine.explain import explain
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import SelectionError
from tests.support.checkpoints import DEEPSEEK_V2, DEEPSEEK_V32, check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm

ONE_THREAD = {"cpu": {"threads": 1}}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("flag", [{"attention_backend": "acme_latent"}, {"use": {"attention.latent": "acme_latent"}}])
def test_it_serves_where_it_is_asked_for(acme: Path, tmp_path: Path, flag: dict[str, object]) -> None:
    model = write_checkpoint(tmp_path, "deepseek_v2", **DEEPSEEK_V2)
    prompts = random_prompts(5, 40, seed=8)
    prompts += [[*prompts[0], *prompts[1], 3], [*prompts[0], *prompts[1], 4]]
    with small_llm(tmp_path, max_num_batched_tokens=32, **flag) as llm:
        (chosen,) = {(r.chosen, r.plugin, r.rule) for r in llm.table.rows if r.family == "attention"}
        assert chosen == ("acme_latent", "acme", "flag")
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert llm.stats.cached_tokens > 0
    with small_llm(tmp_path) as llm:
        assert "acme_latent" not in {row.chosen for row in llm.table.rows if row.family == "attention"}


def test_a_size_it_cannot_serve_is_refused_by_name(acme: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v2", **DEEPSEEK_V2 | {"kv_lora_rank": 22})
    with pytest.raises(SelectionError, match=r"latents come in fours \(wanted 22, supported 4, 8, ...\)"):
        small_llm(tmp_path, attention_backend="acme_latent")


def test_it_has_no_lists_and_the_reason_stands_before_weights_are_read(acme: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v32", **DEEPSEEK_V32)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        SelectionError, match=r"it cannot serve attention latent(.|\n)*acme_latent: index_lists not supported"
    ):
        small_llm(tmp_path, attention_backend="acme_latent")


def test_the_kit_passes_its_layout_its_store_and_decodes(acme: Path) -> None:
    plugins = discover()
    (offer,) = [o for o in plugins.offers("attention", "latent") if o.plugin == "acme"]
    site, generator = Site.open(plugins, "cpu", ONE_THREAD), generator_for(plugins, offer)
    assert generator
    trials = [
        trial
        for trial in generator.trials(Subject(offer, plugins.load(offer), site), Plan())
        if trial.case.startswith(("layout/", "store/float32")) or "/decode/" in trial.case
    ]
    results = [(trial.case, check, finding) for trial in trials[::3] for check, finding in trial.run()]
    assert [f"{case}, {check}: {finding.faults}" for case, check, finding in results if finding.faults] == []
    assert len(results) > 30


@pytest.mark.nightly
def test_it_is_certified_by_a_whole_run(acme: Path, tmp_path: Path) -> None:
    order = Order("acme", "attention", "acme_latent", platform="cpu", settings=ONE_THREAD)
    certificate = certify(discover(), order, isolated=False)
    assert [f"{r.case}, {r.check}: {fault}" for r in certificate.results for fault in r.faults] == []
    proofs, model = tmp_path / "proofs", tmp_path / "model"
    proofs.mkdir()
    certificate.write(proofs / "acme.json")
    write_checkpoint(model, "deepseek_v2", **DEEPSEEK_V2)
    settings = {"model": str(model), "platform": "cpu", "plugin_config": ONE_THREAD, "certificates": str(proofs)}
    table = explain(EngineConfig.create(**settings, attention_backend="acme_latent"))
    (certified,) = {str(row.certified) for row in table.rows if row.family == "attention"}
    assert certified.startswith("quick")

"""A third party's plugin, really installed: chosen by flag or priority, seen in ``explain``, right in its tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.conformance.certify import certify
from hardpoint.conformance.families.experts import ExpertsTrials
from hardpoint.conformance.generators import generator_for
from hardpoint.conformance.kit import Order
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.engine.blueprint import draw
from hardpoint.engine.explain import explain
from hardpoint.ops.base import functional_from_out
from hardpoint.ops.judge import judge
from hardpoint.ops.rms_norm import rms_norm
from hardpoint.parsers import choose_parsers
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionSpec,
    ConfigError,
    ContentDelta,
    ParserArgs,
    SelectionError,
    ToolCallDelta,
    ToolCallStart,
    UnknownNameError,
)
from tests.parallel.ranks import ranks_in_threads
from tests.support.attention import MIXED, brute_force, run_backend
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint, write_tokenizer
from tests.support.engines import small_llm
from tests.support.forked import run_module

ONE_THREAD = {"cpu": {"threads": 1}}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def served(llm: LLM) -> dict[tuple[str, str | None], set[str]]:
    """The chosen implementations: (family, of) -> names."""
    chosen: dict[tuple[str, str | None], set[str]] = {}
    for row in llm.table.rows:
        chosen.setdefault((row.family, row.of), set()).add(row.chosen)
    return chosen


def check_engine(folder: Path, model: Any, **settings: Any) -> dict[tuple[str, str | None], set[str]]:
    """Run an engine with ``settings``, check its tokens, and return who served."""
    prompts = random_prompts(6, 40, seed=8)
    with small_llm(folder, **settings) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        return served(llm)


def test_it_is_listed_without_being_imported(acme: Path) -> None:
    code = "import sys; from hardpoint.plugin_host import discover; r = discover().record('acme'); " + (
        "print(r.status, r.distribution, 'acme_hp' in sys.modules, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(acme)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ready", "acme-hardpoint", "False", "False"]


def test_its_op_wins_by_priority_and_nothing_else_changes(acme: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3", head_dim=32)
    chosen = check_engine(tmp_path, model)
    assert chosen["op", "rms_norm"] == {"acme_rms_norm"}
    assert chosen["op", "add_rms_norm"] == chosen["attention", "causal"] == {"cpu_native"}
    assert chosen["layer", "mlp"] == {"default"}
    off = check_engine(tmp_path, model, custom_ops="all,-rms_norm")
    assert off["op", "rms_norm"] == {"reference"}


def test_everything_of_it_by_flag(acme: Path, tmp_path: Path) -> None:
    model = write_checkpoint(
        tmp_path, "qwen3", head_dim=32, use_sliding_window=True, sliding_window=9, max_window_layers=1
    )
    chosen = check_engine(tmp_path, model, attention_backend="acme_paged", use={"layer.mlp": "acme_mlp"})
    assert chosen["attention", "causal"] == {"acme_paged"}
    assert chosen["op", "qk_norm_rope_store"] == {"acme_qk_norm_rope_store"}, "its layout brings its fused op"
    assert chosen["layer", "mlp"] == {"acme_mlp"}
    assert ("op", "act_and_mul") not in chosen, "the replacement asks for no op that it does not need"


def test_its_layout_with_cores_composition(acme: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama", head_dim=32)
    chosen = check_engine(
        tmp_path, model, attention_backend="acme_paged", use={"op.qk_norm_rope_store": "composed"}, block_size=32
    )
    assert chosen["op", "qk_norm_rope_store"] == {"composed"}


def test_a_head_size_it_cannot_serve_is_refused_by_name_and_padded_on_request(acme: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama", head_dim=16)
    with pytest.raises(SelectionError, match=r"acme_paged: head size .*\(wanted 16, supported multiples of 32\)"):
        small_llm(tmp_path, attention_backend="acme_paged")
    chosen = check_engine(tmp_path, model, attention_backend="acme_paged+pad32")
    assert chosen["attention", "causal"] == {"acme_paged+pad32"}
    assert chosen["op", "qk_norm_rope_store"] == {"composed"}, "the fused op does not know padded heads"


def test_its_own_objection_is_shown(acme: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_attention_heads=32, num_key_value_heads=1, head_dim=32)
    with pytest.raises(SelectionError, match=r"too many query heads share a KV head \(wanted 32, supported up to 16\)"):
        small_llm(tmp_path, attention_backend="acme_paged")


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"attention_backend": "acme_pagd"}, "--attention-backend"),
        ({"use": {"attention": "acme_pagd"}}, "--use attention"),
    ],
)
def test_a_misspelt_choice_names_the_flag_that_was_used(
    acme: Path, tmp_path: Path, settings: dict[str, Any], flag: str
) -> None:
    write_checkpoint(tmp_path, "llama", head_dim=32)
    with pytest.raises(UnknownNameError, match=rf"did you mean 'acme_paged'\?.* Asked for by {flag}\."):
        small_llm(tmp_path, **settings)


def test_features_it_does_not_claim(acme: Path) -> None:
    offer = next(o for o in discover().offers("attention") if o.contribution.name == "acme_paged")
    assert "soft_cap" not in str(offer.contribution.requirements)


def test_its_settings(acme: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", head_dim=32)
    with pytest.raises(ConfigError, match=r"acme\.tile: only 8 is compiled"):
        small_llm(tmp_path, attention_backend="acme_paged", plugin_config={"acme": {"tile": 16}})
    with pytest.raises(UnknownNameError, match=r"'tiles'; did you mean 'tile'\?"):
        small_llm(tmp_path, plugin_config={"acme": {"tiles": 8}})


def test_off_the_allowlist_it_does_not_exist(acme: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", head_dim=32)
    with pytest.raises(UnknownNameError, match="acme_paged"):
        small_llm(tmp_path, plugins="cpu", attention_backend="acme_paged")
    with small_llm(tmp_path, plugins="cpu") as llm:
        assert served(llm)["op", "rms_norm"] == {"cpu_native"}


def test_explain_shows_it_with_reasons(acme: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", head_dim=16)
    options = ["explain", str(tmp_path), "--platform", "cpu", "--json"]
    done = run_module("hardpoint.cli", options, tmp_path, 120, {"PYTHONPATH": str(acme)})
    assert done.returncode == 0, done.stdout
    rows = json.loads(done.stdout)["rows"]
    (attention,) = [row for row in rows if row["family"] == "attention"]
    losers = {loser["name"]: [reason["code"] for reason in loser["reasons"]] for loser in attention["rejected"]}
    losers = {name: codes for name, codes in losers.items() if "platform" not in codes}  # what other platforms offer
    assert attention["chosen"] == "cpu_native"
    assert losers == {
        "cpu_paged": ["comes-after"],
        "cpu_native_nvfp4_cache": ["kv-dtype"],
        "cpu_native_quantized_cache": ["kv-dtype"],
        "reference": ["comes-after"],
        "reference_batch_invariant": ["comes-after"],
        "reference_nvfp4_cache": ["kv-dtype"],
        "reference_quantized_cache": ["kv-dtype"],
        "acme_paged": ["head-multiple"],
        "acme_paged+pad32": ["layout"],
    }


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (2, 2)])
def test_its_backend_against_the_definition(acme: Path, heads: tuple[int, int], window: int | None) -> None:
    backend = cast(type[AttentionBackend], import_module("acme_hp.attention").AcmeAttention)
    spec = AttentionSpec(
        *heads, head_size=32, scale=0.2, dtype="float32", kv_dtype="float32", block_size=16, window=window
    )
    out, requests = run_backend(backend, spec, MIXED, plugin_config={"acme": {"tile": 8}})
    assert (out - brute_force(spec, requests)).abs().max() < 1e-5
    half = replace(spec, dtype="bfloat16", kv_dtype="bfloat16")
    out, requests = run_backend(backend, half, MIXED, plugin_config={"acme": {"tile": 8}})
    expected = brute_force(half, requests)
    assert (out - expected).abs().max() < 4 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())


def test_its_layout_round_trips(acme: Path) -> None:
    backend = import_module("acme_hp.attention").AcmeAttention
    spec = AttentionSpec(4, 2, 32, 0.2, "float32", "float32", 16).cache_spec
    size = backend.layout.page_bytes(spec, 16)
    assert size % backend.layout.alignment == 0
    views = backend.layout.views(torch.zeros(4 * size, dtype=torch.uint8), 4, spec, 16)
    k, v, pages = torch.randn(2, 16, 2, 32), torch.randn(2, 16, 2, 32), torch.tensor([3, 1])
    backend.layout.from_logical(views, pages, {"k": k, "v": v})
    got = backend.layout.to_logical(views, pages)
    assert torch.equal(got["k"], k)
    assert torch.equal(got["v"], v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_op_under_the_ops_own_error_model(acme: Path, dtype: torch.dtype) -> None:
    assert rms_norm.allocate is not None
    implementation = functional_from_out(
        import_module("acme_hp.norm").rms_norm_out, rms_norm.allocate, rms_norm.reference
    )
    cases = list(rms_norm.cases(torch.Generator().manual_seed(0), dtype, torch.device("cpu")))
    assert len(cases) > 3
    for case in cases:
        verdict = judge(rms_norm, implementation, case, dtype=dtype)
        assert verdict.passed, f"{case.name}: {verdict}"


MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def test_its_experts_and_its_exchange_by_flag(acme: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3_moe", head_dim=32, **MIXTURE)
    with small_llm(tmp_path) as llm:
        assert served(llm)["experts", None] == {"cpu_native"}
    assert check_engine(tmp_path, model, experts_backend="acme_experts")["experts", None] == {"acme_experts"}
    settings = {"enable_expert_parallel": True, "use": {"experts": "acme_experts", "all2all": "acme_exchange"}}
    with ranks_in_threads(tmp_path, 2, **settings) as llm:
        assert (served(llm)["experts", None], served(llm)["all2all", None]) == ({"acme_experts"}, {"acme_exchange"})
        prompts = random_prompts(4, 30, seed=9)
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_its_experts_with_biases_by_flag(acme: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=9)
    with small_llm(tmp_path) as llm:
        assert served(llm)["experts", None] == {"cpu_native"}
    assert check_engine(tmp_path, model, experts_backend="acme_experts")["experts", None] == {"acme_experts"}


def test_why_its_experts_do_not_serve(acme: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", hidden_act="gelu", **MIXTURE)
    with pytest.raises(SelectionError, match=r"acme_experts: activation not supported \(wanted gelu_and_mul"):
        small_llm(tmp_path, experts_backend="acme_experts")
    with pytest.raises(SelectionError, match=r"acme_exchange: parallel not supported \(wanted none, supported ep"):
        small_llm(tmp_path, all2all_backend="acme_exchange")
    write_checkpoint(tmp_path, "gpt_oss", num_local_experts=4, num_experts_per_tok=2, swiglu_limit=5.0)
    with pytest.raises(SelectionError, match=r"activation not supported \(wanted swiglu_oai\(1\.702,5\.0\), supported"):
        small_llm(tmp_path, experts_backend="acme_experts")
    write_checkpoint(tmp_path, "qwen3_moe", **(MIXTURE | {"num_experts": 80}))
    with pytest.raises(SelectionError, match=r"too many experts \(wanted 80, supported up to 64\)"):
        small_llm(tmp_path, experts_backend="acme_experts")


@pytest.mark.nightly
def test_its_experts_pass_the_kit(acme: Path) -> None:
    plugins = discover()
    offer = next(o for o in plugins.offers("experts") if o.contribution.name == "acme_experts")
    trials = list(ExpertsTrials().trials(Subject.load(offer, Site.open(plugins, "cpu")), Plan()))
    tried = [trial for trial in trials if trial.unsupported is None]
    found = [finding for trial in tried for _, finding in trial.run()]
    assert sum(finding.outcome == "passed" for finding in found) >= len(tried) > 8
    assert not [str(fault) for finding in found for fault in finding.faults]


def test_its_communicator_by_flag(acme: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama", vocab_size=261)
    with ranks_in_threads(tmp_path, 2) as llm:
        assert served(llm)["communicator", None] == {"cpu_shared_memory"}
    with ranks_in_threads(tmp_path, 2, communicator="acme_mailbox") as llm:
        assert served(llm)["communicator", None] == {"acme_mailbox"}
        prompts = random_prompts(4, 30, seed=9)
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
    settings = {"platform": "cpu", "tensor_parallel_size": 2, "communicator": "acme_mailbox"}
    explained = draw(EngineConfig.create(model=str(tmp_path), **settings)).table.to_json()
    (row,) = (row for row in cast(Any, explained)["rows"] if row["family"] == "communicator")
    assert (row["chosen"], row["plugin"], row["rule"]) == ("acme_mailbox", "acme", "flag")
    with pytest.raises(SelectionError, match=r"acme_mailbox: parallel not supported \(wanted ep, supported tp\)"):
        small_llm(tmp_path, tensor_parallel_size=2, communicator="acme_mailbox", enable_expert_parallel=True)


def test_its_tool_parser_reads_outputs(acme: Path) -> None:
    """By name, and by the chat template that it recognizes."""
    by_name = choose_parsers(EngineConfig.create(model="demo", tool_parser="acme"))
    by_template = choose_parsers(EngineConfig.create(model="demo"), chat_template="Write @tool{...}")
    assert by_name.tool is by_template.tool is import_module("acme_hp.parsers").AcmeToolParser
    parser = by_name.open(ParserArgs())
    events = parser.feed('Hi.\n@clock{"zone": ') + parser.feed('"UTC"}\n') + parser.finish()
    assert [event for event in events if isinstance(event, ContentDelta)] == [ContentDelta("Hi.\n")]
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["clock"]
    assert ToolCallDelta(0, '{"zone": "UTC"}') in events


def test_its_drafter_is_chosen_by_flag(acme: Path) -> None:
    """Its drafts save steps, and change nothing."""
    settings: dict[str, Any] = {"dtype": "float32", "async_scheduling": True}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = ["1, 2, 3, 4, 1, 2, 3, 4, 1, 2", "The whale"]
    with small_llm(Path("demo"), **settings) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params, use_tqdm=False)]
    with small_llm(Path("demo"), speculative_method="acme_echo", **settings) as llm:
        (row,) = (row for row in llm.table.rows if row.family == "drafter")
        assert (row.chosen, row.plugin) == ("acme_echo", "acme")
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == expected
        assert llm.stats.accepted_tokens > 0


@pytest.mark.parametrize(
    ("family", "of"),
    [
        ("drafter", None),
        ("tool_parser", None),
        ("model", "AcmeMeansForCausalLM"),
        ("layer", "acme_mean"),
        ("layer", "acme_fading"),
        ("layer", "acme_stripes"),
    ],
)
def test_what_it_brings_is_proved_by_its_own_samples(acme: Path, family: str, of: str | None) -> None:
    site = Site.open(discover(), "cpu", ONE_THREAD)
    offers = [o for o in site.plugins.offers(family, of) if o.plugin == "acme"]
    assert offers
    for offer in offers:
        generator = generator_for(site.plugins, offer)
        assert generator is not None
        trials = generator.trials(Subject.load(offer, site), Plan())
        found = [(check, finding) for trial in trials for check, finding in trial.run()]
        assert not [fault for _, finding in found for fault in finding.faults]
        assert sum(finding.compared for check, finding in found if check == "values") > 0


def _means(folder: Path) -> str:
    import_module("acme_hp.samples").write_means(folder, 5)
    write_tokenizer(folder)
    return str(folder)


def _gpt_oss(folder: Path) -> str:
    write_checkpoint(folder, "gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "name", "model", "flag"),
    [
        ("layer", "acme_fading_pairs", _means, {"use": {"layer.acme_fading": "acme_fading_pairs"}}),
        ("drafter", "acme_echo", lambda folder: "demo", {"speculative_method": "acme_echo"}),
        pytest.param(
            "experts", "acme_experts", _gpt_oss, {"experts_backend": "acme_experts"}, marks=pytest.mark.nightly
        ),
    ],
)
def test_it_is_certified_by_a_whole_run(
    acme: Path, family: str, name: str, model: Callable[[Path], str], flag: dict[str, Any], tmp_path: Path
) -> None:
    """For latent attention: test_acme_latent.py."""
    order = Order("acme", family, name, platform="cpu", settings=ONE_THREAD)
    certificate = certify(discover(), order, isolated=False)
    assert [f"{r.case}, {r.check}: {fault}" for r in certificate.results for fault in r.faults] == []
    proofs, folder = tmp_path / "proofs", tmp_path / "model"
    proofs.mkdir()
    folder.mkdir()
    certificate.write(proofs / "acme.json")
    settings = {"model": model(folder), "platform": "cpu", "plugin_config": ONE_THREAD, "certificates": str(proofs)}
    table = explain(EngineConfig.create(**settings, **flag))
    assert {str(row.certified).partition(",")[0] for row in table.rows if row.chosen == name} == {"quick"}

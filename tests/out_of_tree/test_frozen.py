"""Plugins written for earlier versions of the plugin API still load and serve, on this host and on the next major's.

One folder ``api_MAJOR_MINOR`` for each version that was frozen; none is changed once its version is released.
"""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import hardpoint_plugin_api
from hardpoint import LLM, SamplingParams
from hardpoint.authoring.api_surface import Surface, frozen, frozen_versions
from hardpoint.plugin_host import PluginSet, discover
from hardpoint_plugin_api import ApiVersion, PluginLoadError
from tests.out_of_tree.build import install_project
from tests.support.checkpoints import DEEPSEEK_V2, check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm

HERE = Path(__file__).parent
VERSIONS = [str(version) for version in frozen_versions()]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="session")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each version's plugin is installed."""
    sites = {version: tmp_path_factory.mktemp("frozen") for version in VERSIONS}
    for version, site in sites.items():
        install_project(HERE / f"api_{version.replace('.', '_')}", site, tmp_path_factory.mktemp("source"))
    return sites


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest, warehouse: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> str:
    """A frozen version, whose plugin is installed for the length of a test."""
    chosen = str(request.param)
    monkeypatch.syspath_prepend(str(warehouse[chosen]))
    return chosen


def plugin(version: str) -> str:
    return f"frozen_{version.replace('.', '_')}"


def set_host(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Let this host provide another version of the API."""
    monkeypatch.setattr("hardpoint_plugin_api.versions.API_VERSION", ApiVersion.parse(host))


def next_major(version: str) -> str:
    return f"{ApiVersion.parse(version).major + 1}.0"


def test_there_is_one_plugin_for_each_frozen_version() -> None:
    assert {p.name for p in HERE.glob("api_*")} == {f"api_{version.replace('.', '_')}" for version in VERSIONS}


def test_it_touches_everything_that_a_plugin_can(version: str, warehouse: dict[str, Path]) -> None:
    surface = frozen(ApiVersion.parse(version))
    manifest = tomllib.loads((warehouse[version] / plugin(version) / "hardpoint.toml").read_text())
    contributions = manifest["contribution"]
    requirements = {key for c in contributions for r in c.get("requires", []) for key in r} - {"from"}
    assert entries(surface, "requirement ") == requirements
    assert entries(surface, "family ") == {c["family"] for c in contributions}
    assert entries(surface, "hook ") <= set(vars(import_module(f"{plugin(version)}.plugin")))
    keys = {("", key) for key in manifest} | {
        (table, key)
        for table, tables in {
            "plugin": [manifest["plugin"]],
            "config.KEY": manifest["config"].values(),
            "device": manifest["device"],
            "contribution": contributions,
            "defaults": [manifest["defaults"]],
            "include": manifest["include"],
            "override": manifest["override"],
            "namesake": manifest["namesake"],
        }.items()
        for t in tables
        for key in t
    }
    assert entries(surface, "manifest ") == {f"[{table}] {key}" if table else key for table, key in keys}
    names = {path for path in surface.entries if "." not in path and " " not in path}
    assert names == set(import_module(f"{plugin(version)}.names").NAMES)


def entries(surface: Surface, prefix: str) -> set[str]:
    return {path.removeprefix(prefix) for path in surface.entries if path.startswith(prefix)}


def test_every_target_of_it_loads(version: str) -> None:
    plugins = discover([plugin(version), "cpu"])
    offers = [o for family in hardpoint_plugin_api.FAMILIES for o in plugins.offers(family)]
    mine = [offer for offer in offers if offer.plugin == plugin(version)]
    assert len(mine) > 10
    for offer in mine:
        assert plugins.load(offer)
    assert plugins.record(plugin(version)).status == "active"


@pytest.mark.parametrize("on_next_major", [False, True], ids=["this host", "the next major"])
def test_it_serves_an_engine(
    version: str, on_next_major: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_next_major:
        set_host(monkeypatch, next_major(version))
    name = plugin(version)
    model = write_checkpoint(
        tmp_path, "qwen3", head_dim=32, use_sliding_window=True, sliding_window=9, max_window_layers=1
    )
    heard = import_module(f"{name}.plugin").HEARD
    heard.clear()
    prompts = random_prompts(3, 30)
    settings: dict[str, Any] = {"platform": name, "plugin_config": {}, "plugins": name, "max_num_seqs": 5}
    with small_llm(tmp_path, **settings) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert served(llm) >= {
            "frozen_functional",
            "frozen_out",
            "frozen_factory",
            "frozen_norm",
            "frozen_attention",
            "frozen_linear",
            name,
        }
    assert heard == [f"configure {name}", f"started {name} True", "stopping"]


def test_its_latent_attention_serves_an_engine(version: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "deepseek_v2", **DEEPSEEK_V2 | {"first_k_dense_replace": 3})
    prompts = random_prompts(3, 30)
    settings: dict[str, Any] = {"platform": plugin(version), "plugin_config": {}, "plugins": plugin(version)}
    with small_llm(tmp_path, **settings) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert "frozen_latent" in served(llm)


def served(llm: LLM) -> set[str]:
    return {
        entry.offer.contribution.name for plan in llm.core.blueprint.ctx.selector.plans for entry in plan.entries
    } | {llm.core.blueprint.choice.plan.offer.contribution.name}


def test_a_host_of_the_major_after_the_next_explains_its_refusal(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    after = f"{ApiVersion.parse(version).major + 2}.0"
    set_host(monkeypatch, after)
    reason = refusal(discover(), plugin(version))
    assert f"(wanted {version}, supported {next_major(version)} to {after}); fix: upgrade the plugin" in reason
    with pytest.raises(PluginLoadError, match="no longer carries"):
        discover([plugin(version)])


def test_an_older_host_explains_its_refusal(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_host(monkeypatch, "0.0")
    reason = refusal(discover(), plugin(version))
    assert f"(wanted {version}, supported 0.0)" in reason
    assert "pip install --upgrade hardpoint-plugin-api hardpoint-core" in reason


def refusal(plugins: PluginSet, name: str) -> str:
    record = plugins.record(name)
    assert record.status == "refused"
    return str(record.reason)

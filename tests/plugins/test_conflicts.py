"""Plugins that cannot be registered together: who is refused, and who is named."""

from __future__ import annotations

import pytest

from hardpoint.plugin_host import discover
from hardpoint_plugin_api import ManifestError, PluginConflictError
from tests.plugins.conftest import Installer


def outcome(*names: str) -> dict[str, str]:
    """The refused among ``names``, each with its reason."""
    records = {r.entry_value.split(".")[0].removeprefix("hp_"): r for r in discover().records}
    assert records["hardpoint"].is_usable
    return {name: str(records[name].reason) for name in names if records[name].status == "refused"}


def test_two_plugins_of_one_name(installed: Installer) -> None:
    installed("kit", "twin_a", "twin_b")
    refused = outcome("kit", "twin_a", "twin_b")
    assert set(refused) == {"twin_a", "twin_b"}
    for message in refused.values():
        assert "several plugins are named 'twin': twin-a-hardpoint 1.0" in message
        assert "and twin-b-hardpoint 1.0 (hp_twin_b.plugin)" in message
        assert "pip uninstall twin-a-hardpoint or pip uninstall twin-b-hardpoint" in message
    with pytest.raises(PluginConflictError, match=r"plugin twin .*several plugins"):
        discover(["twin"])


def test_nobody_else_is_core(installed: Installer) -> None:
    installed("impostor")
    assert "'core': hardpoint-core" in outcome("impostor")["impostor"]
    assert discover().record("core").is_core
    with pytest.raises(PluginConflictError, match="impostor-hardpoint"):
        raise next(r for r in discover().records if r.distribution == "impostor-hardpoint").error()
    assert [r.status for r in discover([]).records if r.distribution == "impostor-hardpoint"] == ["not-selected"]


@pytest.mark.parametrize(
    ("left", "right", "claim"),
    [
        ("left", "right", "contribute op kit_norm: same"),
        ("heir_a", "heir_b", "replace op kit_norm: reference"),
        ("preset_a", "preset_b", "describe the device preset toy"),
    ],
)
def test_third_parties_that_claim_the_same(installed: Installer, left: str, right: str, claim: str) -> None:
    installed("kit", left, right, "zebra")
    refused = outcome("kit", left, right, "zebra")
    assert set(refused) == {left, right}
    for message in refused.values():
        assert f"{left} ({left.replace('_', '-')}-hardpoint 1.0) and {right} (" in message
        assert f"would each {claim}" in message
        assert "choose with --plugins" in message
    chosen = discover([left, "kit"])
    assert chosen.record(left).is_usable
    with pytest.raises(PluginConflictError, match=f"would each {claim}; fix: choose with --plugins"):
        discover([left, right, "kit"])


def test_one_name_on_several_platforms(installed: Installer) -> None:
    """Platforms include the same portable kernels; only one plugin may offer a name on each platform."""
    installed("kit", "here", "there")
    assert outcome("here", "there") == {}
    installed("everywhere")
    assert set(outcome("here", "there", "everywhere")) == {"here", "there", "everywhere"}


def test_a_name_that_core_has(installed: Installer) -> None:
    installed("squatter")
    message = outcome("squatter")["squatter"]
    assert "core (hardpoint-core" in message
    assert "squatter (squatter-hardpoint 1.0) would each contribute attention causal: reference" in message
    assert "replaces = NAME" in message
    plugins = discover()
    assert [o.plugin for o in plugins.offers("attention", "causal") if o.contribution.name == "reference"] == ["core"]
    assert "squatted" not in plugins.names("linear")


def test_one_name_twice_in_a_manifest(installed: Installer) -> None:
    installed("twice")
    assert "more than once that it would contribute linear: q" in outcome("twice")["twice"]


def test_an_op_registered_as_a_layer_and_the_reverse(installed: Installer) -> None:
    installed("kit", "op_as_layer", "layer_as_op")
    refused = outcome("kit", "op_as_layer", "layer_as_op")
    assert set(refused) == {"op_as_layer", "layer_as_op"}
    assert "op_as_layer (op-as-layer-hardpoint 1.0) registers 'kit_norm' as a layer" in refused["op_as_layer"]
    assert "kit (kit-hardpoint 1.0) as an op" in refused["op_as_layer"]
    assert "registers 'mlp' as an op, core (hardpoint-core" in refused["layer_as_op"]
    assert "fix: write family = 'layer'" in refused["layer_as_op"]
    with pytest.raises(PluginConflictError, match="kit_norm"):
        discover(["op_as_layer", "kit"])


def test_one_name_declared_as_op_and_as_layer(installed: Installer) -> None:
    installed("new_op", "new_layer")
    refused = outcome("new_op", "new_layer")
    assert "registers 'thing' as an op, new_layer (" in refused["new_op"]
    assert "registers 'thing' as a layer, new_op (" in refused["new_layer"]
    assert discover(["new_op"]).record("new_op").is_usable


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("misspelt_op", ("no plugin declares an op named 'kit_nrom'", "did you mean 'kit_norm'?")),
        ("misspelt_layer", ("no plugin declares a layer named 'kit_blok'", "did you mean 'kit_block'?")),
        ("misspelt_replaces", ("replaces 'kit_fats', which nobody offers", "did you mean 'kit_fast'?")),
    ],
)
def test_building_on_what_is_not_there(installed: Installer, name: str, facts: tuple[str, ...]) -> None:
    installed("kit", name)
    message = outcome(name)[name]
    for fact in facts:
        assert fact in message
    with pytest.raises(ManifestError, match=facts[0]):
        discover([name, "kit"])


def test_what_a_refused_plugin_offered_is_gone_for_others(installed: Installer) -> None:
    names = ("kit", "heir_a", "heir_b", "on_heir", "on_on_heir")
    installed(*names)
    refused = outcome(*names)
    assert set(refused) == {"heir_a", "heir_b", "on_heir", "on_on_heir"}
    assert "replaces 'heir_a', which nobody offers" in refused["on_heir"]
    assert "replaces 'on_heir', which nobody offers" in refused["on_on_heir"]
    chosen = discover(["kit", "heir_a", "on_heir", "on_on_heir"])
    assert all(chosen.record(name).is_usable for name in ("kit", "heir_a", "on_heir", "on_on_heir"))


def test_without_the_declaring_plugin_its_ops_are_unknown(installed: Installer) -> None:
    installed("kit", "left")
    with pytest.raises(ManifestError, match="no plugin declares an op named 'kit_norm'"):
        discover(["left"])


def test_a_plugin_that_is_out_anyway_takes_nobody_with_it(installed: Installer) -> None:
    installed("kit", "left", "doomed_left")
    assert set(outcome("left", "doomed_left")) == {"doomed_left"}


def test_a_cycle_of_after_refuses_its_members(installed: Installer) -> None:
    names = ("ring_a", "ring_b", "ring_c", "ring_guest", "own_tail", "zebra")
    installed(*names)
    refused = outcome(*names)
    assert set(refused) == {"ring_a", "ring_b", "ring_c", "own_tail"}
    for name in ("ring_a", "ring_b", "ring_c"):
        assert "the plugins ring_a, ring_b, ring_c would each load after" in refused[name]
    assert "it would load after itself" in refused["own_tail"]
    with pytest.raises(PluginConflictError, match="ring_a, ring_b, ring_c"):
        discover(["ring_b", "ring_a", "ring_c"])

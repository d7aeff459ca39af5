"""Explaining for hardware that is not here."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint.config import EngineConfig
from hardpoint.context import load_target
from hardpoint.engine.absent_device import AbsentDeviceSelector
from hardpoint.engine.blueprint import draw
from hardpoint.engine.explain import explain
from hardpoint.plugin_host import Offer, discover
from hardpoint.reference.linear import PlainLinear
from hardpoint.selection import Row, SelectionTable, Selector, Settings
from hardpoint_plugin_api import (
    API_VERSION,
    Contribution,
    DeviceInfo,
    Form,
    LinearWorkload,
    PluginLoadError,
    QuantSpec,
    Reason,
)
from hardpoint_plugin_api.requirements import PackageRequirement, SymbolRequirement
from tests.selection.fakes import FakePlugins

CONFIG = EngineConfig.create(model="demo")
PRESETS = sorted(discover().devices())


def serves(row: Row, name: str) -> bool:
    """Whether ``name`` is chosen, or comes after a kernel of a vendor's library, which may be there."""
    codes = {each.offer.contribution.name: [reason.code for reason in each.reasons] for each in row.rejected}
    return str(row.chosen) == name or codes.get(name) == ["comes-after"]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_answered(preset: str) -> None:
    table = explain(CONFIG, preset)
    platform, *rest = table.rows
    device = discover().devices()[preset]
    assert (platform.family, platform.chosen, platform.rule) == ("platform", device.platform, "flag")
    assert {row.family for row in rest} >= {"attention", "linear", "op", "layer", "model"}
    attention = next(row for row in rest if row.family == "attention")
    assert serves(attention, "cpu_native" if device.platform == "cpu" else "triton_paged")


def offer_of_a_missing_library(family: str, form: Form = "functional") -> Offer:
    of = "rms_norm" if family in ("op", "layer") else None
    contribution = Contribution(family, "absent", "no_such_vendor_library:thing", of=of, form=form)
    return Offer(contribution, "core", API_VERSION, "hardpoint-core", "0")


class Refuses(PlainLinear):
    """A kernel whose own word is against every workload."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        return [Reason("too-wide", f"not on {device.name}")]


class AsksTheDevice(PlainLinear):
    """A kernel that must touch the device to answer."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        raise RuntimeError("no device is here")


@pytest.mark.parametrize(
    ("target", "serves", "not_asked"),
    [
        (f"{__name__}:Refuses", False, None),
        (f"{__name__}:AsksTheDevice", True, "its supports() fails without the device: no device is here"),
        ("no_such_vendor_library:thing", True, "it cannot be imported here: No module named 'no_such_vendor_library'"),
    ],
)
def test_kernels_are_asked_where_they_can_be(target: str, serves: bool, not_asked: str | None) -> None:
    contribution = Contribution("linear", "ours", target, priority=1000)
    ours = Offer(contribution, "core", API_VERSION, "hardpoint-core", "0")
    plugins = discover()
    device = plugins.devices()["zen4"]
    selector = AbsentDeviceSelector(
        FakePlugins([ours, *plugins.offers("linear")]),
        device,
        Settings({}),
        load=lambda offer: load_target(plugins, offer),
    )
    spec = QuantSpec("bfloat16")
    plan = selector.select(LinearWorkload(dtype="bfloat16", in_features=64, out_features=64, spec=(spec, spec)))
    (row,) = SelectionTable([plan], not_asked=selector.not_asked).rows
    assert (row.chosen == "ours") == serves
    assert row.not_asked == not_asked
    assert row.to_json().get("not_asked") == not_asked
    if not serves:
        against = {r.offer.contribution.name: r.reasons for r in row.rejected}
        assert [str(reason) for reason in against["ours"]] == [f"not on {device.name}"]


def test_packages_of_this_machine_say_nothing_of_another() -> None:
    requirements = (
        PackageRequirement(("absent-kernels>=2",)),
        SymbolRequirement("absent_module", "thing", "absent-library"),
    )
    contribution = Contribution("linear", "ours", "absent_kernels:Kernel", priority=1000, requires=requirements)
    ours = Offer(contribution, "core", API_VERSION, "hardpoint-core", "0")
    plugins = discover()
    offers = FakePlugins([ours, *plugins.offers("linear")])
    device = plugins.devices()["zen4"]
    spec = QuantSpec("bfloat16")
    workload = LinearWorkload(dtype="bfloat16", in_features=64, out_features=64, spec=(spec, spec))
    here = Selector(offers, device, Settings({}), load=lambda offer: load_target(plugins, offer))
    assert here.select(workload).offer.contribution.name != "ours"
    there = AbsentDeviceSelector(offers, device, Settings({}), load=lambda offer: load_target(plugins, offer))
    assert there.select(workload).offer == ours
    wanted = "the device's machine must have absent-kernels>=2 and absent-library, which this one lacks"
    assert there.not_asked == {ours: wanted}


@pytest.mark.parametrize("form", ["functional", "out", "factory"])
def test_a_kernel_that_cannot_be_imported_is_represented(form: Form) -> None:
    ctx = draw(CONFIG, "zen4").ctx
    stand_in: Any = ctx.load(offer_of_a_missing_library("op", form))
    function = stand_in(ctx, None, {}) if form == "factory" else stand_in
    with pytest.raises(AssertionError, match="absent hardware was called"):
        function()


def test_a_layer_that_cannot_be_imported_is_an_error() -> None:
    with pytest.raises(PluginLoadError, match="no_such_vendor_library"):
        draw(CONFIG, "zen4").ctx.load(offer_of_a_missing_library("layer"))


@pytest.mark.parametrize("device", ["mi300x", "b580"])
def test_platforms_without_kernels_of_their_own_have_cores_portable_ones(device: str) -> None:
    """Before the references in torch, which stay where no Triton kernel is. A vendor's library may be there."""
    rows = explain(CONFIG, device).rows
    chosen = {str(row.of or row.family): str(row.chosen) for row in rows if row.plugin in ("rocm", "xpu")}
    assert any(serves(row, "triton_paged") for row in rows if row.of == "causal")
    assert chosen.pop("causal") in ("triton_paged", "aiter_paged", "xpu_flash")
    kernels = {of for of, name in chosen.items() if name.startswith(("triton", "aiter", "xpu"))}
    assert kernels >= {"add_rms_norm", "act_and_mul", "qk_norm_rope_store", "sample_tokens", "decode_inputs", "linear"}

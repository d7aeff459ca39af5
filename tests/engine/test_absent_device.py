"""Explaining for hardware that is not here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.engine.explain import explain
from hardpoint.plugins import Offer, discover
from hardpoint_plugin_api import API_VERSION, Contribution, Form, PluginLoadError

CONFIG = EngineConfig.create(model="demo")
PRESETS = sorted(discover().devices())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_answered(preset: str) -> None:
    table = explain(CONFIG, preset)
    platform, *rest = table.rows
    device = discover().devices()[preset]
    assert (platform.family, platform.chosen, platform.rule) == ("platform", device.platform, "flag")
    assert {row.family for row in rest} >= {"attention", "linear", "op", "layer", "model", "scheduler", "runner"}
    attention = next(row for row in rest if row.family == "attention")
    chosen = {"cpu": "cpu_native"}
    if find_spec("triton"):
        chosen["cuda"] = "triton_paged_short_prompts"
    assert attention.chosen == chosen.get(device.platform, "reference")


def offer_of_a_missing_library(family: str, form: Form = "functional") -> Offer:
    of = "rms_norm" if family in ("op", "layer") else None
    contribution = Contribution(family, "absent", "no_such_vendor_library:thing", of=of, form=form)
    return Offer(contribution, "core", API_VERSION, "hardpoint-core", "0")


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

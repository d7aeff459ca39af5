"""Every element, and every format of scales that core's own methods store, is tried by the kit on the references."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.conformance.families.specs import claimed_specs
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.plugin_host import discover
from hardpoint.quantization.methods.block_floats import MXFP4, MXFP8, NVFP4
from hardpoint_plugin_api import ExpertsWorkload, LinearWorkload

STORED = [MXFP4, MXFP8, NVFP4, *(kind.spec for kind in SPECS.values())]
WORKLOADS: dict[tuple[str, str], Any] = {
    ("linear", "emulated"): partial(LinearWorkload, in_features=256, out_features=256),
    ("experts", "reference"): partial(
        ExpertsWorkload,
        activation="silu_and_mul",
        format="standard",
        num_experts=8,
        top_k=2,
        hidden_size=256,
        intermediate_size=256,
    ),
}


@pytest.mark.parametrize(("family", "name"), WORKLOADS)
def test_the_kit_tries_it(family: str, name: str) -> None:
    site = Site.open(discover(), "cpu", {"cpu": {"threads": 1}})
    offer = next(o for o in site.plugins.offers(family) if o.contribution.name == name)
    pairs = claimed_specs(Subject.load(offer, site), Plan(), [WORKLOADS[family, name]]).pairs.values()
    tried = {weight.element for weight, _ in pairs}
    assert tried >= {element.contribution.name for element in site.plugins.offers("element")}
    formats = {scale.format for weight, _ in pairs for scale in weight.scales}
    assert formats >= {scale.format for spec in STORED for scale in spec.scales}
    assert {len(weight.scales) for weight, _ in pairs} == {1, 2}
    assert any(weight.minimum for weight, _ in pairs)

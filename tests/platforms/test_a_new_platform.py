"""A new platform in forty lines: core's portable kernels come with it, and core's references where they cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.explain import explain
from tests.out_of_tree.build import Dist, importable, install
from tests.support.engines import SMALL

MANIFEST = """schema = 1
api = "0.2"
[plugin]
name = "forty"
[[device]]
name = "forty1"
arch = "forty1"
torch_type = "cpu"
memory_gib = 1
features = ["triton"]
[[contribution]]
family = "platform"
name = "forty"
target = "hp_forty.platform:Forty"
platforms = ["forty"]
[[include]]
file = "hardpoint:kernels/portable.toml"
platforms = ["forty"]
requires = [{ device_feature = ["triton"] }]
"""
PLATFORM = '''from hardpoint.platforms.torch_accelerator import TorchAcceleratorPlatform
from hardpoint_plugin_api import DeviceInfo
from tests.support.on_host import HostModule


class Forty(TorchAcceleratorPlatform):
    """One device, whose compiler is not there yet."""

    name = "forty"

    @classmethod
    def detect(cls):
        return DeviceInfo("forty", "Forty 1", "cpu", "forty1", memory_bytes=2**30)

    def device_module(self):
        return HostModule()
'''


@pytest.fixture
def forty(tmp_path: Path) -> Iterator[None]:
    """The plugin, installed."""
    assert len((MANIFEST + PLATFORM).splitlines()) <= 40
    site, wheels = tmp_path / "site", tmp_path / "wheels"
    site.mkdir()
    wheels.mkdir()
    files = {"__init__.py": "", "plugin.py": "", "hardpoint.toml": MANIFEST, "platform.py": PLATFORM}
    dist = Dist("forty-hardpoint", {f"hp_forty/{n}": text for n, text in files.items()}, {"forty": "hp_forty.plugin"})
    install([dist], site, wheels)
    with importable(site):
        yield


def test_an_engine(forty: None) -> None:
    """Tokens are those of core's references on the CPU's platform."""

    def run(platform: str) -> tuple[list[int], set[str]]:
        settings = SMALL | {"platform": platform, "dtype": "float32", "plugins": (platform,), "plugin_config": {}}
        if platform == "cpu":
            settings |= {"custom_ops": ["none"], "attention_backend": "reference", "linear_backend": "torch"}
        with LLM("demo", **settings) as llm:
            (output,) = llm.generate(["The whale"], SamplingParams(temperature=0.0, max_tokens=8))
            return list(output.outputs[0].token_ids), {row.plugin for row in llm.table.rows}

    tokens, plugins = run("forty")
    assert plugins == {"forty", "core"}
    assert tokens == run("cpu")[0]


def test_where_its_compiler_is(forty: None) -> None:
    """Explained for a device that has one: all kernels of the steps that core has in Triton are the platform's own."""
    config = EngineConfig.create(model="demo", platform="forty", plugins=("forty",), dtype="bfloat16")
    table = explain(config, "forty1")
    chosen = {row.of or row.family: row.chosen for row in table.rows if row.plugin == "forty"}
    assert chosen["causal"] == "triton_paged"
    assert chosen["rms_norm"] == "triton"
    assert "linear" in chosen
    rejected = {r.offer.contribution.name for row in table.rows for r in row.rejected}
    assert "reference" in rejected

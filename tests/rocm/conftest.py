"""AITER's stand-in, installed, and an AMD GPU whose tensors are on the host."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hardpoint_plugin_api import DeviceInfo
from hardpoint_rocm.aiter_library import function
from hardpoint_rocm.platform import RocmPlatform, describe_arch
from tests.support.aiter_calls import CALLS
from tests.support.on_host import HostModule


@pytest.fixture
def aiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in, installed as the distribution ``amd-aiter``."""
    folder = tmp_path / "site"
    (folder / "aiter").mkdir(parents=True)
    (folder / "aiter/__init__.py").write_text("from tests.support.aiter_stand_in import *\n")
    product = "ops/triton/gemm/basic/gemm_afp4wfp4"
    parts = {"mla": "latent", "fused_moe": "experts", "ops/shuffle": "experts", product: "mxfp4"}
    parts["utility/fp4_utils"] = "mxfp4"
    parts |= {f"ops/triton/attention/{name}": "triton" for name in ("unified_attention", "fp8_mqa_logits")}
    for name, stand_in in parts.items():
        (folder / f"aiter/{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"aiter/{name}.py").write_text(f"from tests.support.aiter_{stand_in}_stand_in import *\n")
    info = folder / "amd_aiter-0.1.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 0.1.9\n")
    (info / "RECORD").write_text("aiter/__init__.py,,\namd_aiter-0.1.9.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    importlib.invalidate_caches()
    function.cache_clear()
    CALLS.clear()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]
    function.cache_clear()


@pytest.fixture
def mi300x(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300X whose tensors are on the host."""
    _detected(monkeypatch, "AMD Instinct MI300X", "gfx942")


@pytest.fixture
def mi355x(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of an MI355X."""
    _detected(monkeypatch, "AMD Instinct MI355X", "gfx950")


def _detected(monkeypatch: pytest.MonkeyPatch, name: str, arch: str) -> None:
    described = describe_arch(name, arch)
    info: DeviceInfo = replace(
        described, torch_type="cpu", memory_bytes=2**30, features=described.features - {"pinned_memory"}
    )
    monkeypatch.setattr(RocmPlatform, "detect", classmethod(lambda cls: info))
    monkeypatch.setattr(RocmPlatform, "device_module", lambda self: HostModule())
    monkeypatch.setattr(RocmPlatform, "is_described", lambda self, module, index: True)

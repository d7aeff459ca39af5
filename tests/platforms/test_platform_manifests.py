"""The four platform plugins as packages: manifests, presets, and what importing them costs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hardpoint_cpu
import hardpoint_cuda
import hardpoint_rocm
import hardpoint_xpu
from hardpoint_cuda import platform as cuda
from hardpoint_plugin_api import DeviceInfo, Manifest, Platform, read_manifest
from hardpoint_plugin_api.elements import BUILT_IN
from hardpoint_rocm import platform as rocm

PACKAGES = {"cpu": hardpoint_cpu, "cuda": hardpoint_cuda, "rocm": hardpoint_rocm, "xpu": hardpoint_xpu}
FEATURES = {
    "fp8",
    "mxfp",
    "pinned_memory",
    "p2p",
    "wave32",
    "wave64",
    "native_kernels",
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "neon",
    "sve",
    "sve2",
    "i8mm",
    "bf16_native",
}


def manifest(name: str) -> Manifest:
    return read_manifest(Path(str(PACKAGES[name].__file__)).parent / "hardpoint.toml")


def presets(name: str) -> dict[str, DeviceInfo]:
    return {device.name: device for device in manifest(name).devices}


@pytest.mark.parametrize("name", PACKAGES)
def test_manifest(name: str) -> None:
    read = manifest(name)
    assert read.name == name
    (contribution,) = [c for c in read.contributions if c.family == "platform"]
    assert (contribution.name, contribution.platforms) == (name, (name,))
    module, attribute = contribution.target.split(":")
    platform = getattr(importlib.import_module(module), attribute)
    assert issubclass(platform, Platform)
    assert platform.name == name
    importlib.import_module(f"{PACKAGES[name].__name__}.plugin")


@pytest.mark.parametrize("name", PACKAGES)
def test_presets_use_the_documented_vocabulary(name: str) -> None:
    for device in manifest(name).devices:
        assert device.platform == name
        assert not device.present
        assert device.accelerator == (name != "cpu")
        assert device.features <= FEATURES
        assert ("fp8" in device.features) == (device.fp8 is not None)
        if device.fp8:
            assert device.fp8.max == BUILT_IN[device.fp8.dtype].largest, "which is what core rounds to"
        assert device.memory_bytes >= 2**30


@pytest.mark.parametrize(
    ("name", "capability"),
    [("a100", (8, 0)), ("l40s", (8, 9)), ("h100", (9, 0)), ("h200", (9, 0)), ("b200", (10, 0)), ("rtx5090", (12, 0))],
)
def test_cuda_presets_say_what_detection_would(name: str, capability: tuple[int, int]) -> None:
    preset, detected = presets("cuda")[name], cuda.describe_arch(name, capability)
    assert (preset.arch, preset.dtypes, preset.fp8) == (detected.arch, detected.dtypes, detected.fp8)
    assert preset.features - {"p2p"} == detected.features


@pytest.mark.parametrize("name", presets("rocm"))
def test_rocm_presets_say_what_detection_would(name: str) -> None:
    preset = presets("rocm")[name]
    detected = rocm.describe_arch(name, preset.arch)
    assert (preset.torch_type, preset.dtypes, preset.fp8) == (detected.torch_type, detected.dtypes, detected.fp8)
    assert preset.features - {"p2p"} == detected.features


@pytest.mark.parametrize("name", PACKAGES)
def test_detection_imports_no_torch(name: str) -> None:
    class_name = f"{name.capitalize()}Platform"
    code = (
        f"import sys; from hardpoint_{name}.platform import {class_name}; {class_name}.detect(); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

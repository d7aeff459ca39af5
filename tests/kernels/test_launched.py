"""Every Triton kernel that a manifest contributes, compiled as it is launched for devices that are not here."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from hardpoint.plugin_host import discover
from tests.kernels.compiling import SHARED_KIB
from tests.support.forked import run_module

_ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("a100", "l40s", "h100", "b200", "rtx5090", "mi210", "mi300x", "mi355x", "rx9070xt")
PLATFORM = {"sm": "cuda", "gf": "rocm"}
SCRATCH = {"cuda": 64, "rocm": 0}
"""Bytes per thread that may lie in scratch memory, by platform."""

MORE_SCRATCH = {
    ("sm_80", "prefill_attention"): 256,  # tiles for long prompts, which were measured on Hopper
    ("sm_89", "prefill_attention"): 192,
    ("sm_120", "prefill_attention"): 512,
    ("sm_90", "varlen_attention_kernel"): 720,  # keys of 192 elements in float32
    ("gfx1201", "varlen_attention_kernel"): 3600,  # the same
    ("gfx1201", "decode_latent_attention"): 2560,  # 576 elements in float32; 460 bytes in bfloat16
    ("gfx1201", "prefill_latent_attention"): 2560,
    ("gfx1201", "attend_listed_latents"): 2048,
}
"""Kernels that have too many numbers for the registers. All but NVIDIA's have so however they are cut."""

NARROW = 16
"""Rows and columns from which on all targets have matrix instructions; NVIDIA's take 8."""

SAMPLE = ["op.quantize_rows=triton_fp8", "op.rms_norm_quantized=triton_fp8", "linear=triton_float4"]
"""Kernels that are compiled in every run of the tests: 8-bit floats of three kinds of device, tiles of a table."""


@functools.cache
def contributed(platform: str) -> dict[str, str]:
    """The plugin's contributions that are core's kernels, as the program takes and as it prints them."""
    found = {}
    for family in ("op", "linear", "attention", "experts"):
        for offer in discover().offers(family):
            one = offer.contribution
            if offer.plugin == platform and one.target.startswith("hardpoint.kernels."):
                found[f"{family}.{one.of}={one.name}" if one.of else f"{family}={one.name}"] = str(one)
    return found


def compiled(device: str, names: list[str], folder: Path, seconds: float) -> list[dict[str, Any]]:
    """The program's report on each variant; AssertionError with the compiler's last words where it did not end."""
    variables = {"TRITON_CACHE_DIR": str(folder), "TRITON_DISABLE_LINE_INFO": "1", "TRITON_INTERPRET": "0"}
    done = run_module("tests.kernels.launched", [device, *names], _ROOT, seconds, variables)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    began = [line["began"] for line in lines if "began" in line]
    assert any("ended" in line for line in lines), f"{began[-1:]} {done.returncode}\n{done.stdout[-4000:]}"
    failed = [line["failed"] for line in lines if "failed" in line]
    assert not failed, "\n".join(failed)
    return [line for line in lines if "kernel" in line]


def needs_matrix_units(dot: str) -> bool:
    """Whether a product, such as ``64x16 bf16``, is of 8 or 16 bits and wide enough."""
    size, dtype = dot.split()
    return dtype not in ("f32", "tf32") and min(map(int, size.split("x"))) >= NARROW


def check(device: str, variants: list[dict[str, Any]]) -> None:
    """Shared memory fits, little is in scratch, and products of 8 and 16 bits are on matrix units."""
    arch = discover().devices()[device].arch
    for one in variants:
        assert one["shared"] <= SHARED_KIB[arch] << 10, one
        assert one["spilled"] <= MORE_SCRATCH.get((arch, one["kernel"]), SCRATCH[PLATFORM[arch[:2]]]), one
        assert one["matrix"] > 0 or not any(map(needs_matrix_units, one["dots"])), one


@pytest.mark.parametrize("device", ["h100", "mi300x", pytest.param("rx9070xt", marks=pytest.mark.nightly)])
def test_a_sample(tmp_path: Path, device: str) -> None:
    found = compiled(device, ["--few", *SAMPLE], tmp_path, 200)
    platform = PLATFORM[discover().devices()[device].arch[:2]]
    assert {one["contribution"] for one in found} == {contributed(platform)[name] for name in SAMPLE}
    check(device, found)


INTEL = {
    "b580": ["op.quantize_rows=triton", "attention.causal=triton_paged", "linear=triton_int4"],
    "max1550": ["op.rms_norm=triton", "experts=triton_grouped"],
}
"""A sample for each."""


@pytest.mark.parametrize("device", INTEL)
def test_kernels_for_intel_become_tritons_ir(tmp_path: Path, device: str) -> None:
    """That far the stock compiler goes: it has no backend for Intel GPUs."""
    found = compiled(device, ["--few", *INTEL[device]], tmp_path, 200)
    assert {one["contribution"] for one in found} == {contributed("xpu")[name] for name in INTEL[device]}


@pytest.mark.nightly
@pytest.mark.parametrize("device", INTEL)
def test_all_kernels_for_intel_become_tritons_ir(tmp_path: Path, device: str) -> None:
    """Every kernel that the plugin contributes and the device may use."""
    found = compiled(device, list(contributed("xpu")), tmp_path, 7200)
    assert len({one["kernel"] for one in found}) >= 40
    assert all(one["registers"] is None for one in found)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["op", "linear", "attention", "experts"])
@pytest.mark.parametrize("device", DEVICES)
def test_everything(tmp_path: Path, device: str, family: str) -> None:
    """Nothing that the plugin offers and this device may use is left out."""
    described = discover().devices()[device]
    names = [name for name in contributed(PLATFORM[described.arch[:2]]) if name.startswith(family)]
    found = compiled(device, names, tmp_path, 7200)
    assert found
    check(device, found)

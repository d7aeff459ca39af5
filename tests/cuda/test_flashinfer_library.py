"""FlashInfer's requirements, checked without importing it; and its version is the one the adapter was written for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hardpoint_cuda
from hardpoint.dtypes import dtype_of
from hardpoint_cuda.flashinfer_builds import attention_build, build_attention, product_build
from hardpoint_cuda.flashinfer_library import (
    COMMUNICATION_SIGNATURES,
    LATENT_SIGNATURES,
    PRODUCT,
    SIGNATURES,
    Kernel,
    LatentKernel,
    reasons,
    signature_differences,
)
from hardpoint_cuda.platform import describe_arch
from hardpoint_plugin_api import AttentionWorkload, CheckContext, Feature, Request, read_manifest
from hardpoint_plugin_api.versions import ApiVersion
from tests.support.flashinfer import needs_flashinfer

KERNELS = [
    Kernel("fa2", "bfloat16", 128, window=False, soft_cap=False),
    Kernel("fa3", "float16", 64, window=True, soft_cap=True),
]
EVERY_SIGNATURE = {**SIGNATURES, **COMMUNICATION_SIGNATURES, **LATENT_SIGNATURES}
STARS: dict[object, int] = {inspect.Parameter.VAR_POSITIONAL: 1, inspect.Parameter.VAR_KEYWORD: 2}


def write_sources(package: Path, form: int = 0, changes: dict[str, str] | None = None) -> None:
    """A package whose functions have the recorded parameters, in the first form or the last; ``changes`` by name."""
    classes: dict[str, dict[str, list[str]]] = {}
    for key, forms in EVERY_SIGNATURE.items():
        file, _, name = key.partition(":")
        holder, _, function = name.rpartition(".")
        written = (changes or {}).get(name, forms[min(form, len(forms) - 1)])
        parameters = [p if p.startswith("*") else f"{p}=None" for p in written.split()]
        functions = classes.setdefault(file, {}).setdefault(holder, [])
        functions += [f"def {function}({', '.join(parameters)}): ..."] if parameters else []
    for file, holders in classes.items():
        lines = []
        for holder, functions in holders.items():
            lines += [f"class {holder}:", *(f"    {f}" for f in functions)] if holder else functions
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))


def install(site: Path, name: str, package: str, version: str) -> Path:
    """A distribution ``name`` with one package in ``site``; returns the package's folder."""
    folder = site / package
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n")
    return folder


@pytest.fixture
def flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed FlashInfer as recorded, on a machine without compilers."""
    package = install(tmp_path, "flashinfer-python", "flashinfer", "0.6.14")
    write_sources(package)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    for name in ("CUDA_PATH", "FLASHINFER_NVCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    return package


def build(folder: Path, kernel: Kernel) -> None:
    library = folder / kernel.name / f"{kernel.name}.so"
    library.parent.mkdir(parents=True)
    library.touch()


def test_kernels_that_are_neither_built_nor_can_be(flashinfer: Path) -> None:
    (reason,) = reasons(frozenset(KERNELS))
    assert reason.code == "flashinfer-kernels"
    assert "without nvcc and ninja" in reason.message
    assert "flashinfer-jit-cache" in str(reason.fix)
    build(flashinfer / "data" / "aot", KERNELS[0])
    (reason,) = reasons(frozenset(KERNELS))
    assert KERNELS[1].name in reason.message


def test_kernels_in_the_package_are_found(flashinfer: Path) -> None:
    for kernel in KERNELS:
        build(flashinfer / "data" / "aot", kernel)
    assert reasons(frozenset(KERNELS)) == []


def test_kernels_of_the_prebuilt_package_are_found(flashinfer: Path) -> None:
    prebuilt = install(flashinfer.parent, "flashinfer-jit-cache", "flashinfer_jit_cache", "0.6.14+cu130")
    for kernel in KERNELS:
        build(prebuilt / "jit_cache", kernel)
    assert reasons(frozenset(KERNELS)) == []


def test_a_compiler_suffices(flashinfer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("nvcc", "ninja", "c++"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    assert reasons(frozenset(KERNELS)) == []


def test_what_is_in_no_place_is_built_in_a_child_process(
    flashinfer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    build(flashinfer / "data" / "aot", KERNELS[0])
    found = attention_build(KERNELS)
    assert found is not None
    assert [Kernel(**json.loads(text)) for text in found.arguments] == [KERNELS[1]]
    assert KERNELS[1].name in found.title
    assert pkgutil.resolve_name(found.target) is build_attention
    build(tmp_path / ".cache" / "flashinfer" / "0.6.14" / "90a" / "cached_ops", KERNELS[1])
    assert attention_build(KERNELS) is None


def test_the_product_is_built_for_each_size_of_weights(
    flashinfer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.delenv("TRTLLM_DG_CACHE_DIR", raising=False)
    library = flashinfer / "data" / "aot" / PRODUCT.name / f"{PRODUCT.name}.so"
    library.parent.mkdir(parents=True)
    library.touch()
    found = product_build(4096, 14336)
    assert found is not None
    assert found.arguments == ("4096", "14336")
    kernel = PRODUCT.kernels / "cache" / "gemm_4096_14336_128" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    assert product_build(4096, 14336) is None
    assert product_build(None, None) is None


def test_a_companion_of_another_version_is_named(flashinfer: Path) -> None:
    install(flashinfer.parent, "flashinfer-cubin", "flashinfer_cubin", "0.6.13")
    assert [(r.code, r.wanted, r.supported) for r in reasons(frozenset())] == [("version-mismatch", "0.6.14", "0.6.13")]


@pytest.mark.parametrize("form", [0, 1])
def test_every_recorded_form_is_accepted(tmp_path: Path, form: int) -> None:
    write_sources(tmp_path, form)
    assert signature_differences(tmp_path, EVERY_SIGNATURE) == ()


def test_another_signature_is_refused_with_the_difference(flashinfer: Path) -> None:
    (known,) = SIGNATURES["decode.py:BatchDecodeWithPagedKVCacheWrapper.run"]
    changed = known.replace(" sinks", "").replace("q_scale", "scale")
    write_sources(
        flashinfer, changes={"BatchDecodeWithPagedKVCacheWrapper.run": changed, "gen_batch_prefill_module": ""}
    )
    reason, _ = reasons(frozenset(KERNELS))
    assert reason.code == "signature"
    assert "BatchDecodeWithPagedKVCacheWrapper.run lacks q_scale, sinks, and has scale in addition" in reason.message
    assert "gen_batch_prefill_module is missing" in reason.message


@needs_flashinfer
def test_the_installed_sources_are_as_recorded() -> None:
    """Parsed and imported alike; a parser that finds nothing would agree with anything."""
    for key, forms in EVERY_SIGNATURE.items():
        file, _, name = key.partition(":")
        target: Any = importlib.import_module("flashinfer." + file.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            target = getattr(target, part)
        parameters = inspect.signature(target).parameters.values()
        assert " ".join("*" * STARS.get(p.kind, 0) + p.name for p in parameters) in forms, key
    spec = importlib.util.find_spec("flashinfer")
    assert spec
    assert spec.origin
    assert signature_differences(Path(spec.origin).parent, EVERY_SIGNATURE) == ()


@needs_flashinfer
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.backend))
def test_kernels_are_called_what_flashinfer_calls_them(kernel: Kernel) -> None:
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    dtype, size = dtype_of(kernel.dtype), kernel.head_size
    wanted = (dtype, dtype, dtype, torch.int32, size, size, 0, kernel.window, kernel.soft_cap, False)
    assert kernel.name == modules.get_batch_prefill_uri(kernel.backend, *wanted)


@needs_flashinfer
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_kernels_of_latents_are_called_what_flashinfer_calls_them(backend: str) -> None:
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    wanted = (*[torch.bfloat16] * 3, torch.int32, 512, 64, False)
    assert LatentKernel(backend, "bfloat16", 512, 64).name == modules.get_batch_mla_uri(backend, *wanted)


@pytest.mark.parametrize(
    ("changes", "capability", "code"),
    [
        ({}, (9, 0), None),
        ({"features": frozenset({Feature.SLIDING_WINDOW, Feature.SOFT_CAP})}, (8, 0), None),
        ({}, (7, 5), "arch"),
        ({"dtype": "float32"}, (9, 0), "dtype"),
        ({"kv_dtype": "float8_e4m3fn"}, (9, 0), "kv-dtype"),
        ({"head_size": 80}, (9, 0), "head-size"),
        ({"block_size": 5}, (9, 0), "block-size"),
        ({"features": frozenset({Feature.SINKS})}, (9, 0), "feature"),
        ({"features": frozenset({Feature.BATCH_INVARIANT})}, (9, 0), "feature"),
    ],
)
def test_the_manifest_says_what_it_takes(
    changes: dict[str, object], capability: tuple[int, int], code: str | None
) -> None:
    manifest = read_manifest(Path(str(hardpoint_cuda.__file__)).parent / "hardpoint.toml")
    (contribution,) = [c for c in manifest.contributions if (c.family, c.name) == ("attention", "flashinfer")]
    fields: dict[str, object] = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "head_size": 128, "block_size": 16}
    workload = AttentionWorkload(**fields | changes)  # type: ignore[arg-type]  # by name
    context = CheckContext(Request(describe_arch("gpu", capability), workload), ApiVersion(0, 2))
    found = [reason for r in contribution.requires if (reason := r.check(context))]
    assert [reason.code for reason in found if not reason.code.startswith("package")] == ([code] if code else [])

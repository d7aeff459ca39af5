"""FlashInfer's product of 8-bit floats without a GPU: who is refused, what it is given; and on one, what it makes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hardpoint.conformance.checks import values
from hardpoint.conformance.families.linear import LinearProbe, quantized_input, unpack
from hardpoint.conformance.families.specs import pair_of
from hardpoint.conformance.site import Site, Subject
from hardpoint.context import load_target
from hardpoint.numerics import fake_quantize, quantize_weight
from hardpoint.ops.error_model import ErrorModel, compare
from hardpoint.plugin_host import PluginSet, discover
from hardpoint.selection import Plan, Selector, Settings
from hardpoint_cuda import flashinfer_library, flashinfer_linear
from hardpoint_cuda.flashinfer_library import PRODUCT, PRODUCT_SIGNATURES, signature_differences
from hardpoint_cuda.flashinfer_linear import FlashInferBlockScaledLinear, by_columns
from hardpoint_cuda.platform import describe_arch
from hardpoint_plugin_api import DeviceInfo, LinearCall, LinearWorkload, PlatformError, dequantize
from tests.cuda.test_flashinfer_library import install
from tests.support.flashinfer import needs_flashinfer
from tests.support.specs import SPECS

NAME = "flashinfer_fp8_blocks"
H200 = describe_arch("H200", (9, 0))
WORKLOAD = LinearWorkload(
    dtype="bfloat16", in_features=4096, out_features=6144, spec=pair_of(SPECS, "fp8-tiles-dynamic", "bfloat16")
)


def write_sources(package: Path, **changes: str) -> None:
    """Functions with the recorded parameters, or those of ``changes``."""
    for key, (known,) in PRODUCT_SIGNATURES.items():
        file, _, name = key.partition(":")
        parameters = ", ".join(f"{p}=None" for p in changes.get(name, known).split())
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as source:
            source.write(f"def {name}({parameters}): ...\n")


def write_program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.fixture
def flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed FlashInfer as recorded, its library compiled ahead of time, on a machine without compilers."""
    package = install(tmp_path, "flashinfer-python", "flashinfer", "0.6.14")
    write_sources(package)
    library = package / "data" / "aot" / PRODUCT.name / f"{PRODUCT.name}.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("CUDA_HOME", "TRTLLM_DG_CACHE_DIR", "TRTLLM_DG_NVCC_COMPILER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return package


def test_without_a_compiler_the_reason_says_where_it_was_sought(flashinfer: Path, tmp_path: Path) -> None:
    (reason,) = FlashInferBlockScaledLinear.supports(WORKLOAD, H200)
    assert reason.code == "nvcc"
    assert str(tmp_path / "home" / ".cache" / "flashinfer" / "0.6.14" / "deep_gemm") in str(reason.supported)
    assert "CUDA_HOME" in str(reason.fix)


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME", "TRTLLM_DG_NVCC_COMPILER"])
def test_a_compiler_suffices_where_deep_gemm_looks(
    flashinfer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """That is one place: a CUDA_HOME without nvcc hides the one on the PATH."""
    write_program(tmp_path / "bin" / "nvcc")
    if where != "PATH":
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
        assert PRODUCT.compiler() is None
        write_program(tmp_path / "toolkit" / "bin" / "nvcc")
    if where == "TRTLLM_DG_NVCC_COMPILER":
        monkeypatch.setenv(where, str(tmp_path / "bin" / "nvcc"))
    assert FlashInferBlockScaledLinear.supports(WORKLOAD, H200) == []
    home = {"CUDA_HOME": "toolkit/bin/nvcc"}.get(where, "bin/nvcc")
    assert PRODUCT.compiler() == str(tmp_path / home)


@pytest.mark.parametrize("given", [False, True])
def test_kernels_that_are_there_suffice_for_their_widths(
    flashinfer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    if given:
        monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path / "given"))
    kernel = PRODUCT.kernels / "cache" / "gemm_6144_4096_128_128_128_1_51_5_2_Normal" / "nvcc_kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    assert kernel.is_relative_to(tmp_path / "given") == given
    assert FlashInferBlockScaledLinear.supports(WORKLOAD, H200) == []
    assert FlashInferBlockScaledLinear.supports(LinearWorkload(), H200) == []
    (reason,) = FlashInferBlockScaledLinear.supports(replace(WORKLOAD, in_features=14336), H200)
    assert reason.code == "nvcc"


def test_sizes_that_are_refused(flashinfer: Path, tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "nvcc")
    workload = replace(WORKLOAD, in_features=192, out_features=96)
    found = {reason.code: reason for reason in FlashInferBlockScaledLinear.supports(workload, H200)}
    assert set(found) == {"in-features", "out-features"}
    assert (found["in-features"].wanted, found["in-features"].supported) == ("192", "multiples of 128")


def test_another_signature_is_refused(flashinfer: Path, tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "nvcc")
    write_sources(flashinfer, fp8_blockscale_gemm_sm90="input weight")
    (reason,) = FlashInferBlockScaledLinear.supports(WORKLOAD, H200)
    assert reason.code == "signature"
    assert "fp8_blockscale_gemm_sm90 lacks input_scale, weight_scale, out, out_dtype" in reason.message


def plan(plugins: PluginSet, device: DeviceInfo, workload: LinearWorkload = WORKLOAD, name: str = "") -> Plan:
    settings = Settings(choices={"linear": name} if name else {})
    return Selector(plugins, device, settings, load=functools.partial(load_target, plugins)).select(workload)


def test_it_serves_prompts(flashinfer: Path, tmp_path: Path) -> None:
    """And Triton's the fewer tokens of decodes; without a compiler, Triton's all of them."""
    plugins = discover()
    assert NAME not in {entry.offer.contribution.name for entry in plan(plugins, H200).entries}
    write_program(tmp_path / "bin" / "nvcc")
    for name in (NAME, ""):
        served = {(entry.range.min, entry.offer.contribution.name) for entry in plan(plugins, H200, name=name).entries}
        assert (65, NAME) in served
        few = {name for start, name in served if start < 65}
        assert few == {"triton_fp8_skinny", "triton_fp8_gemm"}


@pytest.mark.parametrize(
    ("device", "changes", "code"),
    [
        (describe_arch("B200", (10, 0)), {}, "arch"),
        (H200, {"dtype": "float16", "spec": pair_of(SPECS, "fp8-tiles-dynamic", "float16")}, "dtype"),
        (H200, {"spec": pair_of(SPECS, "fp8-tiles", "bfloat16")}, "spec"),
        (H200, {"spec": pair_of(SPECS, "fp8-rows-dynamic", "bfloat16")}, "spec"),
    ],
)
def test_what_it_is_not_for(
    flashinfer: Path, tmp_path: Path, device: DeviceInfo, changes: dict[str, object], code: str
) -> None:
    write_program(tmp_path / "bin" / "nvcc")
    workload = replace(WORKLOAD, **changes)  # type: ignore[arg-type]  # by name
    (found,) = [r for r in plan(discover(), device, workload).rejected if r.offer.contribution.name == NAME]
    assert [reason.code for reason in found.reasons] == [code]


class Runner:
    """FlashInfer's runner: reads memory where its kernels read it, whatever shapes say, and multiplies exactly."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.configured = False

    def configure_workspace(self, workspace: torch.Tensor) -> None:
        self.configured = True

    def run_gemm(
        self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor
    ) -> None:
        assert self.configured
        (m, k), n = x.shape, weight.shape[0]
        assert all(t.is_contiguous() for t in (x, weight, y, x_scale, scale))
        assert (y.dtype, x_scale.dtype, scale.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        columns = x_scale.as_strided((m, k // 128), (1, -(-m // 4) * 4))
        assert scale.shape == (-(-n // 128), k // 128)
        tiles = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        self.rows.append(m)
        y.copy_((x.double() * columns.double().repeat_interleave(128, 1)) @ (weight.double() * tiles.double()).T)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """In the place of the library, for as long as the test takes."""
    runner = Runner()
    monkeypatch.setattr(flashinfer_library, "_load", lambda kernel: None)
    found = SimpleNamespace(get_fp8_blockscale_gemm_runner_sm90=lambda: runner)
    monkeypatch.setattr(flashinfer_linear, "module", lambda name: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(flashinfer_linear, "TRIED_ROWS", (65, 128))
    yield runner
    flashinfer_linear._product_for.cache_clear()


def probe(site: Site, **row: str) -> LinearProbe:
    offer = next(o for o in site.plugins.offers("linear") if o.contribution.name == NAME)
    usual = {"dtype": "bfloat16", "spec": "fp8-tiles-dynamic", "tokens": "none"}
    return LinearProbe(Subject.load(offer, site), usual | row, SPECS)


@pytest.mark.parametrize("bias", ["bias", "no-bias"])
@pytest.mark.parametrize("size", ["65x256x256", "131x576x256", "0x128x128"])
def test_what_the_library_is_given(flashinfer: Path, runner: Runner, size: str, bias: str) -> None:
    """By the kit's own checks, of plain input and of input that comes rounded."""
    one = probe(Site.open(discover(), "cpu"), widths=size, bias=bias)
    for finding in (values.values(one, 0), unpack(one), quantized_input(one, 0)):
        assert not finding.faults, finding
    assert not one.num_tokens or runner.rows[:3] == [65, 128, one.num_tokens]


def test_what_is_compiled_serves_all_layers_of_a_size(
    flashinfer: Path, runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    """It is all that the size needs, from the first call on, and where it is kept is told."""
    site = Site.open(discover(), "cpu")
    with caplog.at_level(logging.INFO):
        for size in ("66x128x128", "67x128x128", "66x192x128"):
            one = probe(site, widths=size, bias="bias")
            one.kernel.apply(LinearCall(torch.ones(one.num_tokens, 128).bfloat16(), one.packed, None))
    assert runner.rows == [65, 128, 66, 67, 65, 128, 66]
    assert [message for message in caplog.messages if "192 x 128" in message and str(PRODUCT.kernels) in message]


def test_folder(flashinfer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM is told where, and finds it made: it would end the process."""
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", "")  # noted, so that what is set is taken back
    monkeypatch.setattr(flashinfer_library, "_load", lambda kernel: None)
    wanted = PRODUCT.kernels
    PRODUCT.load()
    assert os.environ["TRTLLM_DG_CACHE_DIR"] == str(wanted)
    assert (wanted / "cache").is_dir()
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(flashinfer / "__init__.py" / "below"))
    with pytest.raises(PlatformError, match=r"nowhere to keep kernels.*set TRTLLM_DG_CACHE_DIR"):
        PRODUCT.load()


def test_a_compiler_that_fails_is_told_of(flashinfer: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_gemm(*tensors: torch.Tensor) -> None:
        raise RuntimeError("Assertion failed: isPathValid(path_)")

    monkeypatch.setattr(runner, "run_gemm", run_gemm)
    one = probe(Site.open(discover(), "cpu"), widths="65x256x128", bias="bias")
    with pytest.raises(PlatformError, match=r"weights of 256 x 128: Assertion failed.*choose another linear kernel"):
        one.kernel.apply(LinearCall(torch.ones(65, 128).bfloat16(), one.packed, None))


def test_rows_of_scales_fill_up_sixteen_bytes() -> None:
    scale = torch.arange(15.0).view(5, 3)
    columns = by_columns(scale)
    assert columns.shape == (3, 8)
    assert torch.equal(columns[:, :5], scale.t())


@needs_flashinfer
def test_the_installed_sources_are_as_recorded() -> None:
    spec = importlib.util.find_spec("flashinfer")
    assert spec
    assert spec.origin
    package = Path(spec.origin).parent
    assert signature_differences(package, PRODUCT_SIGNATURES) == ()
    assert f'"{PRODUCT.name}"' in (package / "jit" / "gemm" / "fp8_blockscale.py").read_text()
    assert callable(importlib.import_module("flashinfer.gemm.gemm_base").get_fp8_blockscale_gemm_runner_sm90)


@pytest.mark.accelerator
@needs_flashinfer
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336)])
def test_large_matrices_eager_and_captured(n: int, k: int) -> None:
    """Against the product of the dequantized numbers, in float64 as everywhere."""
    site = Site.open(discover(), "cuda")
    subject, workload = (
        probe(site, widths="1x128x128", bias="bias").subject,
        replace(WORKLOAD, in_features=k, out_features=n),
    )
    if reason := subject.refuses(workload):
        pytest.skip(str(reason))
    kernel = subject.target(site.context("bfloat16"), workload)
    assert isinstance(kernel, FlashInferBlockScaledLinear)
    assert workload.spec
    generator = torch.Generator(site.device).manual_seed(0)
    weight, activation = workload.spec
    slots = quantize_weight(torch.randn(n, k, generator=generator, device=site.device) * k**-0.5, weight)
    weights, plain = kernel.prepack(slots), dequantize(slots, weight, torch.bfloat16)
    exact = dequantize(slots, weight, torch.float64)
    for num_rows in (65, 130, 300, 1030):
        x = torch.randn(num_rows, k, generator=generator, device=site.device).bfloat16()
        truth = fake_quantize(x.double(), activation, {}) @ exact.T
        own = torch.nn.functional.linear(fake_quantize(x, activation, {}), plain)
        eager, static, graph = kernel.apply(LinearCall(x, weights)), torch.zeros_like(x), torch.cuda.CUDAGraph()
        found = compare(str(num_rows), eager, own.cpu(), truth.cpu(), ErrorModel(), x.device)
        assert not found.faults, found.faults
        kernel.apply(LinearCall(static, weights))  # what rounds may still have to be compiled
        with torch.cuda.graph(graph):
            captured = kernel.apply(LinearCall(static, weights))
        static.copy_(x)
        graph.replay()
        assert torch.equal(captured, eager)

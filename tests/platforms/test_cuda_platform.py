"""Detection of NVIDIA GPUs, on a faked NVML and faked files."""
# ruff: noqa: N802  # the names are NVML's

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardpoint.kernels import launch
from hardpoint.platforms.stream_graphs import BATCH_SIZES, PIECE_SIZES, TOKEN_SIZES, parse_sizes, sizes_of
from hardpoint.platforms.testing import write_tree
from hardpoint.platforms.torch_accelerator import TorchAcceleratorPlatform
from hardpoint_cuda.platform import CudaPlatform, describe, describe_arch
from hardpoint_plugin_api import NO_DEVICE, ConfigError, DeviceInfo, Fp8Format, NumaNode, Reason

GIB = 2**30
CUDA_BUILD = {"__version__": "2.11.0+cu130", "cuda": "13.0"}
NO_DRIVER = Reason(NO_DEVICE, "no NVIDIA driver is loaded", fix="install the NVIDIA driver, if there is a GPU")


@dataclass(frozen=True)
class FakeGpu:
    name: str
    capability: tuple[int, int]
    gib: int
    uuid: str
    bus: str = "3B"


H200 = FakeGpu("NVIDIA H200", (9, 0), 140, "GPU-aaaa1111")
H200_B = FakeGpu("NVIDIA H200", (9, 0), 140, "GPU-bbbb2222", bus="5E")
RTX = FakeGpu("NVIDIA GeForce RTX 5090", (12, 0), 32, "GPU-cccc3333", bus="AF")
T4 = FakeGpu("Tesla T4", (7, 5), 15, "GPU-dddd4444")


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeNvml:
    """The functions of ``pynvml`` that detection uses; ``init_error`` is the code that nvmlInit fails with."""

    gpus: list[FakeGpu] = field(default_factory=list)
    init_error: int | None = None
    broken: bool = False
    p2p: bool = True
    running: int = 0
    NVMLError: type[Exception] = FakeNvmlError

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise FakeNvmlError(self.init_error)
        self.running += 1

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle: FakeGpu, /) -> str:
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeGpu, /) -> str:
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu, /) -> Any:
        if self.broken:
            raise FakeNvmlError(15)
        return SimpleNamespace(total=handle.gib * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu, /) -> tuple[int, int]:
        return handle.capability

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu, /) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle.bus}:00.0")

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, index: int, /) -> int:
        assert index == 0
        if not self.p2p:
            raise FakeNvmlError(3)
        return 0


def found(root: Path, nvml: FakeNvml, visible: str | None = None) -> DeviceInfo:
    info = describe(root, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, nvml, CUDA_BUILD)
    assert isinstance(info, DeviceInfo), info
    return info


def refused(root: Path, nvml: FakeNvml | None, visible: str | None = None) -> Reason:
    reason = describe(root, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, nvml, CUDA_BUILD)
    assert isinstance(reason, Reason), reason
    return reason


def test_one_gpu(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "sys/devices/system/node/node1/cpulist": "8-9",
            "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1",
        },
    )
    info = found(root, FakeNvml([H200]))
    assert info == DeviceInfo(
        platform="cuda",
        name="NVIDIA H200",
        torch_type="cuda",
        arch="sm_90",
        memory_bytes=140 * GIB,
        features=frozenset({"fp8", "pinned_memory"}),
        fp8=Fp8Format("float8_e4m3fn", 448.0),
        driver="580.159.04",
    )
    assert info.numa == (NumaNode(1, (8, 9), 0, (0,)),)


def test_two_alike_read_each_others_memory_where_nvml_says_so(tmp_path: Path) -> None:
    info = found(tmp_path, FakeNvml([H200, H200_B]))
    assert (info.count, "p2p" in info.features) == (2, True)
    assert "p2p" not in found(tmp_path, FakeNvml([H200, H200_B], p2p=False)).features


def test_of_several_kinds_the_first_visible_is_described(tmp_path: Path) -> None:
    nvml = FakeNvml([H200, RTX, H200_B])
    assert (found(tmp_path, nvml).name, found(tmp_path, nvml).count) == ("NVIDIA H200", 2)
    other = found(tmp_path, nvml, "1,0")
    assert (other.name, other.arch, other.count) == ("NVIDIA GeForce RTX 5090", "sm_120", 1)
    assert "mxfp" in other.features


def test_an_old_gpu_has_neither_bfloat16_nor_fp8(tmp_path: Path) -> None:
    info = found(tmp_path, FakeNvml([T4]))
    assert (info.arch, info.fp8) == ("sm_75", None)
    assert info.dtypes == {"float32", "float16"}


@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("1,0", 2), ("GPU-bbbb", 1), ("0,9", 1)])
def test_visible_devices(tmp_path: Path, visible: str, count: int) -> None:
    assert found(tmp_path, FakeNvml([H200, H200_B]), visible).count == count


@pytest.mark.parametrize(
    ("visible", "code"),
    [
        ("", NO_DEVICE),
        ("-1", NO_DEVICE),
        ("7", "devices-hidden"),
        ("GPU-ffff", "devices-hidden"),
        ("0,0", "devices-hidden"),
    ],
)
def test_hidden_devices(tmp_path: Path, visible: str, code: str) -> None:
    assert refused(tmp_path, FakeNvml([H200, H200_B]), visible) == Reason(
        code,
        f"CUDA_VISIBLE_DEVICES={visible!r} hides every device (2 x NVIDIA H200)",
        fix="unset CUDA_VISIBLE_DEVICES, or list some of 0 to 1",
    )


def test_mig_instances_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, FakeNvml([H200]), "MIG-1234").code == "mig"


def test_a_driver_without_gpus(tmp_path: Path) -> None:
    assert refused(tmp_path, FakeNvml([])).code == NO_DEVICE


@pytest.mark.parametrize("nvml", [None, FakeNvml(init_error=12), FakeNvml(init_error=9)])
def test_a_host_without_a_driver(tmp_path: Path, nvml: FakeNvml | None) -> None:
    assert refused(tmp_path, nvml) == NO_DRIVER


@pytest.mark.parametrize(
    ("nvml", "code", "fix"),
    [
        (None, "nvml-binding-missing", "pip install nvidia-ml-py"),
        (FakeNvml(init_error=12), "nvml-missing", "NVIDIA_DRIVER_CAPABILITIES"),
        (FakeNvml(init_error=18), "nvml-version-mismatch", "reboot"),
        (FakeNvml(init_error=999), "nvml-error", "nvidia-smi"),
        (FakeNvml([H200], broken=True), "nvml-error", "nvidia-smi"),
    ],
)
def test_gpus_that_nvml_cannot_describe_are_named(tmp_path: Path, nvml: FakeNvml | None, code: str, fix: str) -> None:
    information = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\n"
    listed = {"proc/driver/nvidia/gpus/0000:3b:00.0/information": information}
    reason = refused(write_tree(tmp_path, listed | {"dev/nvidiactl": ""}), nvml)
    assert reason.code == code
    assert reason.message.startswith("1 GPU(s) are present (NVIDIA H200), but ")
    assert reason.fix is not None
    assert fix in reason.fix


def test_a_container_that_is_given_no_gpu_sees_the_hosts_names(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"proc/driver/nvidia/gpus/0000:3b:00.0/information": "Model: NVIDIA H200\n"})
    reason = refused(root, FakeNvml(init_error=12))
    assert reason.code == NO_DEVICE
    assert "none of the host's GPUs (NVIDIA H200)" in reason.message


def test_whatever_a_damaged_library_raises_is_a_reason(tmp_path: Path) -> None:
    class Damaged(FakeNvml):
        def nvmlInit(self) -> None:
            raise OSError("libnvidia-ml.so.1: invalid ELF header")

    assert refused(tmp_path, Damaged()).message == "NVML fails: libnvidia-ml.so.1: invalid ELF header"


def test_a_sandbox_with_device_files_alone(tmp_path: Path) -> None:
    assert refused(write_tree(tmp_path, {"dev/nvidiactl": ""}), None).code == "nvml-binding-missing"


def test_torch_without_cuda(tmp_path: Path) -> None:
    reason = describe(tmp_path, {}, FakeNvml([H200]), {"__version__": "2.13.0+cpu", "cuda": None})
    assert isinstance(reason, Reason)
    assert reason.code == "torch-build"
    assert "2.13.0+cpu was built without CUDA support; fix: pip install" in str(reason)


@pytest.mark.parametrize("nvml", [FakeNvml([H200]), FakeNvml([H200], broken=True), FakeNvml([])])
def test_nvml_is_always_shut_down(tmp_path: Path, nvml: FakeNvml) -> None:
    describe(tmp_path, {}, nvml, CUDA_BUILD)
    assert nvml.running == 0


def test_sizes_of_graphs_come_as_a_list() -> None:
    assert parse_sizes("8, 1,2,2", "cuda.graph_batch_sizes") == (1, 2, 8)
    assert parse_sizes("none", "cuda.graph_token_sizes") == ()
    assert sizes_of({}, "cuda") == (BATCH_SIZES, TOKEN_SIZES, PIECE_SIZES, {})
    asked = {"token_sizes": "cuda.graph_token_sizes"}
    assert sizes_of({"graph_token_sizes": "8,4"}, "cuda") == (BATCH_SIZES, (4, 8), PIECE_SIZES, asked)
    for wrong in ("", "1,two", "0", "-4", "1.5", "none"):
        with pytest.raises(ConfigError, match=r"cuda.graph_batch_sizes must be .*--enforce-eager"):
            parse_sizes(wrong, "cuda.graph_batch_sizes")


@pytest.mark.parametrize(
    ("capability", "settings", "rows", "overlaps"),
    [
        ((9, 0), {}, 128, True),
        ((9, 0), {}, 129, False),
        ((12, 0), {}, 1, True),
        ((8, 9), {}, 1, False),
        ((9, 0), {"overlap_launches": False}, 1, False),
    ],
)
def test_launches_overlap_where_they_can(
    capability: tuple[int, int], settings: dict[str, Any], rows: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlapped = pytest.importorskip("hardpoint_cuda.overlapped")
    monkeypatch.setattr(launch, "_overlaps", {"cuda": launch.Overlap(None, {})})
    monkeypatch.setattr(TorchAcceleratorPlatform, "activate", lambda self, index: torch.device("cuda", index))
    CudaPlatform(describe_arch("a GPU", capability), settings).activate(0)
    x = SimpleNamespace(device=torch.device("cuda", 0), shape=(rows, 64))
    assert launch.begun(x) == (  # type: ignore[arg-type]  # all that it asks of a tensor
        {"BEGIN": overlapped.OVERLAP.begin, "launch_pdl": True} if overlaps else {"BEGIN": None}
    )

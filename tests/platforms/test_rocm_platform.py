"""Detection of AMD GPUs, on faked sysfs trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.platforms.testing import write_tree
from hardpoint_plugin_api import NO_DEVICE, DeviceInfo, Fp8Format, NumaNode, Reason
from hardpoint_rocm.kfd import gfx_name
from hardpoint_rocm.platform import describe

GIB = 2**30
BUILD = {"__version__": "2.11.0+rocm7.2", "hip": "7.2"}
NODES = "sys/class/kfd/kfd/topology/nodes"
CPU_NODE = {f"{NODES}/0/properties": "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n", "dev/kfd": ""}


def gpu(node: int, version: int, gib: int, linked: tuple[int, ...] = (), product: str = "") -> dict[str, str]:
    """Files of one GPU as node ``node`` of KFD's topology, at PCI bus 0x10 * node."""
    base, minor = f"{NODES}/{node}", 127 + node
    files = {
        f"{base}/properties": (
            f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\nvendor_id 4098\ndomain 0\n"
            f"location_id {0x10 * node << 8}\ndrm_render_minor {minor}\nunique_id {0xABC0 + node}\n"
        ),
        f"{base}/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {gib * GIB}\nflags 0\n",
        f"{base}/mem_banks/1/properties": "heap_type 0\nsize_in_bytes 999\n",
    }
    files |= {f"{base}/io_links/{i}/properties": f"type 11\nnode_to {to}\n" for i, to in enumerate(linked)}
    return files | ({f"sys/class/drm/renderD{minor}/device/product_name": product} if product else {})


def mi300x(node: int, linked: tuple[int, ...] = ()) -> dict[str, str]:
    return gpu(node, 90402, 192, linked, product="AMD Instinct MI300X")


def found(root: Path, **environ: str) -> DeviceInfo:
    info = describe(root, environ, BUILD)
    assert isinstance(info, DeviceInfo), info
    return info


def refused(root: Path, **environ: str) -> Reason:
    reason = describe(root, environ, BUILD)
    assert isinstance(reason, Reason), reason
    return reason


@pytest.mark.parametrize(
    ("version", "name"),
    [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110000, "gfx1100"), (120001, "gfx1201")],
)
def test_gfx_name(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_two_linked_gpus(tmp_path: Path) -> None:
    files = CPU_NODE | mi300x(1, linked=(0, 2)) | mi300x(2, linked=(0, 1))
    files["sys/devices/system/node/node0/cpulist"] = "0-1"
    files["sys/bus/pci/devices/0000:20:00.0/numa_node"] = "0"
    info = found(write_tree(tmp_path, files))
    assert info == DeviceInfo(
        platform="rocm",
        name="AMD Instinct MI300X",
        torch_type="cuda",
        arch="gfx942",
        count=2,
        memory_bytes=192 * GIB,
        features=frozenset({"fp8", "pinned_memory", "p2p", "wave64"}),
        fp8=Fp8Format("float8_e4m3fnuz", 224.0),
    )
    assert info.numa == (NumaNode(0, (0, 1), 0, (1,)),)


def test_of_several_kinds_the_first_visible_is_described(tmp_path: Path) -> None:
    root = write_tree(tmp_path, CPU_NODE | mi300x(1) | gpu(2, 120001, 16))
    assert (found(root).arch, found(root).count) == ("gfx942", 1)
    other = found(root, HIP_VISIBLE_DEVICES="1")
    assert (other.name, other.arch, other.memory_bytes) == ("AMD gfx1201", "gfx1201", 16 * GIB)
    assert other.fp8 == Fp8Format("float8_e4m3fn", 448.0)
    assert "mxfp" not in other.features


@pytest.mark.parametrize(
    ("version", "arch", "wave", "fp8"),
    [
        (90010, "gfx90a", "wave64", None),
        (90402, "gfx942", "wave64", "float8_e4m3fnuz"),
        (90500, "gfx950", "wave64", "float8_e4m3fn"),
        (110000, "gfx1100", "wave32", None),
        (120001, "gfx1201", "wave32", "float8_e4m3fn"),
    ],
)
def test_families(tmp_path: Path, version: int, arch: str, wave: str, fp8: str | None) -> None:
    info = found(write_tree(tmp_path, CPU_NODE | gpu(1, version, 64)))
    assert info.arch == arch
    assert {name for name in info.features if name.startswith("wave")} == {wave}
    assert (info.fp8 and info.fp8.dtype) == fp8
    assert ("fp8" in info.features) == (fp8 is not None)


def test_nodes_are_in_numerical_order(tmp_path: Path) -> None:
    root = write_tree(tmp_path, CPU_NODE | mi300x(10) | gpu(9, 90500, 288))
    assert found(root).arch == "gfx950"


def test_the_runtimes_variable_filters_before_hips(tmp_path: Path) -> None:
    root = write_tree(tmp_path, CPU_NODE | mi300x(1) | gpu(2, 120001, 16) | gpu(3, 110000, 24))
    assert found(root, ROCR_VISIBLE_DEVICES="1,2", HIP_VISIBLE_DEVICES="1").arch == "gfx1100"
    assert found(root, ROCR_VISIBLE_DEVICES="GPU-000000000000abc2").arch == "gfx1201"
    assert found(root, CUDA_VISIBLE_DEVICES="2").arch == "gfx1100"
    assert found(root, CUDA_VISIBLE_DEVICES="2", HIP_VISIBLE_DEVICES="0").arch == "gfx942"


@pytest.mark.parametrize("name", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
@pytest.mark.parametrize("value", ["", "-1", "4"])
def test_hidden_devices(tmp_path: Path, name: str, value: str) -> None:
    reason = refused(write_tree(tmp_path, CPU_NODE | mi300x(1)), **{name: value})
    assert reason.code == ("devices-hidden" if value == "4" else NO_DEVICE)
    assert reason.message == f"{name}={value!r} hides every device (1 x AMD Instinct MI300X)"
    assert reason.fix is not None
    assert name in reason.fix


def test_a_host_without_a_driver(tmp_path: Path) -> None:
    reason = refused(tmp_path)
    assert (reason.code, reason.message) == (NO_DEVICE, "no amdgpu driver is loaded")


def test_gpus_closed_to_this_container(tmp_path: Path) -> None:
    root = write_tree(tmp_path, CPU_NODE | {f"{NODES}/1/properties": ""})
    reason = refused(root)
    assert reason.code == NO_DEVICE
    assert reason.fix is not None
    assert "--device=/dev/kfd" in reason.fix


def test_a_container_without_the_device_file(tmp_path: Path) -> None:
    assert refused(write_tree(tmp_path, mi300x(1))).code == NO_DEVICE


def test_a_device_file_that_may_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may run as root, who may do anything
    reason = refused(write_tree(tmp_path, CPU_NODE | mi300x(1)))
    assert (reason.code, reason.fix) == ("no-access", "add the user to the groups render and video")


def test_torch_without_rocm(tmp_path: Path) -> None:
    reason = describe(write_tree(tmp_path, CPU_NODE | mi300x(1)), {}, {"__version__": "2.11.0", "cuda": "13.0"})
    assert isinstance(reason, Reason)
    assert (reason.code, reason.message) == (
        "torch-build",
        "the installed PyTorch 2.11.0 was built without ROCm support",
    )

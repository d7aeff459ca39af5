"""Detection of Intel GPUs, on faked sysfs trees; memory on a driver that does not report it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hardpoint.platforms.testing import write_tree
from hardpoint.platforms.torch_accelerator import DeviceModule
from hardpoint_plugin_api import NO_DEVICE, DeviceInfo, MemorySnapshot, NumaNode, Reason
from hardpoint_xpu.platform import XpuMemory, describe

GIB = 2**30
BUILD = {"__version__": "2.11.0+xpu", "xpu": "20250300"}


def card(
    number: int, device: str, slot: str, driver: str = "xe", vendor: str = "0x8086", **more: str
) -> dict[str, str]:
    base = f"sys/class/drm/card{number}/device"
    files = {"vendor": vendor, "device": device, "uevent": f"DRIVER={driver}\nPCI_CLASS=30000\nPCI_SLOT_NAME={slot}\n"}
    return {f"{base}/{name}": text for name, text in (files | more).items()}


def b580(number: int, slot: str, **more: str) -> dict[str, str]:
    return card(number, "0xe20b", slot, **more)


MAX1550 = card(0, "0x0bd5", "0000:29:00.0", driver="i915", numa_node="0")
INTEGRATED = card(1, "0x7d55", "0000:00:02.0", driver="i915")
SERVER_VGA = card(2, "0x2000", "0000:02:00.0", driver="ast", vendor="0x1a03")


def found(root: Path, **environ: str) -> DeviceInfo:
    info = describe(root, environ, BUILD)
    assert isinstance(info, DeviceInfo), info
    return info


def refused(root: Path, **environ: str) -> Reason:
    reason = describe(root, environ, BUILD)
    assert isinstance(reason, Reason), reason
    return reason


def test_one_gpu_beside_integrated_graphics(tmp_path: Path) -> None:
    vram = {"sys/class/drm/card0/device/tile0/physical_vram_size_bytes": str(12 * GIB - 4096)}
    assert found(write_tree(tmp_path, b580(0, "0000:03:00.0") | vram | INTEGRATED | SERVER_VGA)) == DeviceInfo(
        platform="xpu",
        name="Intel Arc B580",
        torch_type="xpu",
        arch="bmg_g21",
        memory_bytes=12 * GIB - 4096,
        features=frozenset({"pinned_memory"}),
        driver="xe",
    )


def test_each_stack_is_a_device_unless_composite(tmp_path: Path) -> None:
    root = write_tree(tmp_path, MAX1550 | {"sys/devices/system/node/node0/cpulist": "0"})
    stacks = found(root)
    assert (stacks.arch, stacks.count, stacks.memory_bytes) == ("pvc", 2, 64 * GIB)
    assert stacks.numa == (NumaNode(0, (0,), 0, (0, 1)),)
    whole = found(root, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE")
    assert (whole.count, whole.memory_bytes) == (1, 128 * GIB)


def test_of_several_kinds_the_first_visible_in_pci_order_is_described(tmp_path: Path) -> None:
    root = write_tree(tmp_path, b580(0, "0000:83:00.0") | card(1, "0xe211", "0000:03:00.0") | b580(2, "0000:43:00.0"))
    assert (found(root).name, found(root).count) == ("Intel Arc Pro B60", 1)
    assert (found(root, ZE_AFFINITY_MASK="2,1").name, found(root, ZE_AFFINITY_MASK="2,1").count) == (
        "Intel Arc B580",
        2,
    )
    assert found(root, ZE_AFFINITY_MASK="").count == 1


@pytest.mark.parametrize(("mask", "code"), [("5", "devices-hidden"), ("-1", NO_DEVICE), ("0.1", "affinity-mask")])
def test_masks_that_leave_nothing(tmp_path: Path, mask: str, code: str) -> None:
    reason = refused(write_tree(tmp_path, b580(0, "0000:03:00.0")), ZE_AFFINITY_MASK=mask)
    assert reason.code == code
    assert f"ZE_AFFINITY_MASK={mask!r}" in reason.message


def test_none_at_all(tmp_path: Path) -> None:
    assert refused(write_tree(tmp_path, SERVER_VGA)).code == NO_DEVICE


def test_integrated_graphics_alone(tmp_path: Path) -> None:
    reason = refused(write_tree(tmp_path, INTEGRATED))
    assert (reason.code, "the processor's own graphics" in reason.message) == (NO_DEVICE, True)


def test_an_unknown_device(tmp_path: Path) -> None:
    reason = refused(write_tree(tmp_path, card(0, "0xffff", "0000:03:00.0")))
    assert (reason.code, reason.fix) == ("device-unknown", "pip install --upgrade hardpoint-xpu")
    assert "0xffff at 0000:03:00.0" in reason.message


def test_torch_without_xpu(tmp_path: Path) -> None:
    reason = describe(write_tree(tmp_path, b580(0, "0000:03:00.0")), {}, {"__version__": "2.13.0+cpu", "xpu": None})
    assert isinstance(reason, Reason)
    assert reason.code == "torch-build"


def test_memory_of_a_driver_that_does_not_report_what_is_free() -> None:
    def mem_get_info(device: int) -> Any:
        raise RuntimeError("The device does not support querying its free memory")

    module = SimpleNamespace(
        mem_get_info=mem_get_info,
        get_device_properties=lambda device: SimpleNamespace(total_memory=1000),
        memory_reserved=lambda device: 300,
        max_memory_allocated=lambda device: 250,
    )
    assert XpuMemory(cast("DeviceModule", module), 0).snapshot() == MemorySnapshot(free=700, total=1000, peak=250)

"""Intel GPUs as a platform: found in sysfs, driven through torch's device-generic API."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hardpoint.platforms import host
from hardpoint.platforms.torch_accelerator import DeviceModule, TorchAcceleratorPlatform, TorchMemory
from hardpoint.platforms.torch_build import TorchBuild, torch_build, torch_reason
from hardpoint_plugin_api import NO_DEVICE, DeviceInfo, Reason
from hardpoint_xpu.cards import Card, read_cards

AFFINITY_MASK = "ZE_AFFINITY_MASK"
HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"


def describe(root: Path, environ: Mapping[str, str], build: TorchBuild | None) -> DeviceInfo | Reason:
    """Describe the visible discrete GPUs, or say why none can be used.

    A device is what Level Zero makes one: each stack of a card, or with ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE the card.
    GPUs of several kinds: the first visible one is described and those equal to it are counted. ``build`` is what
    torch was built for.
    """
    cards = read_cards(root)
    discrete = [card for card in cards if not card.integrated]
    if not cards:
        return Reason(
            NO_DEVICE, "no GPU is bound to the driver xe or i915", fix="install the driver, if there is a GPU"
        )
    if not discrete:
        return Reason(NO_DEVICE, "the only Intel GPU is the processor's own graphics, which is not supported")
    flat = environ.get(HIERARCHY, "FLAT").upper() != "COMPOSITE"
    devices = [card for card in discrete for _ in range(card.model.stacks if card.model and flat else 1)]
    visible = _visible(environ.get(AFFINITY_MASK), devices)
    if isinstance(visible, Reason):
        return visible
    first = visible[0]
    if first.model is None:
        message = f"the Intel GPU {first.device_id} at {first.pci} is not known to this version of hardpoint-xpu"
        return Reason("device-unknown", message, fix="pip install --upgrade hardpoint-xpu")
    fix = "pip install --force-reinstall torch from PyTorch's index for Intel GPUs (pytorch.org, Get Started)"
    reason = torch_reason(build, "xpu", "support for Intel GPUs", fix)
    if reason:
        return reason
    alike = [card for card in visible if card.device_id == first.device_id]
    return DeviceInfo(
        platform="xpu",
        name=first.model.name,
        torch_type="xpu",
        arch=first.model.arch,
        count=len(alike),
        memory_bytes=first.memory_bytes // (first.model.stacks if flat else 1),
        features=frozenset({"pinned_memory"}),
        numa=host.numa_nodes(root, [card.numa_node for card in alike]),
        driver=first.driver,
    )


def _visible(mask: str | None, devices: list[Card]) -> list[Card] | Reason:
    """Return the devices that ZE_AFFINITY_MASK leaves; Level Zero takes an empty mask for none set."""
    if mask and "." in mask:
        message = f"{AFFINITY_MASK}={mask!r} names parts of devices, which is not supported"
        return Reason("affinity-mask", message, fix=f"set {AFFINITY_MASK} to whole numbers, such as 0,1")
    visible = [devices[i] for i in host.visible_indices(mask or None, [""] * len(devices))]
    name = devices[0].model.name if devices[0].model else "Intel GPU"
    return visible or host.hidden_reason(AFFINITY_MASK, mask or "", name, len(devices))


class XpuMemory(TorchMemory):
    """Memory of an Intel GPU; not every driver reports what is free."""

    def free_and_total(self) -> tuple[int, int]:
        """Ask the driver; where it cannot tell, everything that this process has not reserved counts as free."""
        try:
            return super().free_and_total()
        except RuntimeError:
            total = int(self.module.get_device_properties(self.index).total_memory)
            return total - self.module.memory_reserved(self.index), total


class XpuPlatform(TorchAcceleratorPlatform):
    """Intel's discrete GPUs, which Level Zero lists before integrated graphics. Steps run without graphs so far."""

    name = "xpu"
    collectives = "xccl"

    @classmethod
    def detect(cls) -> DeviceInfo | Reason:
        """Read sysfs; no device is opened and torch is not imported."""
        return describe(host.ROOT, os.environ, torch_build())

    def new_memory(self, module: DeviceModule, index: int) -> TorchMemory:
        """Return memory that copes with drivers that do not report what is free."""
        return XpuMemory(module, index)

"""Intel's discrete GPUs as the kernel's DRM drivers describe them in sysfs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hardpoint.platforms import host

VENDOR = "0x8086"
DRIVERS = ("xe", "i915")
INTEGRATED_SLOT = "00:02.0"  # where every processor of Intel's with graphics has them


@dataclass(frozen=True)
class Model:
    """A card by its PCI device id: architecture as oneAPI names it, datasheet memory in all, stacks on the card."""

    name: str
    arch: str
    memory_gib: int
    stacks: int = 1


MODELS = {
    "0x0bd5": Model("Intel Data Center GPU Max 1550", "pvc", 128, stacks=2),
    "0x0bd6": Model("Intel Data Center GPU Max 1550", "pvc", 128, stacks=2),
    "0x0bd9": Model("Intel Data Center GPU Max 1100", "pvc", 48),
    "0x0bda": Model("Intel Data Center GPU Max 1100", "pvc", 48),
    "0x0bdb": Model("Intel Data Center GPU Max 1100", "pvc", 48),
    "0x56a0": Model("Intel Arc A770", "acm_g10", 16),
    "0x56c0": Model("Intel Data Center GPU Flex 170", "acm_g10", 16),
    "0xe20b": Model("Intel Arc B580", "bmg_g21", 12),
    "0xe20c": Model("Intel Arc B570", "bmg_g21", 10),
    "0xe211": Model("Intel Arc Pro B60", "bmg_g21", 24),
}


@dataclass(frozen=True)
class Card:
    """One card. ``model`` is None for a device id that this plugin does not know."""

    device_id: str
    driver: str
    pci: str
    model: Model | None
    memory_bytes: int
    numa_node: int | None

    @property
    def integrated(self) -> bool:
        """Whether this is the processor's own graphics; in a virtual machine a card may sit in that slot too."""
        return self.pci.endswith(INTEGRATED_SLOT) and self.model is None


def read_cards(root: Path) -> list[Card]:
    """Return the cards that one of Intel's drivers is bound to, in PCI order."""
    base = root / "sys/class/drm"
    numbered = [name for name in host.entries(base) if name.removeprefix("card").isdigit()]
    cards = [_read(base / name / "device") for name in numbered]
    return sorted((card for card in cards if card), key=lambda card: card.pci)


def _read(device: Path) -> Card | None:
    event = host.read_fields(device / "uevent", "=")  # DRIVER=xe, PCI_SLOT_NAME=0000:03:00.0
    if host.read_text(device / "vendor") != VENDOR or event.get("DRIVER") not in DRIVERS:
        return None
    device_id = host.read_text(device / "device").casefold()
    model = MODELS.get(device_id)
    measured = [host.read_text(device / f"tile{tile}/physical_vram_size_bytes") for tile in range(2)]  # driver xe
    memory = sum(int(text) for text in measured if text.isdigit())
    numa = host.read_text(device / "numa_node")
    return Card(
        device_id=device_id,
        driver=event["DRIVER"],
        pci=event.get("PCI_SLOT_NAME", device_id),
        model=model,
        memory_bytes=memory or (model.memory_gib * 2**30 if model else 0),
        numa_node=int(numa) if numa.isdigit() else None,
    )

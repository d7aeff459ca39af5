"""The GPUs as the kernel's compute driver (KFD) describes them in sysfs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hardpoint.platforms import host

TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"

_DEVICE_HEAPS = {"1", "2"}  # HSA heap types: frame buffer, public and private; 0 is system memory


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``node`` is its KFD node, ``peers`` the nodes it is linked to; ``uuid`` as the runtime spells it."""

    node: int
    arch: str
    name: str
    uuid: str
    memory_bytes: int
    pci: str
    peers: frozenset[int]


def read_gpus(root: Path) -> list[Gpu]:
    """Return the GPUs in KFD's order, which is the runtime's. Nodes closed to this container read empty: left out."""
    base = root / TOPOLOGY
    gpus = [_read_gpu(root, base / name) for name in host.entries(base) if name.isdigit()]
    return [gpu for gpu in gpus if gpu is not None]


def gfx_name(target_version: int) -> str:
    """Return the architecture's name: 90402 is ``gfx942``, 90010 is ``gfx90a``, 120001 is ``gfx1201``."""
    major, minor, step = target_version // 10000, target_version // 100 % 100, target_version % 100
    return f"gfx{major}{minor:x}{step:x}"


def _read_gpu(root: Path, directory: Path) -> Gpu | None:
    text = host.read_fields(directory / "properties")
    fields = {name: int(value) for name, value in text.items() if value.isdigit()}
    version = fields.get("gfx_target_version", 0)
    if version == 0:  # a CPU
        return None
    arch = gfx_name(version)
    location = fields.get("location_id", 0)
    render = root / f"sys/class/drm/renderD{fields.get('drm_render_minor', 0)}/device"
    return Gpu(
        node=int(directory.name),
        arch=arch,
        name=host.read_text(render / "product_name") or f"AMD {arch}",
        uuid=f"GPU-{fields.get('unique_id', 0):016x}",
        memory_bytes=_memory(directory / "mem_banks"),
        pci=f"{fields.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7:x}",
        peers=frozenset(_links(directory / "io_links") + _links(directory / "p2p_links")),
    )


def _memory(banks: Path) -> int:
    fields = [host.read_fields(banks / bank / "properties") for bank in host.entries(banks)]
    return sum(int(bank.get("size_in_bytes", 0)) for bank in fields if bank.get("heap_type") in _DEVICE_HEAPS)


def _links(links: Path) -> list[int]:
    ends = [host.read_fields(links / link / "properties").get("node_to", "") for link in host.entries(links)]
    return [int(end) for end in ends if end.isdigit()]

"""Two or more GPUs of a platform over torch's device-generic API, all of them the host, for ranks in threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.platforms.torch_accelerator import TorchAcceleratorPlatform
from hardpoint_plugin_api import DeviceInfo
from tests.support.on_host import HostModule


class SeveralGpus(HostModule):
    """As many devices as it is made with."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def device_count(self) -> int:
        return self._count


def two_gpus(
    monkeypatch: pytest.MonkeyPatch, platform: type[TorchAcceleratorPlatform], described: DeviceInfo, count: int = 2
) -> DeviceInfo:
    """Have ``platform`` detect ``count`` devices as ``described`` that reach each other. Collectives are gloo's."""

    def activate(self: TorchAcceleratorPlatform, index: int) -> torch.device:
        self._memory = self.new_memory(SeveralGpus(count), 0)
        return torch.device("cpu")

    features = (described.features - {"pinned_memory"}) | {"p2p"}
    info: DeviceInfo = replace(described, torch_type="cpu", count=count, memory_bytes=2**30, features=features)
    monkeypatch.setattr(platform, "detect", classmethod(lambda cls: info))
    monkeypatch.setattr(platform, "activate", activate)
    monkeypatch.setattr(platform, "collectives", "gloo")
    return info

"""Two GPUs of a platform over torch's device-generic API, both of them the host, for ranks in threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.platforms.torch_accelerator import TorchAcceleratorPlatform
from hardpoint_plugin_api import DeviceInfo
from tests.support.on_host import HostModule


class TwoGpus(HostModule):
    """Two devices."""

    def device_count(self) -> int:
        return 2


def two_gpus(
    monkeypatch: pytest.MonkeyPatch, platform: type[TorchAcceleratorPlatform], described: DeviceInfo
) -> DeviceInfo:
    """Have ``platform`` detect two devices as ``described`` that reach each other. Collectives are gloo's."""

    def activate(self: TorchAcceleratorPlatform, index: int) -> torch.device:
        self._memory = self.new_memory(TwoGpus(), 0)
        return torch.device("cpu")

    features = (described.features - {"pinned_memory"}) | {"p2p"}
    info: DeviceInfo = replace(described, torch_type="cpu", count=2, memory_bytes=2**30, features=features)
    monkeypatch.setattr(platform, "detect", classmethod(lambda cls: info))
    monkeypatch.setattr(platform, "activate", activate)
    monkeypatch.setattr(platform, "collectives", "gloo")
    return info

"""The platform over torch's device-generic API, on a faked device module."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hardpoint.platforms.torch_accelerator import DeviceModule, TorchAcceleratorPlatform
from hardpoint_plugin_api import DeviceInfo, MemorySnapshot, PlatformError
from tests.support.traces import trace_events


class FakeModule:
    """Devices with 1000 bytes each, of which 600 are free, 300 reserved and at most 250 were allocated."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.calls: list[tuple[str, int]] = []

    def is_available(self) -> bool:
        return bool(self.names)

    def device_count(self) -> int:
        return len(self.names)

    def set_device(self, device: int) -> None:
        self.calls.append(("set_device", device))

    def current_device(self) -> int:
        return next((device for name, device in reversed(self.calls) if name == "set_device"), 0)

    def synchronize(self, device: int) -> None:
        self.calls.append(("synchronize", device))

    def get_device_name(self, device: int) -> str:
        return self.names[device]

    def get_device_properties(self, device: int) -> Any:
        raise NotImplementedError

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return 600, 1000

    def memory_reserved(self, device: int) -> int:
        return 300

    def max_memory_allocated(self, device: int) -> int:
        return 250

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache", -1))

    def reset_peak_memory_stats(self, device: int) -> None:
        self.calls.append(("reset_peak_memory_stats", device))


class FakePlatform(TorchAcceleratorPlatform):
    name = "acme"

    def __init__(self, info: DeviceInfo, module: FakeModule) -> None:
        super().__init__(info)
        self.module = module

    @classmethod
    def detect(cls) -> DeviceInfo:
        raise NotImplementedError

    def device_module(self) -> DeviceModule:
        return self.module

    def is_described(self, module: DeviceModule, index: int) -> bool:
        return module.get_device_name(index) == self.info.name


def platform(names: list[str], count: int = 1) -> FakePlatform:
    # "cpu" stands in for the type: torch.device() takes no made-up ones.
    return FakePlatform(DeviceInfo("acme", "Acme 1", "cpu", "acme1", count=count), FakeModule(names))


def test_activate_memory_and_synchronize() -> None:
    acme = platform(["Acme 1"])
    assert acme.activate(0) == torch.device("cpu", 0)
    assert acme.memory.snapshot() == MemorySnapshot(free=600, total=1000, peak=250)
    acme.memory.reset_peak()
    acme.synchronize()
    assert acme.module.calls == [("set_device", 0), ("reset_peak_memory_stats", 0), ("synchronize", 0)]
    assert acme.kv_cache_budget() == 540


def test_the_active_device_is_current_inside_alone() -> None:
    acme = platform(["Acme 1", "Acme 1"], count=2)
    acme.activate(1)
    acme.module.set_device(0)
    with acme.current():
        with acme.current():
            assert acme.module.current_device() == 1
        assert acme.module.current_device() == 1
    assert acme.module.current_device() == 0
    with pytest.raises(KeyError), acme.current():
        raise KeyError
    assert acme.module.current_device() == 0


def test_activate_counts_only_the_described_devices() -> None:
    acme = platform(["Other", "Acme 1", "Other", "Acme 1"], count=2)
    assert acme.activate(1).index == 3


@pytest.mark.parametrize("index", [-1, 1])
def test_activate_refuses_an_index_out_of_range(index: int) -> None:
    with pytest.raises(PlatformError, match=rf"no device {index}: detection found 1 x Acme 1 .*Acme 1, Other"):
        platform(["Acme 1", "Other"]).activate(index)


def test_activate_refuses_devices_that_torch_cannot_use() -> None:
    with pytest.raises(PlatformError, match=r"found Acme 1, but PyTorch .* cannot use it"):
        platform([]).activate(0)


def test_memory_before_activate_is_refused() -> None:
    with pytest.raises(PlatformError, match="call activate"):
        _ = platform(["Acme 1"]).memory


def test_a_torch_that_does_not_know_the_device_type() -> None:
    acme = platform(["Acme 1"])
    acme.info = DeviceInfo("acme", "Acme 1", "acme", "acme1")
    with pytest.raises(PlatformError, match="knows no device type 'acme'"):
        TorchAcceleratorPlatform.device_module(acme)


def test_without_the_feature_nothing_is_pinned() -> None:
    tensor = torch.ones(2)
    assert platform(["Acme 1"]).pin(tensor) is tensor


def test_ranges_show_in_the_profiler() -> None:
    acme = platform(["Acme 1"])
    with torch.profiler.profile(acc_events=True) as profile, acme.range("step 7"):
        pass
    assert "step 7" in [event.key for event in profile.key_averages()]


def test_a_profile_is_written(tmp_path: Path) -> None:
    acme = platform(["Acme 1"])
    with acme.profile(tmp_path), acme.range("step 7"):
        _ = torch.ones(2) + 1
    assert {"step 7", "aten::add"} <= {event.get("name") for event in trace_events(tmp_path)}


def test_trim() -> None:
    acme = platform(["Acme 1"])
    acme.activate(0)
    module = cast(FakeModule, acme.memory.module)
    acme.memory.trim()
    assert module.calls[-1] == ("empty_cache", -1)

"""A platform begins with its accelerator before torch is imported, where the engine will be in this process."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from hardpoint.config import EngineConfig
from hardpoint.engine.early_device import begin_device
from hardpoint_cuda.platform import CudaPlatform, describe_arch
from hardpoint_plugin_api import DeviceInfo, Reason

_H100 = describe_arch("H100", (9, 0))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The name and the index of each device that a machine with an H100 was begun with."""
    begun: list[tuple[str, int]] = []
    monkeypatch.setattr(CudaPlatform, "detect", classmethod(lambda cls: _H100))
    monkeypatch.setattr(CudaPlatform, "begin", classmethod(lambda cls, info, index: begun.append((info.name, index))))
    return begun


def _config(**settings: Any) -> EngineConfig:
    return EngineConfig.create(model="demo", **settings)


def test_a_platform_begins_with_the_device_that_was_asked_for(begun: list[tuple[str, int]]) -> None:
    begin_device(_config())
    begin_device(_config(platform="cuda", device_index=1))
    assert begun == [("H100", 0), ("H100", 1)]


@pytest.mark.parametrize(
    "settings",
    [{"platform": "cpu"}, {"tensor_parallel_size": 2}, {"core_process": True}, {"platform": "no such one"}],
    ids=["host", "ranks", "own process", "unknown"],
)
def test_nothing_begins_elsewhere(begun: list[tuple[str, int]], settings: dict[str, Any]) -> None:
    begin_device(_config(**settings))
    assert not begun


def test_a_device_that_cannot_be_used_is_left_to_the_start(
    begun: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    unusable = Reason("driver-not-loaded", "the driver is not loaded")
    monkeypatch.setattr(CudaPlatform, "detect", classmethod(lambda cls: unusable))
    begin_device(_config())
    assert not begun


def test_a_platform_that_fails_to_begin_is_named(
    begun: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(cls: type[CudaPlatform], info: DeviceInfo, index: int) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(CudaPlatform, "begin", classmethod(fail))
    with caplog.at_level(logging.WARNING):
        begin_device(_config())
    assert "platform cuda, plugin cuda, raised OSError: no such library" in caplog.text


_PROGRAM = """
import sys
from hardpoint.config import EngineConfig
from hardpoint.engine.early_device import begin_device
from hardpoint.kernels.compiler_hash import wait_for_hash
from hardpoint_cuda.platform import CudaPlatform, describe_arch

begin_device(EngineConfig.create(model="demo"))
CudaPlatform.begin(describe_arch("H100", (9, 0)), 0)
wait_for_hash()
sys.exit("torch" in sys.modules)
"""


def test_it_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)

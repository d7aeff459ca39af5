"""The CPU platform: described from faked files, and used for real."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.platforms.testing import write_tree
from hardpoint_cpu.compiled import missing
from hardpoint_cpu.platform import CpuMemory, CpuPlatform, describe
from hardpoint_plugin_api import ConfigError, PlatformError, SelectionError
from tests.support.traces import trace_events

EPYC = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu sse2 avx avx2 avx512f avx512_bf16 avx512_vnni
processor\t: 1
model name\t: AMD EPYC 9654 96-Core Processor
"""
GRAVITON3 = """\
processor\t: 0
Features\t: fp asimd sve i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""

_BUILT = {"native_kernels"}  # a feature of the installed plugin, whatever the host


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_x86(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"proc/cpuinfo": EPYC, "proc/meminfo": "MemTotal: 1048576 kB\n"})
    info = describe(root, "x86_64")
    assert (info.name, info.arch, info.accelerator) == ("AMD EPYC 9654 96-Core Processor", "x86_64", False)
    assert info.features - _BUILT == {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "bf16_native"}
    assert info.memory_bytes == 2**30
    assert info.dtypes == {"float32", "float16", "bfloat16"}


def test_a_profile_spans_all_threads(tmp_path: Path) -> None:
    cpu = CpuPlatform(describe())
    released = threading.Event()

    def work() -> None:
        released.wait()
        with cpu.range("step 7"):
            _ = torch.ones(2) + 1

    thread = threading.Thread(target=work)
    thread.start()
    with cpu.profile(tmp_path):
        released.set()
        thread.join()
    assert {"step 7", "aten::add"} <= {event.get("name") for event in trace_events(tmp_path)}


def test_trim_gives_memory_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    memory = CpuPlatform(describe()).memory
    blocks = [bytearray(2**16) for _ in range(2000)]  # too small to be mapped one by one
    del blocks[:-1]
    held = resident()
    memory.trim()
    assert resident() < held


def test_aarch64(tmp_path: Path) -> None:
    info = describe(write_tree(tmp_path, {"proc/cpuinfo": GRAVITON3}), "arm64")
    assert (info.name, info.arch) == ("Arm Neoverse-V1", "aarch64")
    assert info.features - _BUILT == {"neon", "sve", "i8mm", "bf16_native"}


def test_a_host_without_files_is_still_a_cpu(tmp_path: Path) -> None:
    info = describe(tmp_path, "riscv64")
    assert (info.name, info.arch, info.memory_bytes) == ("riscv64 CPU", "riscv64", 0)
    assert info.features <= _BUILT


def test_end_to_end(threads: None) -> None:
    platform = CpuPlatform(CpuPlatform.detect())
    assert platform.activate(0) == torch.device("cpu")
    platform.synchronize()
    snapshot = platform.memory.snapshot()
    assert 0 < snapshot.free <= snapshot.total
    assert 10 * 2**20 < snapshot.peak <= snapshot.total
    assert 0 < platform.kv_cache_budget() <= 4 * 2**30
    assert platform.default_dtype("bfloat16") == "bfloat16"
    assert platform.default_dtype("float8_e4m3fn") == "float32"


def test_peak_sees_an_allocation() -> None:
    memory = CpuPlatform(CpuPlatform.detect()).memory
    memory.reset_peak()
    before = memory.snapshot().peak
    held = torch.ones(256 * 2**20, dtype=torch.uint8)
    assert memory.snapshot().peak > before
    del held


def test_budget_is_half_of_what_is_free(tmp_path: Path) -> None:
    platform = CpuPlatform(CpuPlatform.detect())
    platform._memory = CpuMemory(
        write_tree(tmp_path, {"proc/meminfo": "MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n"})
    )
    assert platform.kv_cache_budget() == 2**30


def test_a_peak_that_cannot_be_reset_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CpuMemory(tmp_path).reset_peak()
    assert "peak memory counts from the start of the process" in caplog.text


def test_threads_are_set(threads: None) -> None:
    CpuPlatform(CpuPlatform.detect(), {"threads": 1}).activate(0)
    assert torch.get_num_threads() == 1


def test_times_depend_on_threads_and_level(threads: None) -> None:
    platform = CpuPlatform(CpuPlatform.detect())
    said = platform.tuning_context()
    platform.activate(0)
    assert said["threads"] == str(torch.get_num_threads()), "asked before the device is activated"
    assert set(said) <= {"threads", "isa"}
    assert CpuPlatform(CpuPlatform.detect(), {"threads": 3}).tuning_context() == {**said, "threads": "3"}


@pytest.mark.skipif(missing() is not None, reason="no kernels are compiled")
def test_certificates_name_the_level_that_kernels_use() -> None:
    for given, level in (({"isa": "plain"}, "plain"), ({}, CpuPlatform(CpuPlatform.detect()).tuning_context()["isa"])):
        assert CpuPlatform(CpuPlatform.detect(), given).info.isa == level


@pytest.mark.skipif(missing() is not None, reason="no kernels are compiled")
def test_an_engine_s_device_has_the_level_that_was_asked_for() -> None:
    """A certificate for the best level, such as the plugin ships, says nothing of kernels of another one."""
    settings: dict[str, Any] = {"model": "demo", "platform": "cpu", "plugin_config": {"cpu": {"isa": "plain"}}}
    blueprint = draw(EngineConfig.create(**settings))
    assert blueprint.ctx.device.isa == blueprint.choice.device.isa == "plain"
    with pytest.raises(SelectionError, match=r"x86_64 with plain, .*--setting cpu\.isa=plain"):
        draw(EngineConfig.create(**settings, require_certified=True))


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"cpu\.threads must be 0 .* got -3"):
        CpuPlatform(CpuPlatform.detect(), {"threads": -3})
    most = 4 * (os.cpu_count() or 1)
    with pytest.raises(ConfigError, match=rf"cpu\.threads must be 0 \(all cores\) to {most} .* got {most + 1}"):
        CpuPlatform(CpuPlatform.detect(), {"threads": most + 1})
    assert CpuPlatform(CpuPlatform.detect(), {"threads": most}).threads == most
    with pytest.raises(PlatformError, match="no device 1"):
        CpuPlatform(CpuPlatform.detect()).activate(1)

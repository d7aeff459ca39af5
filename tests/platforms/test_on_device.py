"""The cuda platform on real hardware."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hardpoint_cuda.platform import CudaPlatform
from hardpoint_plugin_api import DeviceInfo, GraphEngine, PlatformError
from tests.support.graph_contract import RecordingContract
from tests.support.traces import trace_events

pytestmark = pytest.mark.accelerator


@pytest.fixture
def info() -> DeviceInfo:
    detected = CudaPlatform.detect()
    assert isinstance(detected, DeviceInfo), detected
    return detected


@pytest.fixture
def platform(info: DeviceInfo) -> CudaPlatform:
    return CudaPlatform(info)


def test_detection_agrees_with_torch(info: DeviceInfo) -> None:
    properties = torch.cuda.get_device_properties(0)
    assert info.name == properties.name
    assert info.arch == f"sm_{properties.major}{properties.minor}"
    assert info.count == torch.cuda.device_count()
    assert abs(info.memory_bytes - properties.total_memory) < 0.05 * info.memory_bytes
    assert info.driver


def test_detection_creates_no_context() -> None:
    """Not in this process, whose other tests use the device: torch is not imported and a fork can still use CUDA."""
    code = (
        "import os, sys\n"
        "from hardpoint_cuda.platform import CudaPlatform\n"
        "CudaPlatform.detect()\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if torch.ones(2, device='cuda').sum().item() == 2 else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_memory_moves_with_an_allocation(platform: CudaPlatform) -> None:
    device = platform.activate(0)
    platform.memory.reset_peak()
    before = platform.memory.snapshot()
    nbytes = before.free // 4  # far more than other tests, at the same time on the same device, take or give back
    held = torch.ones(nbytes, dtype=torch.uint8, device=device)
    platform.synchronize()
    after = platform.memory.snapshot()
    assert before.free - after.free >= nbytes // 2
    assert after.peak - before.peak >= nbytes
    assert after.total == before.total
    assert 0 < platform.kv_cache_budget() < after.free
    del held
    platform.memory.trim()  # what a library takes for good would lie in it


def test_synchronize_waits(platform: CudaPlatform) -> None:
    device = platform.activate(0)
    done = torch.Event(device)
    x = torch.randn(4096, 4096, device=device)
    for _ in range(50):
        x = (x @ x).clamp(-1, 1)
    done.record()
    platform.synchronize()
    assert done.query()


def test_pinned_copy_and_range(platform: CudaPlatform) -> None:
    device = platform.activate(0)
    with platform.range("copy"):
        pinned = platform.pin(torch.arange(1024))
        assert pinned.is_pinned()
        assert torch.equal(pinned.to(device, non_blocking=True).cpu(), torch.arange(1024))


def test_a_profile_holds_ranges_and_kernels(platform: CudaPlatform, tmp_path: Path) -> None:
    device = platform.activate(0)
    with platform.profile(tmp_path), platform.range("hardpoint.product"):
        _ = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        platform.synchronize()
    events = trace_events(tmp_path)
    assert "hardpoint.product" in {event.get("name") for event in events}
    assert "kernel" in {event.get("cat") for event in events}


def test_trim_returns_memory_to_the_driver(platform: CudaPlatform) -> None:
    device = platform.activate(0)
    nbytes = platform.memory.snapshot().free // 4
    held = torch.ones(nbytes, dtype=torch.uint8, device=device)
    del held
    before = platform.memory.snapshot().free
    platform.memory.trim()
    assert platform.memory.snapshot().free - before >= nbytes // 2


def test_a_device_too_many(platform: CudaPlatform) -> None:
    with pytest.raises(PlatformError, match=f"no device {platform.info.count}"):
        platform.activate(platform.info.count)


class TestCudaGraphs(RecordingContract):
    """CUDA graphs keep to what every graph engine keeps to."""

    @pytest.fixture
    def device(self, platform: CudaPlatform) -> torch.device:
        return platform.activate(0)

    @pytest.fixture
    def graphs(self, platform: CudaPlatform, device: torch.device) -> GraphEngine:
        return platform.graph_engine()

    def test_memory_is_returned_after_a_refused_step(
        self, platform: CudaPlatform, graphs: GraphEngine, device: torch.device
    ) -> None:
        """A capture that was broken off changes nothing: earlier graphs go on sharing their memory."""
        x = torch.ones(4, device=device)
        before = graphs.prepare("before", lambda x: x + 1, {"x": x})
        with pytest.raises(PlatformError, match="'waiting'"):
            graphs.prepare("waiting", lambda x: x.sum().item(), {"x": x})
        platform.memory.trim()
        held = torch.ones(2**30, dtype=torch.uint8, device=device)
        del held
        taken = torch.cuda.memory_reserved(device)
        platform.memory.trim()
        assert taken - torch.cuda.memory_reserved(device) >= 2**30
        after = [graphs.prepare(n, lambda x: x + 2, {"x": x}) for n in range(2)]
        assert before.run().tolist() == [2.0] * 4
        del after[0]
        assert graphs.prepare("again", lambda x: x * 5, {"x": x}).run().tolist() == [5.0] * 4

    def test_what_graphs_take_is_told(self, graphs: GraphEngine, device: torch.device) -> None:
        """Memory between kernels is used by all graphs, so that the second takes little more than its result."""
        assert graphs.nbytes == 0
        x = torch.ones(4096, 4096, device=device)
        prepared = [graphs.prepare("first", lambda x: (x * 2).sin() + 1, {"x": x})]
        alone = graphs.nbytes
        assert alone >= 2 * x.nbytes, "a result and what was between"
        prepared.append(graphs.prepare("second", lambda x: (x * 3).cos() + 1, {"x": x}))
        assert alone < graphs.nbytes < 3 * alone
        prepared.clear()
        assert graphs.nbytes == 0
        again = graphs.prepare("third", lambda x: (x * 2).sin() + 1, {"x": x})  # though the pool went with the others
        assert torch.equal(again.run(), (x * 2).sin() + 1)


def test_a_copy_to_the_host_waits_for_nothing_later(platform: CudaPlatform) -> None:
    device = platform.activate(0)
    values, busy = torch.arange(5, device=device), torch.randn(8192, 8192, device=device)
    platform.synchronize()
    arrived = platform.to_host(values)
    for _ in range(40):
        busy = busy @ busy
    last = torch.cuda.Event()
    last.record()
    values.zero_()
    assert arrived().tolist() == [0, 1, 2, 3, 4]
    assert not last.query(), "what was submitted later still runs"
    platform.synchronize()


def test_kernels_are_compiled_ahead_by_children(tmp_path: Path) -> None:
    """By a process that holds a CUDA context. In the second, Triton's cache has the kernel, and the run counts."""
    code = (
        "import torch\n"
        "from hardpoint.kernels.norm import rms_norm\n"
        "from hardpoint_cuda.platform import CudaPlatform\n"
        "platform = CudaPlatform(CudaPlatform.detect())\n"
        "device = platform.activate(0)\n"
        "x, weight, made = torch.randn(64, 512, device=device), torch.rand(512, device=device), []\n"
        "number = platform.compile_ahead(lambda: made.append(rms_norm(x, weight, eps=1e-6)))\n"
        "expected = torch.nn.functional.rms_norm(x, (512,), weight, 1e-6)\n"
        "made += [rms_norm(x, weight, eps=1e-6)] if number else []\n"
        "torch.testing.assert_close(made[-1], expected)\n"
        "print(number)\n"
    )
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    numbers = [
        subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, timeout=120, stdout=subprocess.PIPE, text=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert numbers == [["1"], ["0"]]

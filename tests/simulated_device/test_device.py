"""The rules of the simulated device: what it forgives no host that CUDA, sometimes, would not either."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hardpoint_plugin_api import DeviceInfo, PlatformError
from hardpoint_sim import _C, instruments
from hardpoint_sim.platform import SimMemory, SimPlatform

SIM = torch.device("sim", 0)


@pytest.fixture
def platform() -> SimPlatform:
    info = SimPlatform.detect()
    assert isinstance(info, DeviceInfo)
    platform = SimPlatform(info)
    platform.activate(0)
    return platform


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x @ x.t(),
        lambda x: torch.softmax(x, -1),
        lambda x: x.view(-1)[3:9].view(2, 3).t().contiguous(),
        lambda x: x[torch.tensor([1, 0, 1], device=x.device)],
        lambda x: x.sort(-1, descending=True),
        lambda x: x.topk(3),
        lambda x: torch.cat([x, x * 2], -1).split([2, 7, 3], -1),
        lambda x: x.cumsum(0).isfinite().logical_not(),
        lambda x: torch.where(x > 0, x, torch.zeros((), device=x.device)),
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: torch.full_like(x, 3).index_put_((torch.arange(2, device=x.device),), x[:2]),
        lambda x: torch.arange(5, device=x.device) * torch.ones(2, 5, device=x.device),
        lambda x: torch.empty(0, device=x.device).sum() + x.max(),
        lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: x.clone().as_strided((2, 2), (1, 3), 1).mul_(2),
    ],
)
def test_operators_give_what_the_cpu_gives(f: Callable[[torch.Tensor], object]) -> None:
    x = randn(4, 6)
    torch.testing.assert_close(f(x.to(SIM)), f(x), check_device=False, rtol=0, atol=0)


def test_views_share_memory_and_versions() -> None:
    x = torch.zeros(3, 4, device=SIM)
    x[1].add_(1)
    x.t()[2].fill_(7)
    assert x.tolist() == [[0, 0, 7, 0], [1, 1, 7, 1], [0, 0, 7, 0]]
    assert x._version == 2
    assert x[1].data_ptr() == x.data_ptr() + 16


def test_memory_is_counted_and_limited(platform: SimPlatform) -> None:
    memory = platform.memory
    memory.reset_peak()
    before = memory.snapshot()
    held = torch.empty(1000, device=SIM)
    assert before.free - memory.snapshot().free == 4096
    del held
    after = memory.snapshot()
    assert (after.free, after.total, after.peak - before.peak) == (before.free, 2**31, 4096)
    assert torch.accelerator.memory_allocated(SIM) == after.total - after.free
    message = r"sim:0 is out of memory: 2147483649 bytes .* of 2147483648 are free"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        torch.empty(2**31 + 1, dtype=torch.uint8, device=SIM)


def test_pools_and_suspended_memory(platform: SimPlatform) -> None:
    memory = platform.memory
    assert isinstance(memory, SimMemory)
    with memory.pool("kv"):
        held = torch.ones(1024, device=SIM)
        with memory.pool("weights"):
            other = torch.ones(128, device=SIM)
    assert instruments.bytes_by_tag().items() >= {"kv": 4096, "weights": 512}.items()
    address = held.data_ptr()
    memory.suspend(["kv"])
    assert "kv" not in instruments.bytes_by_tag()
    with pytest.raises(RuntimeError, match=r"used while it is suspended \(kv\)"):
        held.add_(1)
    assert other.sum().item() == 128
    memory.resume(["kv"])
    assert held.data_ptr() == address
    assert held.fill_(2).sum().item() == 2048
    memory.suspend(["kv"])
    used = memory.snapshot().total - memory.snapshot().free
    _C.set_limit(0, used + 512)
    try:
        with pytest.raises(PlatformError, match="no room to resume kv"):
            memory.resume(["kv"])
    finally:
        _C.set_limit(0, 2**31)
    del held
    assert "kv" not in instruments.bytes_by_tag()


def test_fresh_memory_holds_nothing_of_use() -> None:
    assert torch.empty(3, device=SIM).isnan().all()
    assert torch.empty(3, dtype=torch.int64, device=SIM).tolist() == [-1] * 3


def test_devices_do_not_mix(platform: SimPlatform) -> None:
    x, y = torch.ones(3, device=SIM), torch.ones(3, device="sim:1")
    with pytest.raises(RuntimeError, match="sim:0"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="sim:0"):
        x + y
    with pytest.raises(RuntimeError, match="sim:0"):
        x[torch.tensor([1])]
    with pytest.raises(TypeError):
        np.asarray(x)
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 3
    assert y.to(SIM).add_(x).tolist() == [2.0] * 3
    with pytest.raises(PlatformError, match="no device 2"):
        platform.activate(2)


def test_a_host_that_reads_device_memory_dies() -> None:
    code = (
        "import ctypes, torch, hardpoint_sim.device; x = torch.ones(4, device='sim'); print('alive', flush=True); "
        "ctypes.string_at(x.data_ptr(), 4)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_what_the_host_waits_for_is_counted() -> None:
    x = torch.arange(4.0, device=SIM)

    def waits(f: Callable[[], object]) -> list[str]:
        before = instruments.host_waits()
        f()
        return [kind for kind, count in instruments.host_waits().items() if count > before.get(kind, 0)]

    assert waits(lambda: x[1].item()) == ["aten::_local_scalar_dense"]
    assert waits(x.cpu) == waits(x.tolist) == ["copy to the host"]
    assert waits(lambda: x.to(SIM, non_blocking=True)) == []
    assert waits(lambda: x.add(1).mul_(x).sum()) == []
    assert any(kind.startswith("aten::index") for kind in waits(lambda: x[x > 1]))
    assert waits(lambda: x.masked_fill_(x > 2, 0.0)) == []
    assert waits(lambda: torch.tensor([1.0], device=SIM)) == ["copy to the device"]
    assert waits(lambda: torch.tensor([1.0]).to(SIM, non_blocking=True)) == []
    assert waits(lambda: torch.tensor([1.0]).pin_memory().to(SIM, non_blocking=True)) == []
    assert waits(lambda: x.to("cpu", non_blocking=True)) == []
    assert waits(lambda: torch.accelerator.synchronize(SIM)) == ["synchronize"]
    with instruments.waits_forbidden():
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"waits for the device \(copy to the host\) where that is forbidden"):
            x.tolist()
    assert x.tolist() == [1.0, 2.0, 3.0, 1.0]


def test_what_comes_without_waiting_is_there_after_waiting() -> None:
    x = torch.arange(4.0, device=SIM)
    arriving = x.to("cpu", non_blocking=True)
    event = torch.Event(SIM)
    event.record()
    x.add_(1)
    assert arriving.is_pinned()
    assert arriving.isnan().all()
    assert not event.query()
    event.synchronize()
    assert arriving.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert event.query()


def test_an_events_time_comes_though_nobody_waits() -> None:
    event = torch.Event(SIM)
    torch.ones(1, device=SIM).add_(1)
    event.record()
    assert [event.query(), event.query()] == [False, True]


def test_pinned_memory_that_changes_too_early_is_noticed(platform: SimPlatform) -> None:
    staging, x = platform.pin(torch.zeros(8)), torch.empty(4, device=SIM)
    x.copy_(staging[:4], non_blocking=True)
    staging[4:].fill_(1)  # the other half is nobody's business
    platform.synchronize()
    staging[:4].fill_(2)
    x.copy_(staging[:4], non_blocking=True)
    staging[1] = 3
    with pytest.raises(RuntimeError, match="the host changed pinned memory"):
        platform.synchronize()


def test_streams_need_events_between_them() -> None:
    torch.accelerator.synchronize(SIM)
    side = torch.Stream(SIM)
    x = torch.zeros(4, device=SIM)
    x.add_(1)
    with side, pytest.raises(RuntimeError, match=r"race on sim:0: stream \d+ reads memory"):
        x + 1
    event = torch.Event(SIM)
    event.record()
    side.wait_event(event)
    with side:
        y = x + 1
        done = torch.Event(SIM)
        done.record()
    with pytest.raises(RuntimeError, match=r"race on sim:0: stream 0 writes memory"):
        x.zero_()
    torch.accelerator.current_stream(SIM).wait_event(done)
    x.zero_()
    assert y.tolist() == [2.0] * 4


def test_detection_imports_no_torch() -> None:
    code = (
        "import sys; from hardpoint_sim.platform import SimPlatform; info = SimPlatform.detect(); "
        "print(info.name, info.count, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Simulated accelerator 2 False\n"

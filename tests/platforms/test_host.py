"""Facts about the host, read from faked /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.platforms import host
from hardpoint.platforms.testing import write_tree
from hardpoint.platforms.torch_build import torch_build, torch_reason
from hardpoint_plugin_api import NumaNode

GIB = 2**30
MEMINFO = "MemTotal:       67108864 kB\nMemFree:        1048576 kB\nMemAvailable:   33554432 kB\n"


def test_an_empty_root_is_no_error(tmp_path: Path) -> None:
    assert host.numa_nodes(tmp_path) == ()
    assert host.memory(tmp_path) == host.HostMemory(0, 0)
    assert host.available_cores(tmp_path, cpus=[0, 1]) == 2
    assert host.pci_numa_node("0000:3b:00.0", tmp_path) is None


@pytest.mark.parametrize(
    ("text", "cpus"), [("", ()), ("0", (0,)), ("0-2,8", (0, 1, 2, 8)), ("0-1,4-5\n", (0, 1, 4, 5))]
)
def test_cpu_list(text: str, cpus: tuple[int, ...]) -> None:
    assert host.parse_cpu_list(text) == cpus


def test_numa_map_lists_the_devices_of_each_node(tmp_path: Path) -> None:
    base = "sys/devices/system/node"
    root = write_tree(
        tmp_path,
        {
            f"{base}/node0/cpulist": "0-3",
            f"{base}/node0/meminfo": "Node 0 MemTotal:       1024 kB\nNode 0 MemFree:  12 kB\n",
            f"{base}/node10/cpulist": "4-7",
            f"{base}/node10/meminfo": "Node 10 MemTotal:      2048 kB\n",
            f"{base}/has_cpu": "0,10",
        },
    )
    assert host.numa_nodes(root, [10, None, 0, 10]) == (
        NumaNode(0, (0, 1, 2, 3), 2**20, (2,)),
        NumaNode(10, (4, 5, 6, 7), 2**21, (0, 3)),
    )


def test_pci_numa_node(tmp_path: Path) -> None:
    base = "sys/bus/pci/devices"
    root = write_tree(tmp_path, {f"{base}/0000:3b:00.0/numa_node": "1\n", f"{base}/0000:04:00.0/numa_node": "-1\n"})
    assert host.pci_numa_node("0000:3b:00.0", root) == 1
    assert host.pci_numa_node("0000:04:00.0", root) is None


def test_memory_without_limits(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
    assert host.memory(root) == host.HostMemory(64 * GIB, 32 * GIB)


def test_memory_obeys_the_tightest_group_of_version_2(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    root = write_tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/box\n",
            f"{base}/pod/box/memory.max": "max\n",
            f"{base}/pod/memory.max": f"{8 * GIB}\n",
            f"{base}/pod/memory.current": f"{5 * GIB}\n",
            f"{base}/pod/memory.stat": f"anon 12\ninactive_file {2 * GIB}\n",
        },
    )
    assert host.memory(root) == host.HostMemory(8 * GIB, 5 * GIB)  # of the 5 GiB in use 2 are page cache


def test_memory_obeys_version_1_seen_from_inside_a_container(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert host.memory(root) == host.HostMemory(4 * GIB, 0)


def test_version_1_writes_no_limit_as_a_huge_number(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert host.memory(root).total == 64 * GIB


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    base = "sys/devices/system/cpu"
    root = write_tree(tmp_path, {f"{base}/cpu{c}/topology/thread_siblings_list": s for c, s in siblings.items()})
    assert host.available_cores(root, cpus=[0, 1, 4, 5]) == 2


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1)])
def test_cores_obey_the_quota_of_version_2(tmp_path: Path, quota: str, cores: int) -> None:
    root = write_tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota})
    assert host.available_cores(root, cpus=range(8)) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("200000", 2)])
def test_cores_obey_the_quota_of_version_1(tmp_path: Path, quota: str, cores: int) -> None:
    base = "sys/fs/cgroup/cpu,cpuacct"
    files = {f"{base}/cpu.cfs_quota_us": quota, f"{base}/cpu.cfs_period_us": "100000"}
    root = write_tree(tmp_path, {"proc/self/cgroup": "5:cpu,cpuacct:/\n", **files})
    assert host.available_cores(root, cpus=range(8)) == cores


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("2,0", (2, 0)),
        (" 1 , 2", (1, 2)),
        ("0,7,1", (0,)),
        ("1,1", ()),
        ("GPU-bb", (1,)),
        ("gpu-a", ()),  # two ids begin so
        ("GPU-aa,GPU-ab", (0, 2)),
    ],
)
def test_visible_indices(value: str | None, indices: tuple[int, ...]) -> None:
    assert host.visible_indices(value, ["GPU-aa11", "GPU-bb22", "GPU-ab33"]) == indices


def test_torch_build_says_what_torch_says() -> None:
    import torch

    build = torch_build()
    assert build is not None
    assert build["__version__"] == torch.__version__
    assert (build["cuda"], build["hip"]) == (torch.version.cuda, torch.version.hip)


def test_torch_reason() -> None:
    missing = torch_reason(None, "acme", "Acme support", "pip install torch")
    assert missing is not None
    assert missing.code == "torch-missing"
    without = torch_reason({"__version__": "2.13.0+cpu", "acme": None}, "acme", "Acme support", "pip install torch")
    assert str(without) == "the installed PyTorch 2.13.0+cpu was built without Acme support; fix: pip install torch"
    assert torch_reason({"acme": "1.0"}, "acme", "Acme support", "") is None

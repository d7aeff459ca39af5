"""Which CPUs threads are bound to, on faked hosts and for real, and the level that kernels are capped to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from hardpoint.platforms.testing import write_tree
from hardpoint_cpu.binding import chosen_cpus, usable_cpus
from hardpoint_cpu.platform import CpuPlatform, describe
from hardpoint_plugin_api import ConfigError
from tests.cpu.building import needs_kernels

STAT = "12 (a name (with) brackets) S " + " ".join(["0"] * 35) + " {cpu} 0 0"
"""The content of /proc/self/stat; its 39th field is the CPU."""


def two_nodes(folder: Path, running_on: int) -> Path:
    """Two nodes of two cores of two threads: node 0 has CPUs 0, 1, 4, 5, where 4 is the other thread of core 0."""
    files = {
        "sys/devices/system/node/node0/cpulist": "0-1,4-5",
        "sys/devices/system/node/node1/cpulist": "2-3,6-7",
        "proc/self/stat": STAT.format(cpu=running_on),
    }
    for cpu in range(8):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{cpu % 4},{cpu % 4 + 4}"
    return write_tree(folder, files)


@pytest.mark.parametrize(("running_on", "expected"), [(0, (0, 1)), (5, (0, 1)), (7, (2, 3))])
def test_auto_is_one_cpu_per_core_of_the_node_that_we_run_on(
    tmp_path: Path, running_on: int, expected: tuple[int, ...]
) -> None:
    assert chosen_cpus("auto", range(8), two_nodes(tmp_path, running_on)) == expected


def test_auto_is_the_node_that_has_more_cores_for_us(tmp_path: Path) -> None:
    root = two_nodes(tmp_path, running_on=1)
    assert chosen_cpus("auto", (1, 5, 6, 7), root) == (6, 7)
    assert chosen_cpus("auto", (4, 5), root) == (4, 5)


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        (range(8), [(0, 1), (2, 3)]),
        (range(8), [(0,), (2,), (1,), (3,)]),
        (range(8), [(0,), (2, 3), (1,)]),
        ((1, 2, 3, 5, 6, 7), [(2, 3), (1,)]),  # the node with more cores for us comes first
        ((0, 4), [(0,), (0,)]),
    ],
)
def test_ranks_share_nodes(tmp_path: Path, usable: Sequence[int], expected: list[tuple[int, ...]]) -> None:
    root, ranks = two_nodes(tmp_path, running_on=2), len(expected)
    assert [chosen_cpus("auto", usable, root, rank, ranks) for rank in range(ranks)] == expected


def test_other_settings_are_the_same_for_all_ranks() -> None:
    assert chosen_cpus("0-1", range(8), rank=1, ranks=2) == (0, 1)
    assert chosen_cpus("", range(8), rank=1, ranks=2) == ()


def test_a_rank_is_bound_to_its_share() -> None:
    """As an engine makes it; on this host, whatever nodes it has. In a process of its own, as below."""
    program = """
import os, torch
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint_cpu.binding import chosen_cpus, usable_cpus
expected = chosen_cpus("auto", usable_cpus(), rank=1, ranks=2)
plugin = {"cpu": {"bind": "auto"}}
config = EngineConfig.create(model="demo", platform="cpu", tensor_parallel_size=2, plugin_config=plugin)
draw(config, place=config.topology.on_this_host(1))
assert tuple(sorted(os.sched_getaffinity(0))) == expected, expected
assert torch.get_num_threads() == len(expected)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_auto_on_a_host_that_tells_nothing(tmp_path: Path) -> None:
    assert chosen_cpus("auto", (3, 4), tmp_path) == (3, 4)


def test_a_list() -> None:
    assert chosen_cpus("2,0-1", range(8)) == (0, 1, 2)
    assert chosen_cpus("", range(8)) == ()


@pytest.mark.parametrize("setting", ["all", "0-", "1;2", "3-1", " ", "0,3-1", "0,\u0663", "9" * 5000, "0-99999999999"])
def test_what_is_no_list(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"cpu\.bind must be .* got '{setting}'"):
        chosen_cpus(setting, range(8))


def test_cpus_that_are_others() -> None:
    with pytest.raises(ConfigError, match=r"may not use: 2, 3; it may use 0, 1$"):
        chosen_cpus("1-3", (0, 1))
    with pytest.raises(ConfigError, match=r"may not use: 2, 3, .*, 65 and 999934 more; it may use 0, 1$"):
        chosen_cpus("0-999999", (0, 1))
    foreign = max(usable_cpus()) + 1
    with pytest.raises(ConfigError, match=rf"may not use: {foreign};"):
        CpuPlatform(describe(), {"bind": str(foreign)})


def test_all_threads_are_bound() -> None:
    """In a process of its own: a binding cannot be undone for threads that it was not asked about."""
    last = usable_cpus()[-1]
    program = f"""
import os, torch
torch.ones(2**20).exp()  # the team is there before it is bound
from hardpoint_cpu.platform import CpuPlatform
CpuPlatform(CpuPlatform.detect(), {{"bind": "{last}"}}).activate(0)
bound = {{tuple(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}}
assert bound == {{({last},)}}, bound
assert torch.get_num_threads() == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "OMP_NUM_THREADS": "2"})


@pytest.fixture
def restored() -> Iterator[None]:
    """The level and the number of threads, afterwards."""
    needs_kernels()
    from hardpoint_cpu import _native

    before = _native.level(), torch.get_num_threads()
    yield
    _native.set_level(before[0])
    torch.set_num_threads(before[1])


def test_kernels_are_capped(restored: None) -> None:
    from hardpoint_cpu import _native

    CpuPlatform(describe(), {"isa": "plain"}).activate(0)
    assert _native.level() == "plain"
    CpuPlatform(describe()).activate(0)
    assert _native.level() == _native.levels()[0]
    with pytest.raises(ConfigError, match=r"cpu\.isa must be auto or a level .*plain\), got 'sse'"):
        CpuPlatform(describe(), {"isa": "sse"})

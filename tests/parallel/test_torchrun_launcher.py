"""Ranks of two hosts, when torchrun's own process on one of them is killed or told to end."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import two_hosts
from tests.support.checkpoints import write_checkpoint
from tests.support.expert_servers import MIXTURE

PROGRAM = """
import json, os, subprocess, sys, time
from pathlib import Path
from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import EngineDeadError

folder, victim, end, when = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
first = int(os.environ["RANK"]) == 0
(folder / f"launcher-{os.environ['GROUP_RANK']}").write_text(str(os.getppid()))

def strike():
    if end == 0:
        subprocess.run(["ip", "link", "set", "left", "down"], check=True)
        return
    os.kill(int((folder / f"launcher-{victim}").read_text()), end)

if first and when == "start":
    while not (folder / f"launcher-{victim}").exists():
        time.sleep(0.05)
    strike()
try:
    with LLM(
        str(folder), platform="cpu", kv_cache_memory="16MiB", executor="torchrun", core_start_timeout=10,
        plugin_config={"cpu": {"threads": 1}}, **json.loads(sys.argv[5]),
    ) as llm:
        for count, _ in enumerate(llm.stream([1], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))):
            if count == 3 and first:
                strike()
                if when == "idle":
                    time.sleep(3)
except EngineDeadError as error:
    print(error, flush=True)
    sys.exit(1)
"""
SIGTERM, SIGKILL, CUT = "15", "9", "0"
"""How the end comes: by a signal to the launcher, or to the cable between the hosts."""
GONE = r"torchrun's launcher on \S+, process \d+, is gone; start torchrun again on all nodes"
CLOSED = r"rank 1 ends: rank 0 on \S+ has closed its connection, and says why if it can"
SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True}
NIGHTLY = pytest.mark.nightly


def killed(
    folder: Path, victim: int, end: str, size: dict[str, Any], when: str = "decode"
) -> list[tuple[int, str, str]]:
    """The exit code of each host's launcher, and what that host's processes wrote to stdout and stderr."""
    if not two_hosts.can_be_made():
        pytest.skip("this machine lets no user make network namespaces")
    family, changes = ("qwen3_moe", MIXTURE) if size == SHARED else ("llama", {})
    write_checkpoint(folder, family, max_position_embeddings=16384, **changes)
    script = folder / "program.py"
    script.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "2", "--nproc-per-node", "1"]
    launcher += ["--nnodes", "2", "--master-addr", two_hosts.ADDRESSES[0], "--master-port", "29500", "--node-rank"]
    given = [str(script), str(folder), str(victim), end, when, json.dumps(size)]
    commands = [[*launcher, str(node), *given] for node in (0, 1)]
    done = two_hosts.run_on_two_hosts(commands, folder, {"OMP_NUM_THREADS": "1"}, 180)
    return [(each.returncode, each.stdout, each.stderr) for each in done]


@pytest.mark.parametrize(
    ("size", "when"),
    [
        ({"tensor_parallel_size": 2}, "decode"),
        pytest.param({"tensor_parallel_size": 2}, "idle", marks=NIGHTLY),
        pytest.param({"pipeline_parallel_size": 2}, "decode", marks=NIGHTLY),
    ],
)
def test_the_second_host_s_is_killed(size: dict[str, Any], when: str, tmp_path: Path) -> None:
    """Its rank sees that it is an orphan, though steps go on, and tells rank 0."""
    (code, told, _), (killed_code, _, left) = killed(tmp_path, 1, SIGKILL, size, when)
    assert (code, killed_code) == (1, 137)
    assert re.match(f"rank 1 failed, and every rank was ended: EngineDeadError: {GONE}", told), told
    assert re.search(f"rank 1 ends: {GONE}", left), left


@NIGHTLY
@pytest.mark.parametrize("when", ["decode", "idle"])
def test_rank_0_s_is_killed(when: str, tmp_path: Path) -> None:
    (code, told, _), (other_code, _, other) = killed(tmp_path, 0, SIGKILL, {"tensor_parallel_size": 2}, when)
    assert (code, other_code) == (137, 1)
    assert re.match(f"rank 0 failed, and every rank was ended: EngineDeadError: {GONE}", told), told
    assert re.search(CLOSED, other), other


@NIGHTLY
def test_rank_0_s_is_told_to_end(tmp_path: Path) -> None:
    """It ends its own script with the same signal."""
    (code, told, _), (other_code, _, other) = killed(tmp_path, 0, SIGTERM, {"tensor_parallel_size": 2})
    assert (code, other_code, told) == (1, 1, "")
    assert re.search(CLOSED, other), other


@NIGHTLY
def test_the_second_host_s_is_told_to_end(tmp_path: Path) -> None:
    (code, told, _), (other_code, _, _) = killed(tmp_path, 1, SIGTERM, {"tensor_parallel_size": 2})
    assert (code, other_code) == (1, 1)
    assert re.match(r"the process of rank 1 on \S+ has ended, or its host is gone: see torchrun's report", told), told


@NIGHTLY
def test_that_of_another_replica_is_killed(tmp_path: Path) -> None:
    (code, told, _), (killed_code, other, _) = killed(tmp_path, 1, SIGKILL, SHARED)
    assert (code, killed_code) == (1, 137)
    assert told.startswith("replica 1 is gone, with which this one shares experts"), told
    assert re.match(f"rank 0 failed, and every rank was ended: EngineDeadError: {GONE}", other), other


@NIGHTLY
@pytest.mark.parametrize("victim", [0, 1])
def test_it_is_killed_while_ranks_load(victim: int, tmp_path: Path) -> None:
    """The first host's has the store at which all meet."""
    results = killed(tmp_path, victim, SIGKILL, {"tensor_parallel_size": 2}, "start")
    assert (results[victim][0], results[1 - victim][0]) == (137, 1)
    told = results[0][1]
    assert re.search(GONE if victim else r"torchrun's store at 10\.77\.0\.1:29500 is gone, or was not there", told), (
        told
    )


@NIGHTLY
def test_the_cable_is_cut(tmp_path: Path) -> None:
    """Neither host closes a connection. Each misses the other after a minute; a step may take five."""
    (code, told, _), (other_code, _, other) = killed(tmp_path, 1, CUT, {"tensor_parallel_size": 2})
    assert (code, other_code) == (1, 1)
    assert re.match(r"the process of rank 1 on \S+ has ended, or its host is gone", told), told
    assert re.search(CLOSED, other), other

"""The topology: where each rank stands, and that nothing else reads how many there are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hardpoint.parallel.topology import Coordinates, Topology
from hardpoint_plugin_api import ConfigError

ROOT = Path(__file__).parents[2]
READERS = {
    "core/src/hardpoint/parallel/topology.py",
    "core/src/hardpoint/config/settings.py",
    "core/src/hardpoint/config/engine_config.py",  # whose fields they are, and who makes the topology of them
    "plugins/cuda/src/hardpoint_cuda/plugin.py",  # which wishes for smaller steps where there are stages
}
SIZES = {
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "data_parallel_size_local",
    "expert_parallel_size",
    "enable_expert_parallel",
    "get_world_size",
    "get_node_local_rank",
    "get_rank",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
}
"""Names and texts by which code could learn how many ranks there are, or which one it is."""


def sizes_read(tree: ast.AST) -> set[str]:
    """The names of SIZES that a module reads: as an attribute, a name, or a key."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & SIZES


def test_nothing_else_reads_the_sizes() -> None:
    sources = [path for room in ("core", "plugin_api", "plugins") for path in (ROOT / room).glob("**/src/**/*.py")]
    assert len(sources) > 300
    found = {str(path.relative_to(ROOT)): sizes_read(ast.parse(path.read_text())) for path in sources}
    assert {path: names for path, names in found.items() if names and path not in READERS} == {}
    assert all(found[path] for path in READERS), "the test finds what it looks for"


def test_places() -> None:
    topology = Topology(tensor=4, expert=2, pipeline=2)
    assert (topology.size, topology.first_ranks) == (8, (0, 4))
    place = topology.on_this_host(6)
    assert (place.stage, place.answers) == (1, False)
    assert (place.members("tp"), place.members("pp")) == ((4, 5, 6, 7), (2, 6))
    assert (place.members("ep"), place.members("expert_tp")) == ((4, 6), (6, 7))


def test_places_of_ranks_that_share_experts_with_other_replicas() -> None:
    """Experts are divided among the ranks of a stage in all replicas; the other groups are within a replica."""
    topology = Topology(tensor=2, expert=4, pipeline=2, data=2, replica=1)
    assert (topology.size, topology.world, topology.shares_experts) == (4, 8, True)
    place = topology.on_this_host(2)
    assert (place.stage, place.answers, place.world_rank, place.local_rank) == (1, True, 6, 6)
    assert (place.members("tp"), place.members("pp")) == ((6, 7), (4, 6))
    assert (place.members("ep"), place.members("expert_tp")) == ((2, 3, 6, 7), (6,))
    apart = Topology(tensor=2, expert=2, pipeline=2, data=2, replica=1)
    assert (apart.world, apart.on_this_host(2).members("ep")) == (4, (2, 3))


def test_places_of_ranks_that_share_experts_with_other_servers() -> None:
    """A rank has the number of its device among those of its own server."""
    topology = Topology(tensor=2, expert=8, data=4, replica=3, here=range(2, 4))
    assert (topology.world, topology.local_size) == (8, 4)
    place = topology.on_this_host(1)
    assert (place.world_rank, place.local_rank, place.local_ranks, place.on_one_host) == (7, 3, 4, False)
    assert place.members("ep") == tuple(range(8))
    told = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "there"}
    told["MASTER_PORT"] = "29500"
    place = Topology(tensor=2, expert=8, data=4).of_launched(told)
    assert (place.topology.replica, place.rank, place.world_rank, place.local_rank) == (2, 1, 5, 1)
    with pytest.raises(ConfigError, match=r"= 8 ranks: torchrun started 4 processes; .* start 8 in all"):
        Topology(tensor=2, expert=8, data=4).of_launched(told | {"WORLD_SIZE": "4"})


def test_places_of_processes_that_torchrun_started() -> None:
    told = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "there"}
    told["MASTER_PORT"] = "29500"
    topology = Topology(tensor=2, pipeline=2)
    assert topology.of_launched(told) == Coordinates(topology, 3, 1, 2, on_one_host=False)
    with pytest.raises(ConfigError, match=r"'MASTER_ADDR' is not in its environment.*--nproc-per-node 4"):
        topology.of_launched({name: value for name, value in told.items() if name != "MASTER_ADDR"})
    with pytest.raises(ConfigError, match="torchrun started 4 processes; one is needed for each rank: start 2"):
        Topology(tensor=2).of_launched(told)
    with pytest.raises(ConfigError, match=r"'MASTER_PORT' is not in its environment"):
        topology.of_launched({name: value for name, value in told.items() if name != "MASTER_PORT"})
    with pytest.raises(ConfigError, match=r"MASTER_PORT must be a whole number, got 'abc'"):
        topology.of_launched(told | {"MASTER_PORT": "abc"})
    with pytest.raises(ConfigError, match=r"RANK is 5 of 4, LOCAL_RANK 1 of 2"):
        topology.of_launched(told | {"RANK": "5"})

"""Shard plans: every element is where it is declared to be; and each rank reads its own slices alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hardpoint.checkpoint.safetensors_files import SafetensorsFiles
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.layers.base import walk
from hardpoint.layers.loading import load_weights
from hardpoint.parallel.groups import Groups
from hardpoint.parallel.shards import HeadShards, vocab_shard, widened
from hardpoint_plugin_api import RankGroup, ShardPlan, ShardSlice
from hardpoint_plugin_api.sharding import joined
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import SMALL


def group(size: int, rank: int = 0) -> RankGroup:
    return cast(RankGroup, SimpleNamespace(name="tp", size=size, rank=rank))


def held(plan: ShardPlan) -> list[list[int | None]]:
    """The logical element in each place of each rank, None for padding."""
    found = []
    for pieces in plan.ranks:
        places: list[int | None] = [None] * plan.size
        for piece in pieces:
            places[piece.target : piece.target + piece.count] = range(piece.source, piece.source + piece.count)
        found.append(places)
    return found


def test_vocabularies_are_padded() -> None:
    plan = vocab_shard(7, group(3))
    assert plan is not None
    plan.check()
    assert held(plan) == [[0, 1, 2], [3, 4, 5], [6, None, None]]
    assert [vocab_shard(7, group(3, rank)).has_padding for rank in range(3)] == [False, False, True]  # type: ignore[union-attr]
    empty = vocab_shard(9, group(4, 3))
    assert empty is not None
    empty.check()
    assert held(empty)[3] == [None] * 3, "a rank may hold padding alone"
    assert vocab_shard(7, group(1)) is None


def test_fewer_kv_heads_than_ranks() -> None:
    heads = HeadShards.of(8, 2, group(4, 3))
    assert (heads.num_heads, heads.num_kv_heads, heads.own) == (2, 1, slice(6, 8))
    q, k, v = heads.rows(2)
    for plan in (q, k, v):
        plan.check()
    assert k == v
    assert held(k) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert held(q)[3] == [12, 13, 14, 15]
    assert heads.columns(2) == q
    assert HeadShards.of(8, 2, group(1)).rows(2) == ()


def test_plans_compose() -> None:
    plan = joined((ShardPlan.even(4, 2, 1), ShardPlan.even(8, 2, 1)))
    plan.check()
    assert held(plan) == [[0, 1, 4, 5, 6, 7], [2, 3, 8, 9, 10, 11]]
    assert held(widened(ShardPlan.even(2, 2, 0), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert held(ShardPlan.even(8, 2, 0).blocks(2)) == [[0, 1], [2, 3]]
    assert held(ShardPlan.padded(7, 2, 0).blocks(4)) == [[0], [1]]
    with pytest.raises(ValueError, match="a slice of 3 elements from 0 cuts a block of 2"):
        ShardPlan.even(6, 2, 0).blocks(2)


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        ((ShardSlice(0, 0, 2), ShardSlice(1, 0, 2)), "element 1 of 4 is on 2 ranks, not on 1"),
        ((ShardSlice(0, 0, 1), ShardSlice(2, 0, 2)), "element 1 of 4 is on 0 ranks"),
        ((ShardSlice(0, 0, 2), ShardSlice(2, 1, 2)), "leaves the 2 elements held"),
        ((ShardSlice(0, 0, 2), ShardSlice(3, 0, 2)), "element 2 of 4 is on 0 ranks"),
    ],
)
def test_plans_that_do_not_cover(slices: tuple[ShardSlice, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ShardPlan(4, 2, tuple((each,) for each in slices)).check()


def test_how_the_world_is_divided() -> None:
    config = EngineConfig.create(model="demo", tensor_parallel_size=4, expert_parallel_size=2)
    members = [
        tuple(each.members for each in (groups.tp, groups.ep, groups.expert_tp))
        for groups in (Groups.at(config.topology.on_this_host(rank)) for rank in range(4))
    ]
    everyone = (0, 1, 2, 3)
    assert members == [
        (everyone, (0, 2), (0, 1)),
        (everyone, (1, 3), (0, 1)),
        (everyone, (0, 2), (2, 3)),
        (everyone, (1, 3), (2, 3)),
    ]


class Watched:
    """A checkpoint's tensors, whose memory is told apart."""

    def __init__(self, folder: Path) -> None:
        self.files = SafetensorsFiles(folder)
        self.title, self.names = self.files.title, self.files.names
        self.tensors: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.files:
            self.tensors.append(tensor)
            yield name, tensor


class Reads(TorchDispatchMode):
    """Counts the bytes that operators read of ``watched``."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, which says nothing of types
        self.watched, self.nbytes = watched, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            storages = {tensor.untyped_storage().data_ptr() for tensor in self.watched.tensors}
            for value in tree_iter((args, kwargs)):
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in storages:
                    self.nbytes += value.numel() * value.element_size()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("ranks", "tied"), [(2, False), (4, True)])
def test_each_rank_reads_its_slices_alone(ranks: int, tied: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3", vocab_size=261, tie_word_embeddings=tied)
    config = EngineConfig.create(
        model=str(tmp_path), **(SMALL | {"tensor_parallel_size": ranks, "linear_backend": "torch"})
    )
    read = []
    for rank in range(ranks):
        blueprint = draw(config, place=config.topology.on_this_host(rank))
        with Reads(Watched(tmp_path)) as reads:
            load_weights(blueprint.model, blueprint.model.weight_names, reads.watched, torch.device("cpu"))
        read.append(reads.nbytes)
        if rank == 0:
            held = sum(t.nbytes for _, layer in walk(blueprint.model) for t in layer.weights.values())
            assert held == reads.nbytes, "of this rank, which holds no padding"
    named = dict(model.named_parameters())  # tied weights are there once
    whole = sum(parameter.nbytes for parameter in named.values())
    norms = sum(parameter.nbytes for name, parameter in named.items() if "norm" in name)
    kv = sum(parameter.nbytes for name, parameter in named.items() if "k_proj" in name or "v_proj" in name)
    replicas = max(1, ranks // 2)  # of each of the two KV heads
    assert sum(read) == whole + (ranks - 1) * norms + (replicas - 1) * kv

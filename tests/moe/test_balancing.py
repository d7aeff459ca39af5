"""Experts that are balanced: where they go, what moves, and engines whose experts move while they serve."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.engine.execution.expert_verbs import BalanceLayer
from hardpoint.experts.balance import BalancedExperts, balanced_experts
from hardpoint.experts.placement import POOR, Placement
from hardpoint.layers import moe
from hardpoint_plugin_api import ConfigError
from tests.moe.test_in_engine import write_mixture
from tests.parallel.ranks import ThreadsExecutor, ranks_in_threads, sharing_replicas
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OFTEN: dict[str, Any] = {"enable_eplb": True, "eplb_step_interval": 4, "eplb_window_size": 3}


# Placements


def check(placement: Placement, num_experts: int, num_slots: int) -> None:
    """All experts are there, and none twice on a rank."""
    assert set(chain.from_iterable(placement.ranks)) == set(range(num_experts))
    assert all(len(set(held)) == len(held) == num_slots for held in placement.ranks)


def skewed(num_experts: int, seed: int) -> list[float]:
    """Loads by Zipf's law, as routers of trained mixtures have about; the order is random."""
    loads = [1000 / (number + 1) ** 0.8 for number in range(num_experts)]
    random.Random(seed).shuffle(loads)
    return loads


@given(st.data())
def test_every_placement_is_whole(data: st.DataObject) -> None:
    ranks, own = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4))
    more = data.draw(st.integers(0, own * (ranks - 1)))
    loads = data.draw(st.lists(st.floats(0, 1e6), min_size=ranks * own, max_size=ranks * own))
    first = Placement.even(ranks * own, ranks, more * ranks)
    check(first, ranks * own, own + more)
    then = first.balanced(loads)
    check(then, ranks * own, own + more)
    assert then.imbalance(loads) <= first.imbalance(loads) * (1 + 1e-9)
    held = [list(rank) for rank in first.ranks]
    for move in first.moves_to(then):
        assert move.source != move.target
        held[move.target][move.slot] = first.ranks[move.source][move.slot_from]
    assert tuple(map(tuple, held)) == then.ranks, "the moves lead there"


@pytest.mark.parametrize(("num_experts", "num_ranks", "redundant"), [(128, 64, 64), (256, 64, 64), (256, 8, 32)])
def test_the_busiest_of_many_ranks(num_experts: int, num_ranks: int, redundant: int) -> None:
    """It comes within 1.15 of the mean; when loads drift, few experts move to keep it there."""
    for seed in range(3):
        loads, draw = skewed(num_experts, seed), random.Random(seed)
        first = Placement.even(num_experts, num_ranks, redundant)
        placed = first.balanced(loads)
        assert first.imbalance(loads) > 1.3
        assert placed.imbalance(loads) <= POOR
        drifted = [load * draw.uniform(0.8, 1.25) for load in loads]
        again = placed.balanced(drifted)
        assert again.imbalance(drifted) <= POOR
        assert len(placed.moves_to(again)) <= 2 * 2 * placed.num_slots < num_ranks * placed.num_slots


def test_experts_with_equal_loads_stay() -> None:
    placement = Placement.even(16, 4)
    assert placement.moves_to(placement.balanced([7.0] * 16)) == []
    assert placement.balanced([0.0] * 16) == placement


# Engines


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("mixture")
    return folder, write_mixture(folder, "qwen3_moe", num_experts=8, num_hidden_layers=3)


def layers_of(llm: LLM) -> list[list[BalancedExperts]]:
    """The balanced layers of each rank."""
    executor = llm.core.executor
    assert isinstance(executor, ThreadsExecutor)
    return [balanced_experts(blueprint.ctx) for blueprint in executor.blueprints]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"expert_parallel_size": 2, "num_redundant_experts": 2}),
        (2, {"expert_parallel_size": 2, "num_redundant_experts": 4, "all2all_backend": "all_to_all"}),
        (4, {"expert_parallel_size": 2, "num_redundant_experts": 2}),
        (2, {"expert_parallel_size": 2, "pipeline_parallel_size": 2, "async_scheduling": True}),
    ],
    ids=["replicated", "exchanged", "slices", "stages"],
)
def test_tokens_stay_the_same(
    mixture: tuple[Path, PreTrainedModel], ranks: int, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = mixture
    prompts = random_prompts(5, 30, seed=4)
    with (
        caplog.at_level("INFO", logger="hardpoint.engine.execution.ranks.expert_balancing"),
        ranks_in_threads(folder, ranks, max_num_seqs=4, **OFTEN, **settings) as llm,
    ):
        outputs = llm.generate(prompts, GREEDY)
        per_rank = layers_of(llm)
        assert any(layer.placement != layer._first for layers in per_rank for layer in layers)
        for first in range(0, len(per_rank), ranks):  # a stage's ranks
            for layers in zip(*per_rank[first : first + ranks], strict=True):
                assert len({layer.placement for layer in layers}) == 1, "ranks agree"
    for prompt, output in zip(prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)
    assert any("experts moved in" in message for message in caplog.messages)


def test_replicas_that_share_experts(mixture: tuple[Path, PreTrainedModel], caplog: pytest.LogCaptureFixture) -> None:
    """The tokens of all replicas count, those of empty steps too, and experts move between the replicas."""
    folder, model = mixture
    prompts = random_prompts(3, 30, seed=4)
    with (
        caplog.at_level("INFO", logger="hardpoint.engine.execution.ranks.expert_balancing"),
        sharing_replicas(folder, num_redundant_experts=2, **OFTEN) as core,
    ):
        requests = [core.add_request(prompt, GREEDY, frozenset(), data_parallel_rank=1) for prompt in prompts]
        while any(request.finish_reason is None for request in requests):
            core.step()
        replicas = [own for each in ThreadsExecutor.alive if not each._closing for own in each.blueprints]
        per_rank = [balanced_experts(blueprint.ctx) for blueprint in replicas]
        assert [len(layers) for layers in per_rank] == [3, 3]
        for first, second in zip(*per_rank, strict=True):
            assert first.placement == second.placement
        assert any(layer.placement != layer._first for layer in per_rank[0])
    for prompt, request in zip(prompts, requests, strict=True):
        check_tokens_equal(model, prompt, request.output_token_ids)
    rounds = [message for message in caplog.messages if "experts moved in" in message]
    assert 4 <= len(rounds) <= 7, "every 4 steps, told by one replica"


@pytest.mark.parametrize("quantization", ["int8", "mxfp4"])
def test_quantized_weights_follow_their_experts(mixture: tuple[Path, PreTrainedModel], quantization: str) -> None:
    settings = {"expert_parallel_size": 2, "num_redundant_experts": 4, "quantization": quantization}
    with ranks_in_threads(mixture[0], 2, enable_eplb=True, **settings) as llm:
        per_rank = layers_of(llm)
        stored: dict[tuple[int, str, int], torch.Tensor] = {}
        for rank, number, expert, name, row in rows_of(per_rank):
            assert torch.equal(stored.setdefault((number, name, expert), row), row), rank
        moved = 0
        for seed in range(3):
            llm.generate(random_prompts(2, 9, seed=seed), GREEDY)
            for number in range(3):
                done = llm.core.executor.control(BalanceLayer(number))[0]
                assert done is not None
                moved += done.num_moved
        assert moved > 0
        for rank, number, expert, name, row in rows_of(per_rank):
            assert torch.equal(row, stored[number, name, expert]), rank


def rows_of(per_rank: list[list[BalancedExperts]]) -> Iterator[tuple[int, int, int, str, torch.Tensor]]:
    """Rank, layer, expert, name and bytes of each slot of each packed tensor."""
    for rank, layers in enumerate(per_rank):
        for number, layer in enumerate(layers):
            for name, part in layer._weights().items():
                for slot, expert in enumerate(layer.placement.ranks[rank]):
                    yield rank, number, expert, name, part[slot].contiguous().view(-1).view(torch.uint8).clone()


def test_loads_are_those_that_requests_report(mixture: tuple[Path, PreTrainedModel]) -> None:
    settings = {"enable_eplb": True, "enable_return_routed_experts": True, "expert_parallel_size": 2}
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, return_routed_experts=True)
    with ranks_in_threads(mixture[0], 2, enforce_eager=True, **settings) as llm:
        for layer in chain.from_iterable(layers_of(llm)):
            layer.forget_loads()  # of the trial steps at the start
        routed = [output.outputs[0].routed_experts for output in llm.generate(random_prompts(3, 20, seed=1), params)]
        found = np.concatenate([each for each in routed if each is not None])
        for layers in layers_of(llm):
            for number, layer in enumerate(layers):
                expected = np.bincount(found[:, number].ravel(), minlength=8)
                assert (layer._loads.numpy() >= expected).all(), "steps may be filled up, and run beyond the last token"
                assert layer._loads.sum() - expected.sum() <= 2 * 3


def test_padding_of_replicas_goes_to_no_expert(
    mixture: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has all requests; the other's empty steps load no expert."""
    monkeypatch.setattr(moe, "_MANY_TOKENS", 1)
    settings = {"enable_eplb": True, "enable_return_routed_experts": True, "async_scheduling": False}
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, return_routed_experts=True)
    with sharing_replicas(mixture[0], **settings) as core:
        ranks = [own for each in ThreadsExecutor.alive if not each._closing for own in each.blueprints]
        per_rank = [balanced_experts(blueprint.ctx) for blueprint in ranks]
        for layer in chain.from_iterable(per_rank):
            layer.forget_loads()  # of the trial steps at the start
        prompts = random_prompts(3, 20, seed=1)
        requests = [core.add_request(prompt, params, frozenset(), data_parallel_rank=1) for prompt in prompts]
        while any(request.finish_reason is None for request in requests):
            core.step()
        found = np.concatenate([request.routed_experts for request in requests])
        for number, layers in enumerate(zip(*per_rank, strict=True)):
            loads = sum(layer._loads.numpy() for layer in layers)
            assert np.array_equal(loads, np.bincount(found[:, number].ravel(), minlength=8))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_weights_are_read_again_where_they_were(tmp_path: Path, family: str) -> None:
    """Sleep drops weights. They are read again as at the start, also from tensors that hold all experts of a layer."""
    sizes: dict[str, Any] = {"num_local_experts" if family == "gpt_oss" else "num_experts": 8}
    model = write_checkpoint(tmp_path, family, **sizes)
    (prompt,) = random_prompts(1, 20, seed=6)
    with ranks_in_threads(tmp_path, 2, expert_parallel_size=2, num_redundant_experts=2, **OFTEN) as llm:
        for _ in range(2):
            check_tokens_equal(model, prompt, llm.generate([prompt], GREEDY)[0].outputs[0].token_ids)
            llm.sleep(2)
            assert all(layer.placement == layer._first for layer in chain.from_iterable(layers_of(llm)))
            llm.wake_up()


def test_a_kernel_that_packs_all_experts_at_once(mixture: tuple[Path, PreTrainedModel]) -> None:
    with ranks_in_threads(mixture[0], 2, expert_parallel_size=2, enable_eplb=True) as llm:
        for layer in chain.from_iterable(layers_of(llm)):
            weights = dict(layer._weights())
            weights["w2.scale"] = next(iter(weights.values()))[:0]
            layer._weights = lambda weights=weights: weights  # type: ignore[misc]
            with pytest.raises(ConfigError, match=r"packs w2\.scale .* --experts-backend"):
                layer.check()


def test_a_model_without_experts(caplog: pytest.LogCaptureFixture) -> None:
    with (
        pytest.raises(ConfigError, match="--enable-eplb, --enable-expert-parallel: demo has no mixture of experts; le"),
        ranks_in_threads("demo", 2, enable_eplb=True, enable_expert_parallel=True),
    ):
        pass
    with ranks_in_threads("demo", 2, enable_expert_parallel=True):
        assert "--enable-expert-parallel has no effect: demo has no mixture of experts" in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_redundant_experts": 2}, "num_redundant_experts = 2 has no effect without --enable-eplb"),
        ({"enable_eplb": True}, "add --enable-expert-parallel"),
        (OFTEN | {"expert_parallel_size": 2, "batch_invariant": True}, "--batch-invariant"),
        (OFTEN | {"expert_parallel_size": 2, "eplb_window_size": 9}, "must be at most"),
        (OFTEN | {"expert_parallel_size": 2, "num_redundant_experts": 3}, "a multiple of the 2 groups"),
        (OFTEN | {"expert_parallel_size": 2, "num_redundant_experts": 10}, "at most 8"),
    ],
)
def test_refusals(mixture: tuple[Path, PreTrainedModel], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said), ranks_in_threads(mixture[0], 2, **settings):
        pass

"""How blocks are divided among pipeline stages."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.engine.explain import explain
from hardpoint.parallel.stages import BlockWeights
from hardpoint_plugin_api import ConfigError
from tests.parallel.ranks import ranks_in_threads
from tests.support.checkpoints import DEEPSEEK_V3, check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import SMALL

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize(
    ("number", "stages", "expected"), [(3, 2, (2, 1)), (4, 2, (2, 2)), (5, 3, (2, 2, 1)), (3, 3, (1, 1, 1))]
)
def test_blocks_that_weigh_alike(number: int, stages: int, expected: tuple[int, ...]) -> None:
    assert BlockWeights.alike(number).divided(stages) == expected


def test_embedding_and_head_leave_the_middle_more() -> None:
    """A token is multiplied with as many bytes on the busiest stage either way."""
    weights = BlockWeights((436,) * 34, (436,) * 34, first=1050, last=1050)
    assert weights.divided(4) == (8, 9, 9, 8)
    assert BlockWeights((436,) * 32, (436,) * 32, first=1050, last=1050).divided(3) == (11, 11, 10)


@given(st.data())
def test_no_division_is_better(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 8))
    stages = data.draw(st.integers(1, number))
    blocks = data.draw(st.lists(st.integers(1, 50), min_size=number, max_size=number))
    used = [data.draw(st.integers(1, size)) for size in blocks]
    weights = BlockWeights(tuple(blocks), tuple(used), data.draw(st.integers(0, 90)), data.draw(st.integers(0, 90)))

    def rank(numbers: tuple[int, ...]) -> tuple[int, int, int]:
        """The numbers that are to be small, in order."""
        bounds = [sum(numbers[:i]) for i in range(stages + 1)]
        sizes = weights.of_stages(numbers)
        return max(sum(used[a:b]) for a, b in pairwise(bounds)), max(sizes), sum(size**2 for size in sizes)

    every = [
        tuple(b - a for a, b in pairwise((0, *cuts, number))) for cuts in combinations(range(1, number), stages - 1)
    ]
    found = weights.divided(stages)
    assert rank(found) == min(map(rank, every))
    assert found == max(each for each in every if rank(each) == rank(found)), "the earlier stages have more"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoints_bytes(tied: bool, tmp_path: Path) -> None:
    """All tensors are counted once, but a tied one on both ends."""
    model = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=4, tie_word_embeddings=tied)
    config = EngineConfig.create(model=str(tmp_path), **SMALL, pipeline_parallel_size=2)
    found = draw(config).model.division.weights
    assert found is not None
    sizes = {name: x.nbytes for name, x in model.state_dict().items()}
    table, norm = sizes["model.embed_tokens.weight"], sizes["model.norm.weight"]
    blocks = sum(size for name, size in sizes.items() if ".layers." in name)
    assert found == BlockWeights((blocks // 4,) * 4, (blocks // 4,) * 4, table, table + norm)


def moe(folder: Path) -> PreTrainedModel:
    """The first of six blocks has a feed-forward for every token, the others have experts."""
    changes: dict[str, Any] = {"num_hidden_layers": 6, "first_k_dense_replace": 1}
    return write_checkpoint(folder, "deepseek_v3", **(DEEPSEEK_V3 | changes))


def test_experts_count_as_often_as_a_token_goes_to_them(tmp_path: Path) -> None:
    model = moe(tmp_path)
    config = EngineConfig.create(model=str(tmp_path), **SMALL, pipeline_parallel_size=2)
    found = draw(config).model.division.weights
    assert found is not None
    sizes = {name: x.nbytes for name, x in model.state_dict().items() if ".layers.3." in name}
    experts = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    share = model.config.num_experts_per_tok / model.config.n_routed_experts
    assert found.blocks[3] == sum(sizes.values())
    assert found.used[3] == int(sum(sizes.values()) - experts + experts * share) < found.blocks[3]
    assert found.used[0] == found.blocks[0]


def test_numbers_that_the_user_gives(tmp_path: Path) -> None:
    model = moe(tmp_path)
    prompts = random_prompts(3, 30, seed=1)
    settings: dict[str, Any] = {"pipeline_parallel_size": 3, "pipeline_parallel_layers": "1,4,1"}
    table = explain(EngineConfig.create(model=str(tmp_path), **SMALL, **settings))
    assert table.notes == ("pipeline stages have 1, 4, 1 blocks",)
    with ranks_in_threads(tmp_path, 1, **settings) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_the_division_is_explained(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=5)
    settings: dict[str, Any] = {"pipeline_parallel_size": 2}
    (note,) = explain(EngineConfig.create(model=str(tmp_path), **SMALL, **settings)).notes
    assert note.startswith("pipeline stages have 3, 2 blocks, and 0, 0 MB of weights")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert explain(EngineConfig.create(model=str(tmp_path), **SMALL, **settings)).notes == (
        "pipeline stages have 3, 2 blocks",
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_layers": "2,2"}, "4 blocks, and the model has 3"),
        (
            {"pipeline_parallel_layers": (1, 1, 1)},
            "has 3 numbers; it must have one for each pipeline stage",
        ),
        ({"pipeline_parallel_layers": "0,3"}, "pipeline_parallel_layers"),
    ],
)
def test_numbers_that_cannot_be(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=3)
    with pytest.raises(ConfigError, match=message):
        draw(EngineConfig.create(model=str(tmp_path), **SMALL, pipeline_parallel_size=2, **settings))

"""Layers of unlike spans in one engine: a block table each, one pool, and the tokens that Transformers gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import SamplingParams
from hardpoint.cache_users import group_size
from hardpoint.engine.requests import AdmittedRequest
from hardpoint.engine.scheduling.request import Request
from hardpoint_plugin_api import Span
from tests.out_of_tree.build import Dist, importable, install
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
WINDOW = 20
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
PAGE_BYTES = 2 * 16 * 2 * 16 * 4
"""Keys and values of 16 tokens in one layer: 2 heads of 16 float32."""


@pytest.mark.parametrize(
    ("counts", "size"),
    [([36], 36), ([12, 12], 12), ([24, 8], 8), ([22, 4], 4), ([5, 1], 1), ([1, 31], 4), ([40, 2], 8)],
)
def test_groups_are_cut_where_the_fewest_places_stay_empty(counts: list[int], size: int) -> None:
    assert group_size(counts) == size


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("mixed")
    changes: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": KINDS}
    return folder, write_checkpoint(folder, "qwen3", num_hidden_layers=5, **changes)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"async_scheduling": True, "max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"enable_prefix_caching": False, "async_scheduling": True},
        {"block_size": 1},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
def test_tokens_equal_however_the_engine_is_set_up(
    mixed: tuple[Path, PreTrainedModel], settings: dict[str, Any]
) -> None:
    folder, model = mixed
    prompts = random_prompts(5, 70, seed=2)
    prompts += [[*prompt, 7, 8, 9] for prompt in prompts if len(prompt) > 30]  # these find a cached prefix
    with small_llm(folder, **settings) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        if settings.get("enable_prefix_caching", True):
            cache = llm.core.scheduler.cache
            longest = max(prompts, key=len)
            again = Request(AdmittedRequest(0, tuple(longest), GREEDY, 0, frozenset(), 100))
            hashes = list(again.block_hashes(cache.geometry.block_size, 2))
            assert cache.find(hashes).num_blocks == 2
        pool = llm.core.scheduler.cache.pool
        assert pool.num_free == pool.num_usable


def test_layers_of_all_groups_share_the_pool(mixed: tuple[Path, PreTrainedModel]) -> None:
    with small_llm(mixed[0], kv_cache_memory=61 * PAGE_BYTES) as llm:
        groups = llm.core.blueprint.ctx.cache_users.cache_groups()
        assert {(group.retention, len(group.users)) for group in groups} == {(Span(), 1), (Span(window=WINDOW), 1)}
        assert sorted(index for group in groups for index in group.users) == [0, 1, 2, 3, 4]
        assert llm.core.scheduler.cache.pool.num_pages == 61, "a page holds one layer's tokens"


def test_preemption_with_a_pool_that_is_too_small(mixed: tuple[Path, PreTrainedModel]) -> None:
    folder, model = mixed
    prompts = random_prompts(8, 50, seed=5, shortest=30)
    with small_llm(folder, kv_cache_memory=40 * PAGE_BYTES, max_model_len=96, max_num_batched_tokens=16) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        pool = llm.core.scheduler.cache.pool
        assert pool.num_free == pool.num_usable, "pages leaked"
    assert sum(output.metrics.num_preemptions for output in outputs) > 0, "the pool is meant to be too small"
    for prompt, output in zip(prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_windows_free_their_pages_so_that_longer_sequences_fit(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "mistral", sliding_window=WINDOW)
    prompt = random_prompts(1, 200, seed=3, shortest=200)[0]
    pages = 5  # of 16 tokens, and the null page: far fewer than 240 tokens take
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "max_model_len": 300}
    with small_llm(tmp_path, kv_cache_memory=(pages + 1) * 3 * PAGE_BYTES, **settings) as llm:
        assert llm.core.scheduler.cache.pool.num_usable == pages
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    check_tokens_equal(model, prompt, output.outputs[0].token_ids)


CHUNK = 24
CHUNKED_MODEL = Dist(
    "hp-chunked",
    {
        "hp_chunked/__init__.py": "",
        "hp_chunked/plugin.py": "",
        "hp_chunked/model.py": f'''
from dataclasses import replace

from hardpoint.models.decoder import Block, attention, decoder, mlp, norms, num_layers


def chunked(config):
    """A Llama whose layers are chunked-local, but for every third."""
    full = attention(config)
    local = replace(full, args=replace(full.args, chunk={CHUNK}))
    mixers = [full if i % 3 == 2 else local for i in range(num_layers(config))]
    return decoder(config, [Block(mixer, mlp(config), norms(config)) for mixer in mixers])
''',
        "hp_chunked/hardpoint.toml": """
schema = 1
api = "0.2"
[plugin]
name = "chunked"
[[contribution]]
family = "model"
of = "ChunkedForCausalLM"
name = "chunked"
target = "hp_chunked.model:chunked"
""",
    },
    {"chunked": "hp_chunked.plugin"},
)


class ChunkedLocal:
    """Transformers' Llama with the mask of chunked-local attention in the layers that have it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        for index, layer in enumerate(model.model.layers):
            if index % 3 != 2:
                layer.self_attn.register_forward_pre_hook(self._mask, with_kwargs=True)

    @staticmethod
    def _mask(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        length = kwargs["hidden_states"].shape[1]
        query, key = torch.arange(length)[:, None], torch.arange(length)
        visible = (key <= query) & (key // CHUNK == query // CHUNK)
        mask = torch.zeros(1, 1, length, length).masked_fill(~visible, float("-inf"))
        return args, kwargs | {"attention_mask": mask}

    def __call__(self, ids: torch.Tensor) -> Any:
        return self._model(ids)


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder, site = tmp_path_factory.mktemp("chunked"), tmp_path_factory.mktemp("chunked-site")
    install([CHUNKED_MODEL], site, tmp_path_factory.mktemp("wheels"))
    model = write_checkpoint(folder, "llama", num_hidden_layers=4, attn_implementation="eager")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["ChunkedForCausalLM"]}))
    with importable(site):
        yield folder, ChunkedLocal(model)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 8, "async_scheduling": True}, {"kv_cache_memory": 40 * 3 * PAGE_BYTES}],
    ids=str,
)
def test_a_model_with_chunked_local_layers(chunked: tuple[Path, Any], settings: dict[str, Any]) -> None:
    folder, model = chunked
    prompts = random_prompts(6, 90, seed=9)
    with small_llm(folder, **settings) as llm:
        spans = {group.retention for group in llm.core.blueprint.ctx.cache_users.cache_groups()}
        assert spans == {Span(), Span(chunk=CHUNK)}
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)

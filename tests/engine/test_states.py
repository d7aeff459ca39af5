"""Layers with a state instead of keys and values, beside attention in one engine: tokens as plain torch gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import RequestOutput, SamplingParams
from hardpoint.cache_users import ModelCaches
from hardpoint.engine.execution.forward import Forward
from hardpoint.layers.states import StatePlanner
from hardpoint_plugin_api import (
    CacheSpec,
    CacheUser,
    ConfigError,
    Latest,
    PlainLayout,
    Plane,
    Span,
    StepPlanner,
)
from tests.out_of_tree.build import Dist, importable, install
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import counted, prompt_logits, small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LOGIT_TOLERANCE = 1e-4
HEADS, SIZE, LAYERS = 4, 16, 5
DECAYS = (0.5, 0.9, 0.97, 1.0)
STATE_BYTES = HEADS * SIZE * SIZE * 4
"""As many as keys and values of 8 tokens: a page of 16 tokens has twice as many."""
PAGE_BYTES = 2 * 16 * HEADS * SIZE * 4
COPY = Forward.copy_pages
HYBRID = Dist(
    "hp-hybrid",
    {
        "hp_hybrid/__init__.py": "",
        "hp_hybrid/plugin.py": "",
        "hp_hybrid/model.py": f'''
from hardpoint.models.decoder import Block, Sublayer, attention, decoder, linear_names, mlp, norms, num_layers
from hardpoint_plugin_api import LinearAttentionArgs


def hybrid(config):
    """A Llama whose layers are linear attention, but for every other."""
    softmax = attention(config)
    args = LinearAttentionArgs(softmax.args.hidden_size, softmax.args.head_size, {DECAYS}, softmax.args.scale)
    linear = Sublayer(args, softmax.names)
    mixers = [softmax if i % 2 else linear for i in range(num_layers(config))]
    return decoder(config, [Block(mixer, mlp(config), norms(config)) for mixer in mixers])
''',
        "hp_hybrid/hardpoint.toml": """
schema = 1
api = "0.2"
[plugin]
name = "hybrid"
[[contribution]]
family = "model"
of = "HybridForCausalLM"
name = "hybrid"
target = "hp_hybrid.model:hybrid"
requires = [{ feature = ["pipeline_stages"] }]
""",
    },
    {"hybrid": "hp_hybrid.plugin"},
)


class Recurrent:
    """Transformers' Llama with the recurrence in place of attention in every other layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        for layer in model.model.layers[::2]:
            layer.self_attn.forward = _recurrence(layer.self_attn)

    def __call__(self, ids: torch.Tensor) -> Any:
        return self._model(ids)


def _recurrence(module: torch.nn.Module) -> Any:
    decays = torch.tensor(DECAYS)[:, None, None]

    def forward(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        projections: list[Any] = [module.q_proj, module.k_proj, module.v_proj]
        q, k, v = (p(hidden_states)[0].unflatten(-1, (HEADS, SIZE)) for p in projections)
        state, mixed = torch.zeros(HEADS, SIZE, SIZE), []
        for one_q, one_k, one_v in zip(q, k, v, strict=True):
            state = decays * state + torch.einsum("hd,he->hde", one_k, one_v)
            mixed.append(torch.einsum("hd,hde->he", one_q, state) * SIZE**-0.5)
        out: Any = module.o_proj
        return out(torch.stack(mixed).flatten(1))[None], None

    return forward


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder, site = tmp_path_factory.mktemp("hybrid"), tmp_path_factory.mktemp("hybrid-site")
    install([HYBRID], site, tmp_path_factory.mktemp("wheels"))
    changes: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": SIZE}
    model = write_checkpoint(folder, "llama", num_hidden_layers=LAYERS, **changes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HybridForCausalLM"]}))
    with importable(site):
        yield folder, Recurrent(model)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"async_scheduling": True, "max_num_batched_tokens": 24, "max_num_seqs": 3},
        {"enable_prefix_caching": False, "async_scheduling": True},
        {"block_size": 1},
        {"enforce_eager": True, "block_size": 4, "async_scheduling": True},
    ],
    ids=str,
)
def test_tokens_equal_however_the_engine_is_set_up(hybrid: tuple[Path, Any], settings: dict[str, Any]) -> None:
    folder, model = hybrid
    prompts = random_prompts(3, 60, seed=2, shortest=20)
    prompts += [[*prompt, 7, 8, 9] for prompt in prompts if len(prompt) > 30]
    with small_llm(folder, **settings) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        found = llm.core.scheduler.num_cached_tokens
        assert (found > 0) == settings.get("enable_prefix_caching", True)
        if not settings:
            assert counted(llm)["graph_replays_total"] > 0
        pool = llm.core.scheduler.cache.pool
        assert pool.num_free == pool.num_usable, "pages leaked"


def test_states_and_keys_share_the_pool(hybrid: tuple[Path, Any]) -> None:
    with small_llm(hybrid[0], kv_cache_memory=20 * PAGE_BYTES) as llm:
        groups = llm.core.blueprint.ctx.cache_users.cache_groups()
        assert [(group.retention, len(group.users)) for group in groups] == [(Latest(), 1)] * 3 + [(Span(), 1)] * 2
        assert 16 < llm.core.scheduler.cache.pool.num_pages <= 20, "a page holds one layer's tokens, or state"


def _user(spec: CacheSpec) -> CacheUser:
    return CacheUser("", spec, PlainLayout(), StepPlanner(), None)


@pytest.mark.parametrize(
    ("state", "longest", "size"),
    [(64, 4096, 16), (128, 4096, 16), (129, 4096, 32), (700, 4096, 128), (700, 100, 64), (10**6, 4096, 1024)],
)
def test_blocks_become_as_large_as_states(state: int, longest: int, size: int) -> None:
    caches = ModelCaches()
    caches.add(_user(CacheSpec.keys_values(1, 64, "float32")))
    assert caches.fitting_block_size(16, longest) == 16
    caches.add(_user(CacheSpec((Plane("state", (state, 16), "float32"),), Latest())))
    assert caches.fitting_block_size(16, longest) == size


def test_a_block_size_is_a_wish_unless_it_is_set(tmp_path: Path, hybrid: tuple[Path, Any]) -> None:
    changes: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": 64}
    write_checkpoint(tmp_path, "llama", num_hidden_layers=2, **changes)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["HybridForCausalLM"]}))
    with small_llm(tmp_path, block_size=None) as llm:
        assert llm.core.blueprint.ctx.block_size == 32, "a state is as large as keys and values of 32 tokens"
        assert llm.core.scheduler.cache.geometry.block_size == 32
        assert llm.generate([[5] * 40], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with small_llm(tmp_path, block_size=16) as llm:
        assert llm.core.blueprint.ctx.block_size == 16


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 12, "num_speculative_tokens": 2},
        {"async_scheduling": True, "block_size": 4, "num_speculative_tokens": 6},
        {"async_scheduling": True, "enable_prefix_caching": False, "max_num_seqs": 3},
        {"enforce_eager": True, "block_size": 1, "num_speculative_tokens": 1},
    ],
    ids=str,
)
def test_wrong_drafts_leave_no_trace_in_states(hybrid: tuple[Path, Any], settings: dict[str, Any]) -> None:
    folder, model = hybrid
    prompts = [[*prompt, *prompt] for prompt in random_prompts(3, 50, seed=2, shortest=30)]
    prompts += [[*prompt, 7, 8, 9] for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with small_llm(folder, speculative_method="ngram", **settings) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        stats, pool = llm.stats, llm.core.scheduler.cache.pool
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        assert (llm.core.scheduler.num_cached_tokens > 0) == settings.get("enable_prefix_caching", True)
        assert pool.num_free == pool.num_usable, "pages leaked"


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_the_log_says_what_states_take(
    hybrid: tuple[Path, Any], caplog: pytest.LogCaptureFixture, num_drafts: int
) -> None:
    drafts: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": num_drafts} if num_drafts else {}
    with caplog.at_level("INFO", logger="hardpoint"), small_llm(hybrid[0], **drafts):
        pass
    layers = len(range(0, LAYERS, 2))
    taken = layers * (1 + num_drafts) * STATE_BYTES // 1024
    assert f"a sequence's states take {taken} KiB in {layers} layers" in caplog.messages


def test_drafts_are_refused_where_a_layer_cannot_undo_them(
    hybrid: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StatePlanner, "keeps_drafts", False)
    wanted = (
        r"--speculative-method: layer stack\.blocks\.0\.mixer keeps a state.* \(StatePlanner\.keeps_drafts is False\)"
    )
    with pytest.raises(ConfigError, match=wanted):
        small_llm(hybrid[0], speculative_method="ngram")


def test_a_state_is_found_at_the_edge_of_a_block_and_not_changed(hybrid: tuple[Path, Any]) -> None:
    """Prompts that go on from one state in different ways get its copies."""
    folder, model = hybrid
    (start,) = random_prompts(1, 50, seed=4, shortest=50)
    with small_llm(folder) as llm:
        for batch, cached in (([[1]], 0), ([[2, 3]], 48), ([[1]], 48), ([[4] * 20], 48), ([[5], [6]], 48)):
            prompts = [start + tail for tail in batch]
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
                assert output.num_cached_tokens == cached


def test_a_conversation_goes_on_from_the_state_of_its_last_block(hybrid: tuple[Path, Any]) -> None:
    folder, model = hybrid
    (prompt,) = random_prompts(1, 21, seed=6, shortest=21)
    with small_llm(folder) as llm:
        for cached in (0, 32, 64):
            output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
            assert output.num_cached_tokens == cached
            prompt = [*prompt, *output.outputs[0].token_ids, 3, 5, 7, 9, 11]


def test_preemption_with_a_pool_that_is_too_small(hybrid: tuple[Path, Any]) -> None:
    folder, model = hybrid
    prompts = random_prompts(6, 50, seed=5, shortest=30)
    settings: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 16, "async_scheduling": True}
    with small_llm(folder, kv_cache_memory=44 * PAGE_BYTES, **settings) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        pool = llm.core.scheduler.cache.pool
        assert pool.num_free == pool.num_usable, "pages leaked"
    assert sum(output.metrics.num_preemptions for output in outputs) > 0, "the pool is meant to be too small"
    for prompt, output in zip(prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_requests_with_drafts_go_on_as_they_were(hybrid: tuple[Path, Any], ahead: bool) -> None:
    """Of a request that has to begin again, no state of drafts is left, neither in its pages nor among the cached."""
    folder, model = hybrid
    prompts = [[*prompt, *prompt] for prompt in random_prompts(6, 25, seed=5, shortest=15)]
    settings: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 24, "async_scheduling": ahead}
    with small_llm(
        folder,
        speculative_method="ngram",
        num_speculative_tokens=3,
        kv_cache_memory=44 * PAGE_BYTES,
        **settings,
    ) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        stats = llm.stats
        assert stats.num_preemptions > 0, "the pool is meant to be too small"
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        assert stats.num_free_pages == stats.num_pages, "pages leaked"


def test_logits_do_not_depend_on_where_a_prompt_is_cut(hybrid: tuple[Path, Any]) -> None:
    folder, model = hybrid
    (prompt,) = random_prompts(1, 60, seed=8, shortest=60)
    with small_llm(folder) as llm:
        whole = prompt_logits(llm, prompt)
        assert (whole - model(torch.tensor([prompt])).logits[0]).abs().max() < LOGIT_TOLERANCE
        for chunk in (7, 16, 23):
            assert (prompt_logits(llm, prompt, chunk) - whole).abs().max() < LOGIT_TOLERANCE


def check_all(model: Any, prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def _no_copies(forward: Forward, counts: Mapping[int, int], pages: torch.Tensor) -> None:
    """Nothing is copied."""


def _first_group_alone(forward: Forward, counts: Mapping[int, int], pages: torch.Tensor) -> None:
    """The copies of other cache groups are left out."""
    group = min(counts)
    COPY(forward, {group: counts[group]}, pages[:, : counts[group]])


def _first_copy_alone(forward: Forward, counts: Mapping[int, int], pages: torch.Tensor) -> None:
    """Of several requests of a group, the first one's page is copied."""
    first = 0
    for group, count in counts.items():
        COPY(forward, {group: 1}, pages[:, first : first + 1])
        first += count


@pytest.mark.parametrize("fault", [_no_copies, _first_group_alone, _first_copy_alone])
def test_a_fault_planted_in_page_copies_changes_tokens(
    hybrid: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    folder, model = hybrid
    prompts = random_prompts(2, 36, seed=2, shortest=36)  # they come to the edge of a block in the same step
    monkeypatch.setattr(Forward, "copy_pages", fault)
    with small_llm(folder, enforce_eager=True) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(AssertionError):
        check_all(model, prompts, outputs)


def test_copies_behind_the_model_change_tokens(hybrid: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = hybrid
    prompts, late = random_prompts(1, 36, seed=2, shortest=36), []
    hidden = Forward.hidden
    monkeypatch.setattr(Forward, "copy_pages", lambda *copy: late.append(copy))

    def then_copy(*args: Any) -> torch.Tensor:
        result = hidden(*args)
        while late:
            COPY(*late.pop())
        return result

    monkeypatch.setattr(Forward, "hidden", then_copy)
    with small_llm(folder, enforce_eager=True) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(AssertionError):
        check_all(model, prompts, outputs)

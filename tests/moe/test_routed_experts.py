"""The experts that each token was routed to, returned with a request, beside those of Transformers' own routers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import ConfigError, RequestError
from tests.moe.test_in_engine import SMALL_MIXTURE, write_mixture
from tests.parallel.ranks import ranks_in_threads
from tests.support.checkpoints import DEEPSEEK_V3, random_prompts, write_checkpoint
from tests.support.engines import small_llm

ASKS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, return_routed_experts=True)
KEEPS = {"enable_return_routed_experts": True}

Routed = npt.NDArray[np.int16]


@torch.inference_mode()
def routed_by(model: PreTrainedModel, ids: Sequence[int]) -> Routed:
    """The ids [tokens, layers, K], ascending, that each layer's experts are given."""
    found: list[torch.Tensor] = []

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(next(each for each in (*args, *kwargs.values()) if not each.is_floating_point()))

    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    assert experts
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in experts]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack([each.view(len(ids), -1).sort(-1).values for each in found], 1).numpy().astype(np.int16)


def check(llm: LLM, model: PreTrainedModel, prompts: list[list[int]], params: SamplingParams = ASKS) -> None:
    for output in llm.generate(prompts, params):
        for completion in output.outputs:
            run = (output.prompt_token_ids + completion.token_ids)[:-1]
            routed = completion.routed_experts
            assert routed is not None
            assert routed.dtype == np.int16
            np.testing.assert_array_equal(np.sort(routed, -1), routed_by(model, run))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("mixture")
    return folder, write_mixture(folder, "qwen3_moe", num_hidden_layers=3)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16, "async_scheduling": True},
        {"kv_cache_memory": "64KiB", "max_num_batched_tokens": 32},
        {"enforce_eager": True, "speculative_method": "ngram", "num_speculative_tokens": 3},
    ],
    ids=["chunks", "preemption", "drafts"],
)
def test_with_every_kind_of_step(mixture: tuple[Path, PreTrainedModel], settings: dict[str, Any]) -> None:
    folder, model = mixture
    prompts = random_prompts(6, 40, seed=3)
    with small_llm(folder, max_model_len=64, **KEEPS, **settings) as llm:
        check(llm, model, prompts)
        check(llm, model, [[*prompt, 1, 2] for prompt in prompts])
        assert (llm.core.stats.num_preemptions > 0) == ("kv_cache_memory" in settings)


def test_of_a_cached_prefix(mixture: tuple[Path, PreTrainedModel]) -> None:
    folder, model = mixture
    (prompt,) = random_prompts(1, 60, seed=5, shortest=60)
    with small_llm(folder, **KEEPS) as llm:
        first, again = (llm.generate([prompt], SamplingParams(max_tokens=1))[0] for _ in range(2))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
        assert again.outputs[0].routed_experts is None, "nobody asked"
        check(llm, model, [prompt])


@pytest.mark.parametrize(
    "settings",
    [
        {"core_process": True},
        {"tensor_parallel_size": 2, "expert_parallel_size": 2},
        {"tensor_parallel_size": 2, "expert_parallel_size": 2, "all2all_backend": "all_to_all"},
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
    ],
    ids=["process", "replicated", "exchanged", "stages"],
)
def test_wherever_ranks_run(mixture: tuple[Path, PreTrainedModel], settings: dict[str, Any]) -> None:
    folder, model = mixture
    ranks = settings.pop("tensor_parallel_size", 0)
    with (
        ranks_in_threads(folder, ranks, **KEEPS, **settings) if ranks else small_llm(folder, **KEEPS, **settings) as llm
    ):
        check(llm, model, random_prompts(3, 30, seed=8), ASKS)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("mixtral", SMALL_MIXTURE), ("deepseek_v3", DEEPSEEK_V3), ("gpt_oss", {"num_local_experts": 8})],
    ids=["mixtral", "latent", "windows"],
)
def test_of_other_models(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """With latent attention; with windows, whose pages are given back while the record's are kept."""
    model = write_checkpoint(tmp_path, family, **changes)
    with small_llm(tmp_path, **KEEPS) as llm:
        check(llm, model, random_prompts(2, 30, seed=9))


def test_of_several_completions(mixture: tuple[Path, PreTrainedModel]) -> None:
    folder, model = mixture
    params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True, return_routed_experts=True)
    with small_llm(folder, **KEEPS) as llm:
        check(llm, model, random_prompts(2, 20, seed=2), params)


def test_what_cannot_be_returned(mixture: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    with small_llm(mixture[0]) as llm, pytest.raises(RequestError, match="--enable-return-routed-experts"):
        llm.generate([[1, 2]], ASKS)
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(return_routed_experts=True, stop="a")
    for stages in (1, 2):
        with (
            pytest.raises(ConfigError, match="no mixture of experts"),
            ranks_in_threads("demo", 1, pipeline_parallel_size=stages, **KEEPS),
        ):
            pass

"""No step makes the host wait for the device but for sampled tokens, as the device's own sync debug mode tells.

On an accelerator; test_simulated_device.py runs it on the simulated one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hardpoint import LLM, LoRARequest, SamplingParams
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.lora import write_adapter
from tests.support.waits import waits_are_errors

pytestmark = pytest.mark.accelerator

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
PENALIZED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=0.1, bad_words=["a b"])
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=1, max_tokens=12, ignore_eos=True)


@contextmanager
def no_waits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Waits are errors, but for those of copies to the host that the platform began, which is how tokens come."""
    platform = llm.core.blueprint.platform
    device: Any = sys.modules[f"torch.{platform.info.torch_type}"]
    begin = platform.to_host

    def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        wait = begin(tensor)

        def waited() -> torch.Tensor:
            device.set_sync_debug_mode("default")
            host = wait()
            device.set_sync_debug_mode("error")
            return host

        return waited

    with monkeypatch.context() as patch:
        patch.setattr(platform, "to_host", to_host)
        with waits_are_errors(device):
            yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "qwen3")
    return folder


@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "params", [GREEDY, SCORED, PENALIZED, DRAWN], ids=["greedy", "greedy-scored", "greedy-penalized", "drawn"]
)
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_prompts_and_decodes(
    checkpoint: Path,
    params: SamplingParams,
    eager: bool,
    ahead: bool,
    drafter: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks, some of them while others decode, a request that comes later, and decodes to the end."""
    settings: dict[str, Any] = {"enforce_eager": eager, "async_scheduling": ahead, "max_num_batched_tokens": 64}
    settings["speculative_method"] = drafter
    with LLM(str(checkpoint), kv_cache_memory="64MiB", max_num_seqs=8, **settings) as llm:
        assert llm.core.blueprint.ctx.device.accelerator
        llm.generate(random_prompts(8, 60, seed=1), params, use_tqdm=False)  # compiles what is compiled when first met
        with no_waits(llm, monkeypatch):
            *first, last = random_prompts(8, 60, seed=2)
            requests = [llm.core.add_request(prompt, params, frozenset()) for prompt in first]
            for _ in range(4):
                llm.core.step()
            requests.append(llm.core.add_request(last, params, frozenset()))
            while not llm.core.is_idle:
                llm.core.step()
        assert [len(request.output_token_ids) for request in requests] == [params.max_tokens] * 8


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_greedy_requests_with_adapters(
    checkpoint: Path, tmp_path: Path, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path, AutoModelForCausalLM.from_pretrained(checkpoint))
    settings: dict[str, Any] = {"enforce_eager": eager, "async_scheduling": True, "max_num_batched_tokens": 64}
    with LLM(str(checkpoint), kv_cache_memory="64MiB", max_num_seqs=8, enable_lora=True, **settings) as llm:
        llm.generate(random_prompts(8, 60, seed=1), GREEDY, lora_request=LoRARequest("one", 1, str(tmp_path)))
        with no_waits(llm, monkeypatch):
            names = ["one", "", "one", "one"]
            prompts = random_prompts(4, 60, seed=2)
            requests = [
                llm.core.add_request(prompt, GREEDY, frozenset(), adapter=name)
                for name, prompt in zip(names, prompts, strict=True)
            ]
            while not llm.core.is_idle:
                llm.core.step()
        assert [len(request.output_token_ids) for request in requests] == [GREEDY.max_tokens] * 4

"""Two devices of one process: an engine works on its own, whichever its caller's thread has made current."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint_sim import _C
from tests.support.checkpoints import random_prompts, write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[LLM, LLM]]:
    write_checkpoint(tmp_path, "llama")
    settings = {"platform": "sim", "kv_cache_memory": "8MiB", "max_num_seqs": 4, "enforce_eager": True}
    with (
        LLM(str(tmp_path), device_index=0, **settings) as first,
        LLM(str(tmp_path), device_index=1, **settings) as second,
    ):
        yield first, second


def devices_of_a_step(llm: LLM) -> set[int]:
    """Current while the engine generates."""
    found: set[int] = set()
    stack = llm.core.blueprint.model.stack
    assert isinstance(stack, torch.nn.Module)
    hook = stack.register_forward_pre_hook(lambda *_: found.add(_C.current_device()))
    llm.generate(random_prompts(2, 20, seed=1), GREEDY, use_tqdm=False)
    hook.remove()
    return found


def test_engines_take_turns_in_one_thread(engines: tuple[LLM, LLM]) -> None:
    for current in (0, 1):
        _C.set_device(current)
        assert [devices_of_a_step(llm) for llm in engines] == [{0}, {1}]
        assert _C.current_device() == current, "the caller's own is as it was"


def test_an_engine_is_called_from_another_thread(engines: tuple[LLM, LLM]) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.extend([_C.current_device(), *map(devices_of_a_step, engines)]))
    thread.start()
    thread.join()
    assert found == [0, {0}, {1}]


def test_sleep_and_its_end(engines: tuple[LLM, LLM]) -> None:
    _, second = engines
    before = second.generate(random_prompts(1, 20, seed=1), GREEDY, use_tqdm=False)
    _C.set_device(0)
    second.sleep(2)
    second.wake_up()
    after = second.generate(random_prompts(1, 20, seed=1), GREEDY, use_tqdm=False)
    assert after[0].outputs[0].token_ids == before[0].outputs[0].token_ids
    assert _C.current_device() == 0

"""Control verbs: what each does is tested where it belongs; here, how they travel, and the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hardpoint import LLM, AsyncEngine, SamplingParams
from hardpoint.engine.control import ReportMemory, ResetPrefixCache, Verb
from hardpoint.engine.core import EngineCore
from hardpoint.engine.core_verbs import on_core
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
(PROMPT,) = random_prompts(1, 60, seed=3, shortest=60)


@dataclass(frozen=True)
class CountRequests(Verb[int]):
    """How many requests run."""


@dataclass(frozen=True)
class Unheard(Verb[None]):
    """Nobody handles it."""


@on_core.register(CountRequests)
def count_requests(verb: CountRequests, core: EngineCore) -> int:
    return core.scheduler.num_running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_checkpoint(made, "qwen3")
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["here", "own process"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with small_llm(folder, core_process=request.param) as engine:
        yield engine


def cached(llm: LLM) -> int:
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return output.num_cached_tokens


def test_the_prefix_cache_is_reset(llm: LLM) -> None:
    cached(llm)
    assert cached(llm) > 0
    llm.reset_prefix_cache()
    assert cached(llm) == 0
    assert cached(llm) > 0


def test_requests_that_run_are_left_alone(llm: LLM) -> None:
    (wanted,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    stream = llm.stream(PROMPT, GREEDY)
    outputs = [next(stream)]  # of a core elsewhere perhaps the last: it runs on meanwhile
    llm.control(ResetPrefixCache())
    last = [*outputs, *stream][-1]
    assert last.outputs == wanted.outputs
    assert cached(llm) == 0, "what ran before the reset is not found after it"


def test_a_verb_of_ones_own(folder: Path) -> None:
    with small_llm(folder) as llm:
        assert llm.control(CountRequests()) == 0
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        assert llm.control(CountRequests()) == 1
        list(stream)


def test_a_verb_without_a_handler_is_named(llm: LLM) -> None:
    with pytest.raises(NotImplementedError, match="no handler of the verb Unheard"):
        llm.control(Unheard())
    assert llm.control(ReportMemory()).by_tag["weights"] > 0


def test_an_async_engine_takes_them_too(folder: Path) -> None:
    async def found() -> list[int]:
        engine = await asyncio.to_thread(AsyncEngine, str(folder), platform="cpu", load_format="auto")
        try:
            counts = []
            for _ in range(3):
                output = [each async for each in engine.generate(PROMPT, GREEDY)][-1]
                counts.append(output.num_cached_tokens)
                if len(counts) == 2:
                    await engine.reset_prefix_cache()
            return counts
        finally:
            await engine.close()

    first, second, third = asyncio.run(found())
    assert first == third == 0
    assert second > 0

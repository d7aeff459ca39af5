"""A start captures few graphs, an idle engine the others; no request waits for more than one of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import AsyncEngine, SamplingParams
from hardpoint.engine.execution.graphs.late_graphs import first_sizes
from hardpoint.engine.execution.graphs.shapes import StepShape
from hardpoint_cpu.platform import CpuPlatform
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import SMALL, counted, small_llm, until
from tests.support.recorder import RecordableAnyAttention, RecordedCall, RecordedCalls

# The recorder sees torch's operators alone.
RECORDABLE: dict[str, Any] = {"custom_ops": ["none"], "linear_backend": "torch", "attention_backend": "reference"}
SIZES = (1, 2, 4, 8)
FIRST, LATE = {8}, {1, 2, 4}


class Captures(RecordedCalls):
    """Notes the sizes that are captured, and calls ``before`` each of them."""

    token_sizes = (8, 32)

    def __init__(self) -> None:
        super().__init__(SIZES, max_graphs=None)
        self.sizes: list[int] = []
        self.before: Callable[[int], None] = lambda size: None

    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> RecordedCall:
        assert isinstance(key, tuple)
        shape = key[0]
        assert isinstance(shape, StepShape)
        if shape.queries == 1:
            self.before(shape.tokens)
            self.sizes.append(shape.tokens)
        return super().prepare(key, fn, inputs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "llama")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """The CPU's graph engine."""
    engine = Captures()
    monkeypatch.setattr("hardpoint.reference.attention.ReferenceAttention", RecordableAnyAttention)
    monkeypatch.setattr(CpuPlatform, "graph_engine", lambda platform: engine)
    return engine


@pytest.fixture
def idle(checkpoint: tuple[Path, PreTrainedModel], captures: Captures) -> Iterator[AsyncEngine]:
    """An engine whose core runs in a thread, which has idle time."""
    settings = SMALL | RECORDABLE | {"core_process": False, "max_num_seqs": 8}
    engine = AsyncEngine(str(checkpoint[0]), **settings)
    yield engine
    asyncio.run(engine.close())


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def number_left(engine: AsyncEngine) -> float:
    found = asyncio.run(engine.metrics())
    return next(f.samples[0].value for f in found.families if f.name == "hardpoint_graphs_left")


def generate(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    async def last() -> list[int]:
        *_, output = [output async for output in engine.generate(prompt, params)]
        return output.outputs[0].token_ids

    return asyncio.run(last())


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ((), ()),
        ((3,), (3,)),
        ((1, 2, 3, 4, 8, 16, 24, 32, 64, 96, 128, 160, 192, 224, 256), (1, 16, 256)),
        ((128, 256, 512, 2048), (128, 2048)),
    ],
)
def test_few_sizes_come_first_and_the_largest_is_one(sizes: tuple[int, ...], first: tuple[int, ...]) -> None:
    assert first_sizes(sizes) == first


def test_steps_are_padded_until_one_size_was_missed_often(
    checkpoint: tuple[Path, PreTrainedModel], captures: Captures
) -> None:
    """Three requests at a time: the size 4 is captured, alone, after 64 steps. Shorter streams see no capture."""
    folder, model = checkpoint
    prompts = random_prompts(3, 6, seed=2)
    with small_llm(folder, max_num_seqs=8, **RECORDABLE) as llm:
        assert captures.sizes == sorted(FIRST, reverse=True)
        for length, captured, padding in ((20, set(), 5 * 19), (20, set(), 5 * 19), (100, {4}, 0)):
            before, known = counted(llm)["padding_tokens_total"], len(captures.sizes)
            for prompt, output in zip(prompts, llm.generate(prompts, greedy(length), use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
            assert set(captures.sizes[known:]) - FIRST == captured
            assert counted(llm)["padding_tokens_total"] - before >= padding
        before = counted(llm)["padding_tokens_total"]
        llm.generate(prompts, greedy(20), use_tqdm=False)
        assert counted(llm)["padding_tokens_total"] - before < 5 * 19


def test_a_draw_that_lacks_its_graph_replays_anothers_logits(
    checkpoint: tuple[Path, PreTrainedModel], captures: Captures
) -> None:
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    prompts, tokens = random_prompts(2, 6, seed=1), []
    for waits in (False, True):
        with small_llm(checkpoint[0], max_num_seqs=8, wait_for_graphs=waits, **RECORDABLE) as llm:
            known = len(captures.sizes)
            tokens.append([o.outputs[0].token_ids for o in llm.generate(prompts, drawn, use_tqdm=False)])
            assert len(captures.sizes) == known
            assert counted(llm)["graph_replays_total"] == 8
    assert tokens[0] == tokens[1]


def test_an_idle_engine_captures_all(
    checkpoint: tuple[Path, PreTrainedModel], captures: Captures, idle: AsyncEngine
) -> None:
    assert set(captures.sizes[: len(FIRST)]) == FIRST
    until(lambda: number_left(idle) == 0)
    assert set(captures.sizes) == set(SIZES)
    known = len(captures.keys)
    (prompt,) = random_prompts(1, 6, seed=3)
    check_tokens_equal(checkpoint[1], prompt, generate(idle, prompt, greedy(8)))
    assert len(captures.keys) == known, "nothing is captured any more"


def test_what_sleep_dropped_is_captured_again(captures: Captures, idle: AsyncEngine) -> None:
    until(lambda: number_left(idle) == 0)
    captures.sizes.clear()
    asyncio.run(idle.sleep())
    asyncio.run(idle.wake_up())
    assert set(captures.sizes) >= FIRST
    until(lambda: set(captures.sizes) == set(SIZES))


def test_a_request_waits_for_one_capture_at_most(captures: Captures, idle: AsyncEngine) -> None:
    """It comes in the middle of a capture. From then on to its end, nothing else is captured."""
    known = len(captures.keys)
    (prompt,) = random_prompts(1, 6, seed=3)
    requests: list[Any] = []

    def before(size: int) -> None:
        if not requests:
            requests.append(idle.client.add_request(prompt, greedy(9), frozenset()))
            time.sleep(0.3)  # it reaches the core meanwhile

    captures.before = before
    until(lambda: bool(requests) and requests[0].finish_reason is not None)
    assert len(captures.keys) <= known + 2
    until(lambda: number_left(idle) == 0)


def test_a_capture_that_fails_is_one_warning(
    checkpoint: tuple[Path, PreTrainedModel], captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    def before(size: int) -> None:
        if size in LATE:
            raise MemoryError("no room for it")

    captures.before = before
    settings = SMALL | RECORDABLE | {"core_process": False, "max_num_seqs": 8}
    engine = AsyncEngine(str(checkpoint[0]), **settings)
    until(lambda: number_left(engine) == 0)
    (prompt,) = random_prompts(1, 6, seed=3)
    known = len(captures.keys)
    check_tokens_equal(checkpoint[1], prompt, generate(engine, prompt, greedy(8)))
    assert len(captures.keys) == known, "it is not tried again"
    asyncio.run(engine.close())
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == "decode steps of 1 request are not captured: no room for it"


def test_a_start_may_wait_for_all(checkpoint: tuple[Path, PreTrainedModel], captures: Captures) -> None:
    with small_llm(checkpoint[0], max_num_seqs=8, wait_for_graphs=True, **RECORDABLE):
        assert set(captures.sizes) == set(SIZES)

"""Steps in pieces, with attention between them: engines on recorded lists."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.engine.execution.forward import PiecewiseStep
from hardpoint_plugin_api import CaptureGrade, ForwardStep, StepLimits
from hardpoint_sim.attention import SimAttention
from hardpoint_sim.graphs import RecordedLists
from hardpoint_sim.platform import SimPlatform
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import counted, small_llm

PROMPTS = random_prompts(6, 60, seed=1, shortest=30)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1)
CHANGES: dict[str, dict[str, Any]] = {"qwen3": {}, "mistral": {"sliding_window": 13}}


@pytest.fixture(autouse=True)
def no_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are padded to buckets anyway are not prepared in pieces."""
    monkeypatch.setattr(SimPlatform, "step_limits", lambda self: StepLimits())


def check(llm: LLM, model: Any, params: SamplingParams = GREEDY) -> None:
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("family", CHANGES)
def test_prompts(family: str, tmp_path: Path) -> None:
    """Several prompts a step, in chunks, some between decodes; tokens, log-probabilities, and again after a sleep."""
    model = write_checkpoint(tmp_path, family, **CHANGES[family])
    with small_llm(tmp_path, max_num_batched_tokens=48) as llm:
        check(llm, model)
        check(llm, model, SCORED)
        assert counted(llm)["graph_replays_total"] == llm.stats.num_steps
        llm.sleep()
        llm.wake_up()
        check(llm, model)


def test_what_is_larger_runs_eagerly(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3")
    with small_llm(tmp_path, max_num_batched_tokens=256) as llm:
        check(llm, model)
        assert counted(llm)["prefill"] >= 1


def test_decodes_of_too_many_requests_are_replayed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a step counts as a replay, and not as an eager step, too."""
    monkeypatch.setattr(RecordedLists, "batch_sizes", (2,))
    model = write_checkpoint(tmp_path, "qwen3")
    with small_llm(tmp_path, max_num_batched_tokens=48) as llm:
        check(llm, model)
        found = counted(llm)
        assert found["graph_replays_total"] == llm.stats.num_steps
        assert "too_large" not in found


def test_attention_that_cannot_be_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decodes go in pieces, too, whatever the number of requests, and draw as any step does."""
    monkeypatch.setattr(SimAttention, "capture", CaptureGrade.NEVER)
    model = write_checkpoint(tmp_path, "qwen3")
    with caplog.at_level(logging.INFO), small_llm(tmp_path, max_num_batched_tokens=48) as llm:
        check(llm, model)
        assert counted(llm)["graph_replays_total"] == llm.stats.num_steps
    assert "in pieces, or else eagerly: attention backend SimAttention cannot be captured" in caplog.text


def test_a_layer_that_calls_its_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Attention would be part of the recording, with the metadata of padding: such steps run eagerly."""

    monkeypatch.setattr(PiecewiseStep, "interrupt", ForwardStep.interrupt)
    model = write_checkpoint(tmp_path, "qwen3")
    with small_llm(tmp_path, max_num_batched_tokens=48) as llm:
        check(llm, model)
        assert counted(llm)["prefill"] >= 6
    assert "outside of ForwardStep.interrupt" in caplog.text

"""``ctx.limits``: what workspaces are sized by is the most that steps hold, padding included, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hardpoint_cpu.platform import CpuPlatform
from hardpoint_plugin_api import AttentionBatch, AttentionMetadata, EngineLimits, StepLimits
from tests.engine.test_graphs import GREEDY, RECORDABLE
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import small_llm
from tests.support.recorder import RecordableAttention, RecordedCalls


@pytest.mark.parametrize(
    ("settings", "step_limits", "batch_sizes", "expected"),
    [
        ({"enforce_eager": True}, StepLimits(), (4, 8), EngineLimits(40, 5, 96)),
        ({}, StepLimits(), (4, 8, 16), EngineLimits(40, 8, 96)),
        ({}, StepLimits(), None, EngineLimits(40, 5, 96)),
        ({"enforce_eager": True}, StepLimits(token_buckets=(16, 48, 64)), None, EngineLimits(48, 5, 96)),
        ({"enforce_eager": True}, StepLimits(token_buckets=(8, 32)), None, EngineLimits(32, 5, 96)),
        ({"enforce_eager": True}, StepLimits(max_requests=3), None, EngineLimits(40, 3, 96)),
    ],
)
def test_steps_reach_them_and_go_no_further(
    settings: dict[str, Any],
    step_limits: StepLimits,
    batch_sizes: tuple[int, ...] | None,
    expected: EngineLimits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int, int]] = []

    class Watching(RecordableAttention):
        def plan(self, batch: AttentionBatch) -> AttentionMetadata:
            longest = max(batch.seq_lens_host, default=0)
            seen.append((batch.slot_mapping.shape[0], batch.seq_lens.shape[0], longest))
            assert self.ctx.limits == expected
            return super().plan(batch)

    monkeypatch.setattr("hardpoint.reference.attention.ReferenceAttention", Watching)
    monkeypatch.setattr(CpuPlatform, "graph_engine", lambda platform: RecordedCalls(batch_sizes, None))
    monkeypatch.setattr(CpuPlatform, "step_limits", lambda platform: step_limits)
    write_checkpoint(tmp_path, "llama")
    sizes = {"max_num_batched_tokens": 40, "max_num_seqs": 5, "max_model_len": 96}
    with small_llm(tmp_path, **(RECORDABLE | sizes | settings)) as llm:
        llm.generate(random_prompts(7, 90, seed=3), GREEDY, use_tqdm=False)
    tokens, requests, length = (max(found) for found in zip(*seen, strict=True))
    assert tokens == expected.max_tokens
    assert requests == expected.max_sequences
    assert length <= expected.max_model_len

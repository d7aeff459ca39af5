"""Log-probabilities of several ranks on the CPU, through gloo, are those of one under the error model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.layers.norm import Norm
from hardpoint.reference import attention as reference
from hardpoint.reference.torch_distributed import TorchDistributed
from hardpoint_cpu.platform import CpuPlatform
from tests.parallel.ranks import ranks_in_threads
from tests.parallel.teacher_forced import NUM_DECODED, check_alike, scores, true_scores
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm
from tests.support.recorder import RecordableAttention, RecordedCalls, recordable

EVERY_EXPERT: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
"""Each token goes through all: where a choice is close, rounding would decide it."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [("qwen3", {}, {}), ("qwen3_moe", EVERY_EXPERT, {"enable_expert_parallel": True})],
)
def test_two_ranks(family: str, changes: dict[str, Any], settings: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family, **changes)
    with small_llm(tmp_path, dtype=dtype) as llm:
        one = scores(llm)
    with ranks_in_threads(tmp_path, 2, dtype=dtype, **settings) as llm:
        two = scores(llm)
    check_alike(two, one, true_scores(model, dtype_of(dtype)), dtype_of(dtype))


def test_a_sum_that_is_left_out_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the last norm alone."""
    model = write_checkpoint(tmp_path, "qwen3")
    with small_llm(tmp_path, dtype="bfloat16") as llm:
        one = scores(llm)
    take_partial_sums = Norm.take_partial_sums

    def forgetful(norm: Norm, ctx: Context) -> None:
        if norm.path != "norm":
            take_partial_sums(norm, ctx)

    monkeypatch.setattr(Norm, "take_partial_sums", forgetful)
    truth = true_scores(model, torch.bfloat16)
    with ranks_in_threads(tmp_path, 2, dtype="bfloat16") as llm:
        two = scores(llm)
    with pytest.raises(AssertionError, match="prompt 0"):
        check_alike(two, one, truth, torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [("qwen3", {}, {}), ("qwen3_moe", EVERY_EXPERT, {"enable_expert_parallel": True})],
    ids=["tp", "ep"],
)
def test_two_ranks_that_replay(
    family: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes are recorded with their collectives: for experts, the ranks know beforehand how many tokens each has."""
    model = write_checkpoint(tmp_path, family, **changes)
    monkeypatch.setattr(reference, "ReferenceAttention", RecordableAttention)
    monkeypatch.setattr(CpuPlatform, "graph_engine", lambda platform: RecordedCalls((4, 16)))
    monkeypatch.setattr(TorchDistributed, "capturable", True)
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        monkeypatch.setattr(TorchDistributed, name, recordable(getattr(TorchDistributed, name)))
    common: dict[str, Any] = {"dtype": "bfloat16", "custom_ops": ["none"], "linear_backend": "torch"}
    common |= {"attention_backend": "reference", "experts_backend": "grouped"}
    with small_llm(tmp_path, enforce_eager=True, **common) as llm:
        one = scores(llm)
    with ranks_in_threads(tmp_path, 2, **common, **settings, communicator="torch_distributed") as llm:
        two = scores(llm)
        assert llm.metrics.value("hardpoint_graph_replays_total") >= NUM_DECODED - 1
    check_alike(two, one, true_scores(model, torch.bfloat16), torch.bfloat16)

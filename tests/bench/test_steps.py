"""``bench steps`` where ranks share a model: what is measured, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hardpoint.bench import steps as module
from hardpoint.bench.steps import steps
from hardpoint.config import EngineConfig
from hardpoint.engine.execution.ranks import multiprocess_executor
from hardpoint_plugin_api import ConfigError
from tests.parallel.ranks import ThreadsExecutor
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import SMALL

MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LENGTHS: dict[str, Any] = {
    "decodes": "1,2",
    "prefills": "2",
    "input_len": "8",
    "output_len": 33,
    "repeat": 3,
    "seconds": 0.0,
}


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.create(model=str(folder), load_format="random", **(SMALL | settings))


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        pytest.param("qwen3", {}, {}, marks=pytest.mark.nightly),
        ("qwen3_moe", MIXTURE, {"enable_expert_parallel": True}),
    ],
    ids=["tp", "ep"],
)
def test_of_two_ranks(family: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, **changes)
    with patch.object(multiprocess_executor, "MultiprocessExecutor", ThreadsExecutor):
        result = steps(config(tmp_path, tensor_parallel_size=2, **settings), kernels=0, **LENGTHS)
    assert [row.name for row in result.rows] == ["decode, 1 x 8", "decode, 2 x 8", "prefill, 2 x 8", "load"]
    assert all(row.value for row in result.rows)
    assert {row.roofline for row in result.rows} == {None}
    assert not result.roofline


@pytest.mark.nightly
def test_of_two_replicas(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    result = steps(config(tmp_path, data_parallel_size=2), kernels=0, **LENGTHS)
    assert [row.name for row in result.rows] == ["decode, 1 x 8", "decode, 2 x 8", "prefill, 2 x 8", "load"]
    assert all(row.value for row in result.rows)
    assert not result.roofline


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"core_process": True}, "--core-process"),
    ],
    ids=str,
)
def test_kernels_are_those_of_one_rank(settings: dict[str, Any], flags: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"leave out {flags}, or measure it with: hardpoint bench steps without"):
        steps(config(tmp_path, **settings), kernels=3, **LENGTHS)


def test_prompts_of_several_lengths(tmp_path: Path) -> None:
    """Two of 8 tokens and one of 24: the rate is of them all."""
    write_checkpoint(tmp_path, "qwen3")
    sizes = {"decodes": "3", "prefills": "3", "input_len": "mixed:8:24"}
    rows = {row.name: row for row in steps(config(tmp_path), kernels=0, **(LENGTHS | sizes)).rows}
    assert rows.keys() == {"decode, 3 x mixed:8:24", "prefill, 3 x mixed:8:24", "load"}
    assert all(row.value for row in rows.values())


@pytest.mark.parametrize(("kind", "flag"), [("decodes", "--decode"), ("prefills", "--prefill")])
def test_more_than_run_at_once(kind: str, flag: str, tmp_path: Path) -> None:
    """In two lots, a step would seem to take twice as long as it does."""
    with pytest.raises(ConfigError, match=f"{flag} 4: at most 3 sequences run at once; raise --max-num-seqs to 4"):
        steps(config(tmp_path, max_num_seqs=3), kernels=0, **(LENGTHS | {kind: "1,4"}))


def test_tokens_that_add_no_time(tmp_path: Path) -> None:
    """Runs of a single token that took longer than those of all tokens leave nothing to divide by."""
    write_checkpoint(tmp_path, "qwen3")
    with (
        patch.object(module, "generate", lambda llm, data: 1.0 / data[0].num_output_tokens),
        pytest.raises(ConfigError, match="decode, 1 x 8: what --output-len 33 adds"),
    ):
        steps(config(tmp_path), kernels=0, **LENGTHS)


def test_sequences_that_end_while_kernels_are_counted(tmp_path: Path) -> None:
    """43 steps behind a prompt of 8 tokens do not fit in 45."""
    write_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match="--kernels takes 43 steps behind prompts, but sequences end before"):
        steps(config(tmp_path, max_model_len=45), kernels=1, **LENGTHS)
    rows = steps(config(tmp_path, max_model_len=64), kernels=1, **LENGTHS).rows
    assert [row.name for row in rows].count("  step") == 2


def test_short_runs_are_repeated_until_the_time_has_passed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    asked = LENGTHS | {"decodes": "", "prefills": "1,2", "seconds": 1.0}
    with patch.object(module, "generate", lambda llm, data: 0.125 * len(data)):
        rows = {row.name: row.note for row in steps(config(tmp_path), kernels=0, **asked).rows}
    assert rows["prefill, 1 x 8"].endswith("in 8 runs")
    assert rows["prefill, 2 x 8"].endswith("in 4 runs")

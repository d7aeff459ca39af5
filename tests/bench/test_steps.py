"""``bench steps`` where ranks share a model: what is measured, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hardpoint.bench.steps import steps
from hardpoint.config import EngineConfig
from hardpoint.engine import core
from hardpoint_plugin_api import ConfigError
from tests.parallel.ranks import ThreadsExecutor
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import SMALL

MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LENGTHS: dict[str, Any] = {"decodes": "1,2", "prefills": "2", "input_len": "8", "output_len": 4, "repeat": 1}


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.create(model=str(folder), load_format="random", **(SMALL | settings))


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [("qwen3", {}, {}), ("qwen3_moe", MIXTURE, {"enable_expert_parallel": True})],
    ids=["tp", "ep"],
)
def test_of_two_ranks(family: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, **changes)
    with patch.object(core, "MultiprocessExecutor", ThreadsExecutor):
        result = steps(config(tmp_path, tensor_parallel_size=2, **settings), kernels=0, **LENGTHS)
    assert [row.name for row in result.rows] == ["decode, 1 x 8", "decode, 2 x 8", "prefill, 2 x 8", "load"]
    assert all(row.value for row in result.rows)
    assert {row.roofline for row in result.rows} == {None}
    assert not result.roofline


def test_kernels_are_those_of_one_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --core-process and --tensor-parallel-size"):
        steps(config(tmp_path, tensor_parallel_size=2), kernels=3, **LENGTHS)


def test_prompts_of_several_lengths(tmp_path: Path) -> None:
    """Two of 8 tokens and one of 24: the rate is of them all."""
    write_checkpoint(tmp_path, "qwen3")
    sizes = {"decodes": "3", "prefills": "3", "input_len": "mixed:8:24"}
    rows = {row.name: row for row in steps(config(tmp_path), kernels=0, **(LENGTHS | sizes)).rows}
    assert rows.keys() == {"decode, 3 x mixed:8:24", "prefill, 3 x mixed:8:24", "load"}
    assert all(row.value for row in rows.values())

"""``hardpoint tune stages``: blocks of each kind are run, and divided by their time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hardpoint.bench.stage_timing import Kind, block_kinds, divided_by_time
from hardpoint.cli.main import run
from hardpoint.cli.tune import stages as tune_stages
from hardpoint.config import EngineConfig
from hardpoint_plugin_api import ConfigError
from tests.support.checkpoints import DEEPSEEK_V3, write_checkpoint
from tests.support.engines import SMALL


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.create(model=str(folder), **(SMALL | settings))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_each_kind_runs_with_its_weights(quantization: str | None, tmp_path: Path) -> None:
    """The first of six blocks has a feed-forward for every token, the others have experts."""
    changes = DEEPSEEK_V3 | {"num_hidden_layers": 6, "first_k_dense_replace": 1}
    model = write_checkpoint(tmp_path, "deepseek_v3", **changes)
    sizes = [
        sum(x.nbytes for name, x in model.state_dict().items() if f".layers.{number}." in name) for number in range(2)
    ]
    kinds = block_kinds(config_of(tmp_path, pipeline_parallel_size=2, quantization=quantization), 32, 3)
    assert [kind.numbers for kind in kinds] == [(0,), (1, 2, 3, 4, 5)]
    for kind, size in zip(kinds, sizes, strict=True):
        assert kind.seconds > 0
        assert size / 8 < kind.nbytes <= 1.5 * size, "packed, and a matrix of latents once more"


def test_time_decides(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=6)
    config = config_of(tmp_path, pipeline_parallel_size=3)
    slow, quick = Kind((0, 1), 10, 3e-3), Kind((2, 3, 4, 5), 10, 5e-4)
    assert divided_by_time(config, [slow, quick], 3) == (1, 1, 4)
    assert divided_by_time(config, [Kind(tuple(range(6)), 10, 1e-3)], 3) == (2, 2, 2)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=4)
    flags = ["--platform", "cpu", "--kv-cache-memory", "16MiB", "--pipeline-parallel-size", "2", "--tokens", "16"]
    assert run(["tune", "stages", str(tmp_path), *flags, "--rounds", "3"]) == 0
    said = capsys.readouterr().out
    assert "0-3" in said
    assert said.splitlines()[-1] == "--pipeline-parallel-layers 2,2"


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2: blocks are measured on one device"):
        block_kinds(config_of(tmp_path, pipeline_parallel_size=2, tensor_parallel_size=2), 16, 3)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 1: one stage has all blocks"):
        tune_stages.callback(config_of(tmp_path), 16, 3)  # type: ignore[misc]  # click's own type has it optional


def test_more_stages_than_blocks_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    assert run(["tune", "stages", str(tmp_path), "--platform", "cpu", "--pipeline-parallel-size", "3"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "--pipeline-parallel-size 3: the model has 2 blocks, and each stage needs one; take at most 2" in said.err

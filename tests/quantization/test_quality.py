"""``hardpoint bench quality`` and its goals: 8 bits within 0.5 % of the unquantized loss, groups of 4 within 3 %."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hardpoint.bench import quality as quality_bench
from hardpoint.bench.quality import quality
from hardpoint.checkpoint.source import demo_model
from hardpoint.cli.main import run
from hardpoint.config import EngineConfig
from tests.support.checkpoints import write_checkpoint


def test_goals_on_a_part_of_the_text() -> None:
    settings = {"text": None, "dtype": "bfloat16", "platform": "cpu", "cache_dtypes": ("int8",)}
    methods = ("int8", "int4", "mxfp8", "mxfp4", "nvfp4")
    rows = {r.name: r for r in quality("demo", methods, tokens=1024, **settings).rows}  # type: ignore[arg-type]  # click's own options
    plain = rows["bfloat16"].value
    assert 2 < plain < 5
    for name in ("int8", "mxfp8"):
        assert abs(rows[name].value / plain - 1) < 0.005
    assert abs(rows["cache int8"].value / plain - 1) < 0.005
    for name in ("int4", "mxfp4", "nvfp4"):
        assert abs(rows[name].value / plain - 1) < 0.03
    assert rows["int4"].peer == plain
    assert rows["bfloat16"].note == "1,022 tokens scored"


def test_a_checkpoint_is_measured_on_the_tokens_of_the_model(tmp_path: Path) -> None:
    """It needs no tokenizer of its own."""
    model, copy = tmp_path / "model", tmp_path / "copy"
    write_checkpoint(model, "qwen3", vocab_size=4096, max_position_embeddings=1024)
    shutil.copytree(model, copy)
    shutil.copy(demo_model() / "tokenizer.json", model)
    settings = {"text": None, "dtype": "float32", "platform": "cpu", "cache_dtypes": ()}
    result = quality(str(model), (), tokens=512, checkpoints=(str(copy),), **settings)  # type: ignore[arg-type]  # click's own options
    rows = {row.name: row for row in result.rows}
    assert rows["copy"].value == rows["float32"].value == rows["copy"].peer


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "bogus"], "bogus"),
        (["--checkpoint", "missing/model"], "missing/model"),
        (["--kv-cache-dtype", "bogus"], "bogus"),
        (["--method", "int8:x=1"], "x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_asked_wrongly_is_refused_before_anything_is_measured(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[EngineConfig] = []

    def loss(config: EngineConfig, text: str, tokens: int) -> tuple[float, int]:
        measured.append(config)
        return 1.0, 1

    monkeypatch.setattr(quality_bench, "_loss", loss)
    assert run(["bench", "quality", "--method", "int8", "--platform", "cpu", *flags]) == 2
    assert message in capsys.readouterr().err
    assert measured == []


def test_a_text_with_nothing_to_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    assert run(["bench", "quality", "--text", str(tmp_path / "empty.txt"), "--platform", "cpu"]) == 2
    assert "--text has 0 tokens" in capsys.readouterr().err

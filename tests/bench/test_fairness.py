"""The bench of a short request beside a long prompt, on a tiny engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardpoint.cli.main import run
from tests.support.checkpoints import write_checkpoint

SMALL = ["--platform", "cpu", "--cpu.threads", "1", "--kv-cache-memory", "16MiB", "--max-num-batched-tokens", "32"]


def test_a_share_of_each_step_lets_a_short_request_through(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "qwen3", max_position_embeddings=4096)
    flags = ["--long-len", "2000", "--short-len", "8", "--output-len", "2", "--repeat", "1"]
    steps = {}
    for threshold in ("32", "0"):
        result = tmp_path / f"{threshold}.json"
        given = [str(tmp_path / "model"), *SMALL, *flags, "--long-prefill-token-threshold", threshold]
        assert run(["bench", "fairness", *given, "--json", str(result)]) == 0
        rows = {row["name"]: row["value"] for row in json.loads(result.read_text())["rows"]}
        steps[threshold] = rows["short: waits longer by steps of the long prompt"]
        assert rows["all tokens"] > 0
    assert steps["32"] * 4 < steps["0"], "60 steps against one or two: no load of a machine makes up for that"


def test_a_prompt_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "fairness", "demo", *SMALL]) == 2
    assert "--long-len 30000: the engine takes sequences of 2048 tokens" in capsys.readouterr().err

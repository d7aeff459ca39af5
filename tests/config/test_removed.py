"""Names that are gone, of quantization methods and of other engines' variables, answer with what to use instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardpoint.cli.main import run
from hardpoint.config.removed import REMOVED_QUANTIZATION, check_environment
from hardpoint_plugin_api import ConfigError
from tests.support.checkpoints import write_checkpoint

INSTEAD = {"rtn": "use int8 or int4 or fp8", "hqq": "use int4 or awq or gptq", "deepspeedfp": "use fp8"}


def test_every_removed_method_is_tried_here() -> None:
    assert INSTEAD.keys() == REMOVED_QUANTIZATION.keys()


@pytest.mark.parametrize("method", INSTEAD)
def test_a_removed_method_names_its_replacement(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hardpoint_cpu")
    assert run(["explain", "demo", "--platform", "cpu", "--quantization", method]) == 2
    error = capsys.readouterr().err
    assert f"quantization method {method!r} is not supported any more" in error
    assert INSTEAD[method] in error


@pytest.mark.parametrize(
    ("method", "instead"),
    [("rtn", "use fp8"), ("hqq", "use awq or gptq"), ("deepspeedfp", "use fp8")],
)
def test_so_does_a_checkpoint_that_asks_for_it(
    method: str, instead: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what is installed, formats that checkpoints have."""
    pytest.importorskip("hardpoint_cpu")
    write_checkpoint(tmp_path, "llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}))
    assert run(["explain", str(tmp_path), "--platform", "cpu"]) == 2
    error = capsys.readouterr().err
    assert instead in error
    assert "config.json" in error


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_ATTENTION_BACKEND",
        "VLLM_FLASH_ATTN_VERSION",
        "VLLM_USE_TRITON_FLASH_ATTN",
        "VLLM_ROCM_USE_AITER_FLASH_ATTN",
        "SGLANG_ATTENTION_BACKEND",
        "ATTN_BACKEND",
    ],
)
def test_another_engines_choice_of_attention_is_named_with_the_flag(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("hardpoint_cpu")
    monkeypatch.setenv(name, "FLASH_ATTN")
    assert run(["explain", "demo", "--platform", "cpu"]) == 0
    wanted = f"{name} in the environment is another engine's, and has no effect here; use --attention-backend NAME"
    assert [record.getMessage() for record in caplog.records] == [wanted]


def test_a_variable_that_is_named_like_ours_is_an_error() -> None:
    assert check_environment({"HARDPOINT_PORT_8000_TCP": "tcp://10.0.0.1"}, {}) == [], "Kubernetes sets it"
    with pytest.raises(ConfigError, match=r"HARDPOINT_ATTENTION_BACKEND is set .* use --attention-backend"):
        check_environment({"HARDPOINT_ATTENTION_BACKEND": "x"}, {})

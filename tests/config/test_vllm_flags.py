"""Flags of vLLM that a user may type: each is answered with ours, in the same words as in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hardpoint.cli.main import run
from hardpoint.config import EngineConfig
from hardpoint.config.vllm_flags import VLLM_FLAGS
from hardpoint_plugin_api import UnknownNameError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what_each_engine_calls_this.md"


def flags_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The flags that the help of a command lists."""
    assert run([command, "--help"]) == 0
    return set(re.findall(r"(?:^  | / |, )(--?[a-z][a-z0-9.-]*)", capsys.readouterr().out, re.MULTILINE))


def test_what_is_named_instead_exists_and_what_is_refused_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    ours = {command: flags_of(command, capsys) for command in ("serve", "generate", "explain")}
    assert {"--host", "--no-enforce-eager", "-h"} <= ours["serve"]
    named = {flag for text in VLLM_FLAGS.values() for flag in re.findall(r"--[a-z][a-z-]*", text)}
    assert named <= set().union(*ours.values())
    assert not set(VLLM_FLAGS) & (ours["serve"] | ours["generate"])


def test_the_docs_have_the_same_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [flag for flag, text in VLLM_FLAGS.items() if f"| `{flag}` | {text} |" not in page] == []


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (["--gpu-memory-utilization", "0.9"], "use --kv-cache-memory SIZE"),
        (["--gpu_memory_utilization=0.9"], "use --kv-cache-memory SIZE"),
        (["-tp", "2"], "use --tensor-parallel-size NUMBER"),
        (["--no-enable-chunked-prefill"], "prompts are always chunked"),
        (["--trust-remote-code"], "code of a checkpoint is never run"),
    ],
)
def test_a_flag_of_vllm_is_answered_with_ours(
    given: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "--prompt", "a", *given]) == 2
    shown = capsys.readouterr().err
    assert "is vLLM's name: " in shown
    assert instead in shown


def test_a_flag_that_both_have_is_not_blamed_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "demo", "--device", "h200", "--tokeniser", "demo"]) == 2
    shown = capsys.readouterr().err
    assert "--tokeniser" in shown
    assert "is vLLM's name" not in shown


def test_so_is_a_keyword() -> None:
    with pytest.raises(UnknownNameError, match="--gpu-memory-utilization is vLLM's name: use --kv-cache-memory"):
        EngineConfig.create(model="demo", gpu_memory_utilization=0.9)

"""Engines beside each other: real ones, on a tiny checkpoint; what they must agree on, and what is asked wrongly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hardpoint.bench import compare
from hardpoint.bench.peers.contest import Contest, Entrant, Worker
from hardpoint.cli.main import run
from hardpoint_plugin_api import ConfigError
from tests.support.checkpoints import write_checkpoint


@pytest.mark.nightly
def test_ours_and_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "model", "qwen3")
    common = [
        "bench",
        "peers",
        str(tmp_path / "model"),
        "--load",
        "b8",
        "--runs",
        "1",
        "--attempts",
        "1",
        "--quiet",
        "1",
    ]
    assert run([*common, "--threads", "1", "--json", str(tmp_path / "result.json")]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "result.json").read_text())["rows"]}
    assert rows["transformers: logprobs"]["value"] < 0.1
    assert rows["hardpoint: decode, 8 requests"]["value"] > 0
    assert rows["hardpoint: decode, 8 requests"]["peer"] == rows["transformers: decode, 8 requests"]["value"]
    capsys.readouterr()
    assert run([*common, "--tolerance", "0"]) != 0
    assert "disagree by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (["demo"], "'demo' is no folder with a checkpoint"),
        (
            ["{model}", "--engine", "llama"],
            "there is no engine 'llama'; known are hardpoint, llama_cpp, transformers, vllm",
        ),
        (["{model}", "--engine", "vllm", "--engine", "vllm"], "--engine vllm is given twice"),
        (["{model}"], "config.json: 'vocab_size' is missing"),
    ],
)
def test_what_is_asked_wrongly(
    tmp_path: Path, argument: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run(["bench", "peers", *(part.format(model=tmp_path) for part in argument)]) == 2
    assert message in capsys.readouterr().err


def test_an_engine_with_options_of_its_own() -> None:
    entrant = Entrant.parse("llama_cpp@envs/llama/bin/python:type=Q8_0,n_ubatch=64")
    assert (entrant.engine, entrant.python) == ("llama_cpp", "envs/llama/bin/python")
    assert entrant.options == {"type": "Q8_0", "n_ubatch": "64"}
    assert entrant.label != Entrant.parse("llama_cpp@envs/other/bin/python:type=Q8_0,n_ubatch=64").label
    with pytest.raises(ConfigError, match="no engine 'nobody'"):
        Entrant.parse("nobody")


def test_a_config_that_is_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    assert run(["bench", "peers", str(tmp_path)]) == 2
    assert str(tmp_path / "config.json") in capsys.readouterr().err


def script(file: Path, text: str) -> Path:
    """A program that stands for an environment's Python."""
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo no such library >&2; exit 3", "its process ended with exit code 3\nno such library"),
        ("read request; echo hello", "wrote 'hello\\n', which is no answer of a worker"),
    ],
)
def test_an_engine_that_does_not_come_up(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    engine = f"hardpoint@{script(tmp_path / 'python', text)}"
    assert run(["bench", "peers", str(tmp_path), "--engine", engine]) == 2
    error = capsys.readouterr().err
    assert engine in error
    assert message in error


def test_a_setting_of_a_plugin_reaches_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "model", "qwen3")
    assert run(["bench", "peers", str(tmp_path / "model"), "--engine", "hardpoint:cpu.isa=z80"]) == 2
    assert "z80" in capsys.readouterr().err.replace("hardpoint:cpu.isa=z80", "")


def test_a_python_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    assert run(["bench", "peers", str(tmp_path), "--engine", "hardpoint@/nope"]) == 2
    assert "--engine hardpoint@/nope: /nope cannot be started: No such file" in capsys.readouterr().err


class Answering(Worker):
    """A worker that gives these log-probabilities, and takes no process."""

    def __init__(self, entrant: Entrant, logprobs: dict[int, float]) -> None:
        self.entrant, self._logprobs = entrant, logprobs

    def ask(self, **request: Any) -> dict[str, Any]:
        return {"logprobs": list(self._logprobs.items()), "seconds": 1.0, "version": "1"}

    def private_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


def test_engines_of_one_kind_are_told_apart() -> None:
    names = ["vllm@envs/old/bin/python", "vllm@envs/new/bin/python"]
    workers = [Answering(Entrant.parse(name), {5: -1.0, 6: -2.0 - place}) for place, name in enumerate(names)]
    assert Contest(workers, 1.0, 100).disagreement() == dict(zip(names, (0.0, 1.0), strict=True))


@pytest.mark.parametrize("theirs", [{5: math.nan}, {5: -1.0, 6: math.nan}], ids=["all", "one"])
def test_what_is_no_number_agrees_with_nothing(
    theirs: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logprobs = {"hardpoint": {5: -1.0, 6: -2.0}, "vllm": theirs}
    monkeypatch.setattr(compare, "Worker", lambda entrant, _: Answering(entrant, logprobs[entrant.engine]))
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    assert run(["bench", "peers", str(tmp_path), "--engine", "hardpoint", "--engine", "vllm"]) == 2
    assert "vllm and hardpoint disagree by nan nats" in capsys.readouterr().err

"""Routed experts in the answers of a server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers import PreTrainedModel

from hardpoint.checkpoint.source import demo_model
from tests.moe.test_in_engine import write_mixture
from tests.moe.test_routed_experts import routed_by
from tests.support.serving import RunningServer, running_server

ASKS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_routed_experts": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("mixture")
    vocab_size = json.loads((demo_model() / "config.json").read_text())["vocab_size"]
    return folder, write_mixture(folder, "qwen3_moe", vocab_size=vocab_size)


@pytest.fixture(scope="module")
def moe_server(mixture: tuple[Path, PreTrainedModel]) -> Iterator[RunningServer]:
    flags = ("--tokenizer", "demo", "--enable-return-routed-experts", "--served-model-name", "mixture")
    with running_server(str(mixture[0]), *flags) as server:
        yield server


def read(body: dict[str, Any]) -> npt.NDArray[np.int16]:
    assert body["dtype"] == "int16"
    return np.frombuffer(base64.b64decode(body["data"]), "<i2").reshape(body["shape"])


def last_choice(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    lines = server.post(path, body | ASKS | {"stream": True}).text.split("\n\n")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    assert [choice for choice in choices if "routed_experts" in choice] == choices[-1:]
    return choices[-1]  # type: ignore[no-any-return]  # JSON


def test_completions_and_chats(moe_server: RunningServer, mixture: tuple[Path, PreTrainedModel]) -> None:
    chat = {"messages": [{"role": "user", "content": "The whale"}]}
    for path, body in (("/v1/completions", {"prompt": "The whale"}), ("/v1/chat/completions", chat)):
        answer = moe_server.post(path, body | ASKS).json()
        (choice,) = answer["choices"]
        prompt = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
        routed = read(choice["routed_experts"])
        expected = routed_by(mixture[1], (prompt + choice["token_ids"])[:-1])
        np.testing.assert_array_equal(np.sort(routed, -1), expected)
        np.testing.assert_array_equal(read(last_choice(moe_server, path, body)["routed_experts"]), routed)


def test_refusals(moe_server: RunningServer, server: RunningServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "a"} | ASKS)
    assert answer.status_code == 400
    assert "--enable-return-routed-experts" in answer.json()["error"]["message"]
    answer = moe_server.post("/v1/completions", {"prompt": "a", "stop": "b"} | ASKS)
    assert answer.status_code == 400
    assert "stop_token_ids" in answer.json()["error"]["message"]
    answer = moe_server.post("/v1/responses", {"input": "a", "max_output_tokens": 2, "return_routed_experts": True})
    assert answer.headers["x-hardpoint-ignored-fields"] == "return_routed_experts"

"""LoRA adapters as models of a server, loaded at its start and while it runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from hardpoint.checkpoint.source import demo_model
from hardpoint.config import EngineConfig
from hardpoint.server.host import EngineHost
from hardpoint.server.service import Service
from hardpoint.server.settings import ServerSettings
from hardpoint_plugin_api import ConfigError
from tests.support.checkpoints import check_tokens_equal
from tests.support.lora import ATTENTION, write_adapter
from tests.support.serving import RunningServer, running_server

PROMPT = "The whale"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """Adapters of the demo model: their folders, and the models with each merged in."""
    folder = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype="float32").eval()
    kinds: dict[str, dict[str, Any]] = {"first": {}, "second": {"seed": 2, "targets": ATTENTION}, "high": {"rank": 9}}
    made = {name: (folder / name, write_adapter(folder / name, model, **kind)) for name, kind in kinds.items()}
    return {"demo": (demo_model(), model), **made}


@pytest.fixture(scope="module")
def server(models: dict[str, tuple[Path, PreTrainedModel]]) -> Iterator[RunningServer]:
    flags = ("--dtype", "float32", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    modules = ("--lora-modules", f"first={models['first'][0]}")
    with running_server(*flags, *modules, "--allow-lora-updating") as running:
        yield running


def load(server: RunningServer, name: str, folder: Path) -> Any:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


def test_adapters_are_models(server: RunningServer, models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    assert load(server, "second", models["second"][0]).status_code == 200
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        listed = {model.id: model.model_dump() for model in client.models.list()}
        assert list(listed) == ["demo", "first", "second"]
        assert (listed["demo"]["parent"], listed["second"]["parent"]) == (None, "demo")
        assert listed["second"]["root"] == str(models["second"][0])
        for name in listed:
            answer = client.completions.create(
                model=name, prompt=PROMPT, temperature=0, max_tokens=12, extra_body={"return_token_ids": True}
            )
            assert answer.model == name
            tokens = answer.choices[0].model_dump()["token_ids"]
            check_tokens_equal(models[name][1], ids, tokens)
        chats = {
            name: client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=12
            )
            for name in listed
        }
        assert len({chat.choices[0].message.content for chat in chats.values()}) == 3
        with pytest.raises(
            openai.NotFoundError, match="'third' is not served here; there is 'demo', 'first', 'second'"
        ):
            client.completions.create(model="third", prompt=PROMPT)
    for path, text in (
        ("/v1/messages", {"max_tokens": 12, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}),
        ("/v1/responses", {"max_output_tokens": 12, "input": PROMPT, "temperature": 0}),
    ):
        answers = [server.post(path, {"model": name, **text}).json() for name in ("demo", "second")]
        assert [answer["model"] for answer in answers] == ["demo", "second"]
        assert len({str(answer.get("content") or answer["output"][0]["content"]) for answer in answers}) == 2
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 200
    assert server.post("/v1/completions", {"model": "second", "prompt": PROMPT}).status_code == 404


def test_wrong_adapters_are_refused(server: RunningServer, models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    def said(answer: Any) -> tuple[int, str]:
        return answer.status_code, answer.json()["error"]["message"]

    status, message = said(load(server, "high", models["high"][0]))
    assert status == 400
    assert "rank 9" in message
    assert "--max-lora-rank 9" in message
    assert said(load(server, "first", models["first"][0]))[0] == 400
    assert said(load(server, "demo", models["first"][0]))[0] == 400
    assert said(load(server, "x", Path("/nowhere/at/all")))[0] == 400
    status, message = said(server.post("/v1/unload_lora_adapter", {"lora_name": "second"}))
    assert status == 404
    assert "loaded: 'first'" in message
    assert load(server, "second", models["second"][0]).status_code == 200
    status, message = said(load(server, "third", models["second"][0]))
    assert status == 400
    assert "unload one" in message
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 200


def test_an_engine_that_is_built_again_has_the_same_adapters(
    server: RunningServer, models: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    assert load(server, "second", models["second"][0]).status_code == 200
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "first"}).status_code == 200
    asked = {"model": "second", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    before = server.post("/v1/completions", asked).json()["choices"]
    os.kill(server.engine_pids[0], signal.SIGKILL)
    assert server.post("/v1/completions", asked).json()["choices"] == before
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["demo", "second"]
    assert load(server, "first", models["first"][0]).status_code == 200


def test_clients_load_nothing_unless_they_may() -> None:
    with running_server("--enable-lora") as server:
        answer = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"})
        assert answer.status_code == 403
        assert "--allow-lora-updating" in answer.json()["error"]["message"]


def test_an_adapter_of_the_models_name_is_refused() -> None:
    modules: dict[str, Any] = {"enable_lora": True, "lora_modules": "sql=adapters/sql"}
    said = r"^--lora-modules sql=adapters/sql: the model itself is served as 'sql'; give the adapter another"
    for model, served in (("sql", ()), ("demo", ("other", "sql"))):
        config = EngineConfig.create(model=model, **modules)
        with pytest.raises(ConfigError, match=said):
            Service(EngineHost(config), ServerSettings(served_model_names=served))
    Service(EngineHost(EngineConfig.create(model="sql", **modules)), ServerSettings(served_model_names=("other",)))

"""How a server is reached and watched: TLS, a Unix socket, below a proxy's path; profiles, settings, vLLM's metrics."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from hardpoint import LLM
from hardpoint.cli.main import cli
from hardpoint.server.settings import ServerSettings, TlsSettings
from hardpoint_plugin_api import ConfigError
from tests.support.forked import ForkedProgram
from tests.support.serving import RunningServer, running_server
from tests.support.traces import trace_events

KEY = {"authorization": "Bearer operator"}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}

LATENCIES = ["e2e_request_latency", "inter_token_latency", "time_to_first_token"]
VLLM_BOARD = [f"{name}_seconds_{part}" for name in LATENCIES for part in ("bucket", "sum", "count")]
VLLM_BOARD += ["prompt_tokens_total", "generation_tokens_total", "request_success_total"]
VLLM_BOARD += ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
VLLM_BOARD += ["request_prompt_tokens_bucket", "request_generation_tokens_bucket"]
VLLM_BOARD += [f"request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode")]
VLLM_BOARD += ["request_max_num_generation_tokens_sum"]
"""The metrics that vLLM's dashboard asks for, each with the label model_name (its repository, commit 4b5c627c,
examples/observability/prometheus_grafana/grafana.json)."""


def refusal(*flags: str) -> str:
    """The error of a server that does not start with ``flags``."""
    program = ForkedProgram("serve", "demo", "--port", "0", *flags)
    with program.stderr:
        said = program.stderr.read()
    assert program.wait(120)
    return said


@dataclass
class Behind:
    """A server on a Unix socket below ``/llm``, and the folder of its profiles."""

    server: RunningServer
    socket: Path
    profiles: Path


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    folder = tmp_path_factory.mktemp("s")
    socket, profiles = folder / "socket", folder / "profiles"
    flags = ["--uds", str(socket), "--root-path", "/llm", "--metrics-names", "vllm", "--log-requests"]
    flags += ["--api-key", "operator", "--allow-engine-control", "--profile-folder", str(profiles)]
    with running_server(*flags, transport=httpx.HTTPTransport(uds=str(socket)), headers=KEY) as server:
        yield Behind(server, socket, profiles)


def test_a_unix_socket_below_a_path(behind: Behind) -> None:
    """Whether the proxy takes its path off or not."""
    server = behind.server
    assert server.url == f"unix:{behind.socket}"
    for prefix in ("", "/llm"):
        answer = server.post(f"{prefix}/v1/chat/completions", CHAT)
        assert answer.json()["usage"]["completion_tokens"] == 4
        unknown = server.post(f"{prefix}/v1/messages", {"model": "x", "max_tokens": 1, "messages": CHAT["messages"]})
        assert unknown.json()["type"] == "error", "Anthropic's form of errors, also below the path"
        assert server.get(f"{prefix}/").headers["content-type"].startswith("text/html")
    assert server.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert server.get("/llm/llm/health").status_code == 404
    with httpx.Client(transport=server.options["transport"]) as stranger:
        assert stranger.get("http://localhost/llm/health").status_code == 200
        assert stranger.get("http://localhost/llm/v1/models").status_code == 401


def test_a_socket_that_another_server_has(behind: Behind) -> None:
    assert "another server listens there" in refusal("--uds", str(behind.socket))
    assert behind.server.get("/health").status_code == 200


def test_settings_and_tokenizer(behind: Behind) -> None:
    info = behind.server.get("/server_info").json()
    assert info["config"]["model"] == "demo"
    assert (info["model_names"], info["max_model_len"]) == (["demo"], 2048)
    with LLM("demo", platform="cpu") as llm:
        about = behind.server.get("/tokenizer_info").json()
        assert about["eos_token"] == llm.tokenizer.special_tokens["eos_token"]
        assert "<|im_start|>" in about["chat_template"]


def test_profiles(behind: Behind) -> None:
    assert behind.server.post("/stop_profile", None).status_code == 409, "none is taken"
    assert behind.server.post("/start_profile", None).status_code == 200
    assert behind.server.post("/start_profile", None).status_code == 409
    assert behind.server.post("/v1/chat/completions", CHAT).status_code == 200
    assert behind.server.post("/stop_profile", None).status_code == 200
    assert "hardpoint.step" in {event["name"] for event in trace_events(behind.profiles)}


def test_every_metric_that_vllms_dashboard_asks_for(behind: Behind) -> None:
    for body in (CHAT, {**CHAT, "n": 2, "stream": True}):
        assert behind.server.post("/v1/chat/completions", body).status_code == 200
    behind.server.wait_until_idle()
    text = behind.server.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    of_model = {sample.name for sample in samples if sample.labels.get("model_name") == "demo"}
    assert {f"vllm:{name}" for name in VLLM_BOARD} <= of_model

    def value(name: str, **labels: str) -> float:
        (found,) = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
        return found

    def both(own: str, theirs: str) -> float:
        values = value(f"hardpoint_{own}", model="demo"), value(f"vllm:{theirs}", model_name="demo")
        assert values[0] == values[1] > 0
        return values[0]

    count = both("request_queue_seconds_count", "request_queue_time_seconds_count")
    assert count == both("request_seconds_count", "e2e_request_latency_seconds_count")
    parts = [value(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(value("vllm:e2e_request_latency_seconds_sum"), rel=0.2)
    assert both("request_longest_completion_tokens_sum", "request_max_num_generation_tokens_sum") == 4 * count
    assert value("vllm:request_success_total", finished_reason="length") == count + 1
    assert value("vllm:kv_cache_usage_perc") == 0


def test_metrics_have_vllms_names_only_where_asked_for(server: RunningServer) -> None:
    assert "vllm:" not in server.get("/metrics").text


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def test_tls(authority: trustme.CA, tmp_path: Path) -> None:
    """OpenAI's client over an encrypted connection, with the certificate that the server wants of it."""
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trusting, known = ssl.create_default_context(), ssl.create_default_context()
    for context in (trusting, known):
        authority.configure_trust(context)
    authority.issue_cert("client.example").configure_cert(known)
    flags = ["--ssl-certfile", str(tmp_path / "server.pem"), "--ssl-ca-certs", str(tmp_path / "ca.pem")]
    with running_server(*flags, "--ssl-cert-reqs", "2", verify=known) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=trusting) as stranger, pytest.raises(httpx.TransportError):
            stranger.get(server.url + "/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(verify=known)
        ) as client:
            stream = client.chat.completions.create(**CHAT, stream=True)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert server.stop() == 0


def test_what_is_wrong_with_flags_is_said(authority: trustme.CA, tmp_path: Path) -> None:
    missing, ca = tmp_path / "none.pem", tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    pair = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pair)
    for tls, words in (
        (TlsSettings(missing), "--ssl-certfile .*none.pem cannot be used: No such file"),
        (TlsSettings(ca), "--ssl-certfile .*ca.pem cannot be used"),
        (TlsSettings(pair, cert_reqs=2), "--ssl-cert-reqs needs --ssl-ca-certs"),
        (TlsSettings(pair, ca_certs=missing), "--ssl-ca-certs .*none.pem cannot be used"),
        (TlsSettings(pair, ciphers="NONE-OF-THESE"), "--ssl-ciphers NONE-OF-THESE"),
    ):
        with pytest.raises(ConfigError, match=words):
            tls.context()
    for wrong in ("llm", "/llm/", "/", "/a b"):
        with pytest.raises(ConfigError, match="is no path"):
            ServerSettings(root_path=wrong)
    with pytest.raises(ConfigError, match="give the whole URL"):
        ServerSettings(otlp_traces_endpoint="127.0.0.1:4317")
    with pytest.raises(ConfigError, match="--profile-folder needs --allow-engine-control"):
        ServerSettings(profile_folder=tmp_path)
    with pytest.raises(ConfigError, match="--ssl-keyfile needs --ssl-certfile"):
        cli(["serve", "--ssl-keyfile", "x"], standalone_mode=False)
    assert "/v1/models is a path of the server itself" in refusal("--root-path", "/v1")

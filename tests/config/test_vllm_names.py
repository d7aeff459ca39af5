"""Names of vLLM: command lines and keywords as its users write them run here, or are answered with ours."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hardpoint.cli.main import run
from hardpoint.cli.serve import serve
from hardpoint.config import EngineArgs, EngineConfig
from hardpoint.config.vllm_names import vllm_names
from hardpoint.server.openai.chat import ChatRequest
from hardpoint.server.openai.completions import CompletionRequest
from hardpoint.server.openai.responses import ResponsesRequest
from hardpoint.server.vllm_fields import ANSWERS
from hardpoint_plugin_api import ConfigError

ROOT = Path(__file__).resolve().parents[2]

INVOCATIONS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": {"model": "Qwen/Qwen3-8B"},
    "M -tp 4": {"tensor_parallel_size": 4},
    "M -tp=4 -pp 2": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
    "M --tensor-parallel-size 8 --enable-expert-parallel": {"tensor_parallel_size": 8, "enable_expert_parallel": True},
    "M --tensor_parallel_size 2 --max_model_len 4096": {"tensor_parallel_size": 2, "max_model_len": 4096},
    "M --gpu-memory-utilization 0.95": {"gpu_memory_utilization": 0.95},
    "M --gpu-memory-utilization=0.8 --max-model-len=32768": {"gpu_memory_utilization": 0.8, "max_model_len": 32768},
    "M --dtype half": {"dtype": "float16"},
    "M --dtype bfloat16 --enforce-eager": {"dtype": "bfloat16", "enforce_eager": True},
    "M --max-num-seqs 64 --max-num-batched-tokens 8192": {"max_num_seqs": 64, "max_num_batched_tokens": 8192},
    "M --enable-auto-tool-choice --tool-call-parser hermes": {"tool_parser": "hermes"},
    "M --reasoning-parser deepseek_r1": {"reasoning_parser": "deepseek_r1"},
    "M --quantization fp8 --kv-cache-dtype fp8": {"quantization": "fp8"},
    "M -q gptq": {"quantization": "gptq"},
    "M --revision abc123": {"hub_revision": "abc123"},
    "M --load-format dummy": {"load_format": "random"},
    "M --load-format safetensors": {"load_format": "auto"},
    "M --no-enable-prefix-caching": {"enable_prefix_caching": False},
    "M --enable-prefix-caching --enable-chunked-prefill": {"enable_prefix_caching": True},
    "M --swap-space 16 --disable-log-stats": {},
    "M --disable-log-requests --disable-uvicorn-access-log": {},
    "M --served-model-name gpt-4 --port 8080 --host 0.0.0.0 --api-key token": {},
    "M --distributed-executor-backend mp": {"executor": "mp"},
    "M --distributed-executor-backend uni": {"executor": "inproc"},
    'M --speculative-config \'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\'': {
        "speculative_method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
    'M --compilation-config \'{"cudagraph_mode": "NONE"}\'': {"enforce_eager": True},
    'M --compilation-config \'{"custom_ops": ["none", "+rms_norm"]}\'': {"custom_ops": ("none", "+rms_norm")},
    "M -O3": {"enforce_eager": False},
    "M -O0": {"enforce_eager": True},
    "M --optimization-level 2": {"enforce_eager": False},
    "M --enable-lora --max-lora-rank 64 --max-loras 2": {"enable_lora": True, "max_lora_rank": 64},
    "M --block-size 32 --seed 7": {"block_size": 32, "seed": 7},
    "M --chat-template template.jinja": {"chat_template": "template.jinja"},
    "M --tokenizer demo --tokenizer-mode auto": {"tokenizer": "demo"},
    "M --skip-tokenizer-init": {"skip_tokenizer_init": True},
    "M --download-dir /models --max-logprobs 50": {"download_dir": "/models", "max_logprobs": 50},
    "M --kv-cache-memory-bytes 4294967296": {"kv_cache_memory": 2**32},
    "M --long-prefill-token-threshold 512 --max-long-partial-prefills 2": {
        "long_prefill_token_threshold": 512,
        "max_num_partial_prefills": 2,
    },
    "M --scheduling-policy priority --async-scheduling": {"async_scheduling": True},
    "M --task generate --runner generate": {},
    "M --moe-backend triton": {"experts_backend": "triton"},
    "M --data-parallel-size 1 --nnodes 1 --api-server-count 1": {},
    "M --generation-config auto --model-impl auto --config-format hf": {},
    "M --no-trust-remote-code --cpu-offload-gb 0": {},
    "M --device cpu": {"platform": "cpu"},
    "M --attention-backend triton": {"attention_backend": "triton"},
    "M --enable-sleep-mode --max-seq-len-to-capture 8192": {},
    "M --num-lookahead-slots 0 --show-hidden-metrics-for-version 0.30": {},
    "M -n 1 -r 0 --master-addr 127.0.0.1 --master-port 29501": {},
    "M -ep --spec-method ngram --spec-tokens 3": {
        "enable_expert_parallel": True,
        "speculative_method": "ngram",
        "num_speculative_tokens": 3,
    },
    "M --mm-processor-cache-gb 0 --skip-mm-profiling --safetensors-load-strategy lazy": {},
}
"""Arguments of ``vllm serve``, and the settings that they mean here."""


@pytest.mark.parametrize(("given", "expected"), INVOCATIONS.items(), ids=list(INVOCATIONS))
def test_a_command_line_of_vllm_runs(given: str, expected: dict[str, Any]) -> None:
    config: EngineConfig = serve.make_context("serve", shlex.split(given)).params["config"]
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("given", "answers"),
    [
        ("--trust-remote-code", ["--trust-remote-code is vLLM's name: code of a checkpoint is never run"]),
        ("--data-parallel-backend ray", ["start a server on each host"]),
        ("--cpu-offload-gb 10", ["--quantization makes them smaller"]),
        ("--hf-overrides {}", ["edit config.json in a copy"]),
        ("--task embed", ["embeddings are not supported"]),
        ("--shutdown-timeout 5 --middleware x", ["use --shutdown-deadline SECONDS", "put a proxy in front"]),
        ("--logprobs-mode processed_logits", ["before sampling"]),
        ("--master-addr 10.0.0.1 --node-rank 1", ["--master-addr is vLLM's name: start a Ray", "--node-rank"]),
        ("--weight-transfer-config {} -asc 4", ["use update_weights of LLM", "use --api-server-count N"]),
        ("--no-enable-chunked-prefill", ["raise --max-num-batched-tokens"]),
        ('--speculative-config {"method":"eagle"}', ["the method must be ngram, got 'eagle'"]),
        ("--speculative-config [", ["it is not JSON"]),
        ('--compilation-config {"splitting_ops":[]}', ["splitting_ops has no counterpart"]),
        (
            "--swap-spce 4 --tensor-paralel-size 2 --trust_remote_code",
            ["--swap-spce", "mean --tensor-parallel-size?", "never run"],
        ),
    ],
)
def test_other_flags_are_answered_together(given: str, answers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "demo", *given.split()]) == 2
    shown = capsys.readouterr().err
    assert [answer for answer in answers if answer not in shown] == []


def test_a_flag_without_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    serve.make_context("serve", ["demo", "--swap-space", "4"])
    assert [record.message for record in caplog.records] == [
        "--swap-space has no effect: a preempted request is computed again"
    ]


def test_a_value_that_looks_like_a_flag_stays_a_value() -> None:
    config = serve.make_context("serve", ["demo", "--served-model-name", "--swap-space", "--block-size", "16"])
    assert config.params["served_model_names"] == ("--swap-space",)


def test_keywords_of_python() -> None:
    config = EngineArgs(
        "demo",
        tensor_parallel_size=1,
        trust_remote_code=False,
        swap_space=4,
        distributed_executor_backend=None,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        load_format="dummy",
    ).create_engine_config()
    assert (config.speculative_method, config.num_speculative_tokens, config.load_format) == ("ngram", 2, "random")


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"trust_remote_code": True}, "trust_remote_code is vLLM's name: code of a checkpoint is never run"),
        ({"revision": "a", "hub_revision": "b"}, "revision = 'a' and hub_revision = 'b' contradict"),
        ({"gpu_memory_utilization": 0.5, "kv_cache_memory": 4096}, "both size the KV cache; keep one"),
        ({"swap_spaces": 4, "blocksize": 1}, "block_size"),
    ],
)
def test_keywords_that_are_refused(given: dict[str, Any], answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        EngineConfig.create(model="demo", **given)


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("tool-call-parser = 'hermes'\nswap_space = 4\nrevision = 'main'\n")
    config = serve.make_context("serve", ["M/M", "--config", str(file)]).params["config"]
    assert (config.tool_parser, config.hub_revision) == ("hermes", "main")


def test_the_flags_that_answers_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    ours: set[str] = set()
    for command in ("serve", "generate"):
        assert run([command, "--help"]) == 0
        ours |= set(re.findall(r"(?:^  | / |, )(--?[a-z][a-z0-9.-]*)", capsys.readouterr().out, re.MULTILINE))
    named = {flag for name in vllm_names().values() for flag in re.findall(r"--[a-z][a-z-]*", name.answer)}
    assert named <= ours
    assert {name.setting for name in vllm_names().values() if name.setting} <= set(EngineConfig.model_fields)


def test_the_page_has_the_table() -> None:
    spec = importlib.util.spec_from_file_location("write_vllm_names", ROOT / "scripts" / "write_vllm_names.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tables = (script.table(), script.param_table(), script.field_table())
    assert all(table in script.PAGE.read_text(encoding="utf-8") for table in tables), "run scripts/write_vllm_names.py"
    assert json.dumps(tables).isprintable()


def test_fields_that_are_answered_are_missing_somewhere() -> None:
    bodies = [set(body.model_fields) for body in (CompletionRequest, ChatRequest, ResponsesRequest)]
    assert [field for field in ANSWERS if all(field in names for names in bodies)] == []

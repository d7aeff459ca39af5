"""Programs that are clients, each tried: ``python foreign_programs.py NAME URL``.

Run by tests/server/test_foreign_clients.py, in an environment with that program and without Hardpoint.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DEMO_MODEL = Path(__file__).parents[2] / "core/src/hardpoint/demo_model"
"""The folder of the model that is served: programs read its tokenizer."""


def llm(url: str) -> None:
    """Simon Willison's command line, with and without a stream."""
    with tempfile.TemporaryDirectory() as folder:
        entry = f"- model_id: demo\n  model_name: demo\n  api_base: {url}/v1\n"
        Path(folder, "extra-openai-models.yaml").write_text(entry, encoding="utf-8")
        for flags in ((), ("--no-stream",)):
            options = ["-m", "demo", *flags, "-o", "max_tokens", "8", "Tell me of the sea."]
            assert _program("llm", *options, LLM_USER_PATH=folder, OPENAI_API_KEY="none").strip()


def lm_eval(url: str) -> None:
    """Likelihoods of answers, and answers, with the server's own tokenizer by /tokenizer_info."""
    with tempfile.TemporaryDirectory() as folder:
        row = {"question": "The whale swam in the", "choices": [" sea", " q7#"], "answer": 0}
        Path(folder, "sea.jsonl").write_text(f"{json.dumps(row)}\n" * 3, encoding="utf-8")
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{folder}/sea.jsonl"}}}
        common = data | {"test_split": "test", "doc_to_text": "{{question}}"}
        tasks: list[dict[str, Any]] = [
            common
            | {"task": "chosen", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
            | {"doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}]},
            common
            | {"task": "written", "output_type": "generate_until", "doc_to_target": "{{choices[0]}}"}
            | {"generation_kwargs": {"max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}]},
        ]
        for task in tasks:  # JSON is YAML
            Path(folder, f"{task['task']}.yaml").write_text(json.dumps(task), encoding="utf-8")
        server = f"model=demo,base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=2"
        command = ["run", "--model", "local-completions", "--model_args", server, "--tasks", "chosen,written"]
        said = _program("lm_eval", *command, "--include_path", folder)
        assert re.search(r"\|chosen .*\|acc +\|.*\| *1\|", said), said
        assert "|written" in said


def guidellm(url: str) -> None:
    """Six requests, two at a time."""
    with tempfile.TemporaryDirectory() as folder:
        _program(
            "guidellm",
            "run",
            "--backend",
            f"kind=openai_http,target={url},model=demo",
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
            *("--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}"),
            *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
            *("--output", f"kind=json,path={folder}/report.json", "--disable-console-interactive"),
        )
        (run,) = json.loads(Path(folder, "report.json").read_text(encoding="utf-8"))["benchmarks"]
        totals = run["metrics"]["request_totals"]
        assert (totals["successful"], totals["total"]) == (6, 6)


def aiperf(url: str) -> None:
    """Six streamed chats, two at a time, with the usage that the server reports."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", "demo", "--url", url, "--endpoint-type", "chat", "--streaming", "--ui", "none"]
        lengths = ["--isl", "16", "--osl", "8", "--request-count", "6", "--concurrency", "2"]
        more = ["--tokenizer", str(DEMO_MODEL), "--artifact-dir", folder, "--use-server-token-count"]
        _program("aiperf", "profile", *flags, *lengths, *more)
        report = json.loads(Path(folder, "profile_export_aiperf.json").read_text(encoding="utf-8"))
        assert report["request_count"]["avg"] == 6
        assert not report.get("error_request_count", {}).get("avg")


def _program(name: str, *flags: str, **variables: str) -> str:
    """The output of a program of this environment, with more environment ``variables``; it must succeed."""
    command = [str(Path(sys.executable).parent / name), *flags]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


CLIENTS = {
    "llm": llm,
    "lm_eval[api]": lm_eval,
    "guidellm": guidellm,
    "aiperf": aiperf,
}
"""The clients by what pip installs."""

if __name__ == "__main__":
    CLIENTS[sys.argv[1]](sys.argv[2])

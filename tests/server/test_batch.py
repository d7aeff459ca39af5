"""Batch files: each line is answered by its custom_id, as the server answers it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hardpoint.cli.main import run

FLAGS = ["--platform", "cpu", "--cpu.threads", "1", "--kv-cache-memory", "16MiB", "--no-core-process"]


def line(custom_id: object, url: str = "/v1/completions", method: str = "POST", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def batch(tmp_path: Path, *lines: str, flags: tuple[str, ...] = ()) -> tuple[int, dict[str | None, Any]]:
    """The exit code and the answers, by custom_id."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    code = run(["run-batch", "demo", *FLAGS, "-i", str(source), "-o", str(target), *flags])
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    return code, {answer["custom_id"]: answer for answer in answers}


def test_each_request_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    chat = [{"role": "user", "content": "Hello"}]
    code, answers = batch(
        tmp_path,
        line("a", prompt="It is", **greedy),
        "",
        line("b", prompt=["It is", "The"], model="m", **greedy),
        line("c", "/v1/chat/completions", messages=chat, **greedy),
        line("d", "/v1/messages", messages=chat, model="m", max_tokens=4),
        flags=("--served-model-name", "m", "--max-concurrent-requests", "2"),
    )
    assert code == 0
    assert "4 requests, 0 with an error" in capsys.readouterr().err
    assert set(answers) == set("abcd")
    assert all(each["error"] is None and each["response"]["status_code"] == 200 for each in answers.values())
    assert len({each["id"] for each in answers.values()}) == len(
        {a["response"]["request_id"] for a in answers.values()}
    )
    bodies = {name: each["response"]["body"] for name, each in answers.items()}
    assert bodies["b"]["choices"][0]["text"] == bodies["a"]["choices"][0]["text"]
    assert bodies["a"]["model"] == "m"
    assert bodies["c"]["usage"]["completion_tokens"] == 4
    assert bodies["d"]["type"] == "message"


def test_bad_requests_are_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    code, answers = batch(
        tmp_path,
        "{",
        line("url", "/v1/embeddings", input="a"),
        line("method", method="GET", prompt="a"),
        line("stream", prompt="a", stream=True),
        line("range", prompt="a", temperature=-1),
        line("model", prompt="a", model="other"),
        line("good", prompt="a", max_tokens=1),
    )
    assert code == 1
    assert {name: (a["error"] or {}).get("message") for name, a in answers.items() if a["response"] is None} == {
        None: answers[None]["error"]["message"],
        "url": "method and url must be POST and one of /v1/chat/completions, /v1/completions, /v1/responses, "
        "/v1/messages",
        "method": "method and url must be POST and one of /v1/chat/completions, /v1/completions, /v1/responses, "
        "/v1/messages",
        "stream": "body.stream: answers of a batch are whole; leave it out",
    }
    assert "not JSON" in answers[None]["error"]["message"]
    statuses = {name: answers[name]["response"]["status_code"] for name in ("range", "model", "good")}
    assert statuses == {"range": 400, "model": 404, "good": 200}
    assert "temperature" in answers["range"]["response"]["body"]["error"]["message"]


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run-batch", "demo", "-i", "no/such/file"]) == 2
    assert "--input-file no/such/file: No such file or directory" in capsys.readouterr().err

"""The stand-in for the engine's core: as many tokens as requests ask for, at the rate that is asked for."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest

from hardpoint.bench.token_source import serve_tokens
from hardpoint.cli.main import run
from hardpoint.config import EngineConfig
from hardpoint.engine.processes.calls import Answer, Stop
from hardpoint.engine.remote.messages import Abort, Add, Advanced, Command, Ready, Report, StartFailed
from hardpoint.engine.requests import AdmittedRequest, RequestProgress
from hardpoint.engine.sampling_params import SamplingParams


def asked(number: int, num_tokens: int) -> AdmittedRequest:
    prompt = (5, 6, 7)
    return AdmittedRequest(number, prompt, SamplingParams(), 0, frozenset(), len(prompt) + num_tokens)


def reports_of(*commands: Command, until: int) -> list[Report | Answer]:
    """The reports of the stand-in until ``until`` requests have ended."""
    waiting: SimpleQueue[Command] = SimpleQueue()
    sent: SimpleQueue[Report | Answer] = SimpleQueue()
    config = EngineConfig.create(model="demo")
    thread = threading.Thread(target=partial(serve_tokens, config, waiting, sent.put, rate=1e6))
    thread.start()
    for command in commands:
        waiting.put(command)
    reports, ended = list[Report | Answer](), 0
    while ended < until:
        reports.append(report := sent.get(timeout=10))
        if isinstance(report, Advanced):
            ended += sum(delta.finish_reason is not None for delta in report.news.deltas)
    waiting.put(Stop())
    thread.join(10)
    assert not thread.is_alive()
    return reports


def test_it_repeats_prompts() -> None:
    commands: list[Command] = [Add.of(asked(1, 4)), Add.of(asked(2, 2)), Add.of(asked(3, 10**6)), Abort(3)]
    ready, *rest = reports_of(*commands, until=3)
    assert isinstance(ready, Ready)
    assert ready.facts.vocab_size > 1000
    seen = {number: RequestProgress(asked(number, 10**6)) for number in (1, 2, 3)}
    still_open = dict(seen)
    for report in rest:
        assert isinstance(report, Advanced)
        report.news.apply(still_open)
    assert (seen[1].output_token_ids, seen[2].output_token_ids) == ([5, 6, 7, 5], [5, 6])
    assert [seen[number].finish_reason for number in (1, 2, 3)] == ["length", "length", "abort"]


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    sent: SimpleQueue[Report | Answer] = SimpleQueue()
    serve_tokens(EngineConfig.create(model=str(tmp_path)), SimpleQueue(), sent.put, rate=1.0)
    assert isinstance(sent.get_nowait(), StartFailed)


def test_a_server_elsewhere_has_its_own_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--url", "http://127.0.0.1:1", "--token-rate", "1"]) == 2
    assert "--token-rate is for a server that is started here" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_a_server_passes_its_tokens_on(tmp_path: Path, num_processes: str) -> None:
    file = tmp_path / "result.json"
    flags = ["--token-rate", "1000", "--output-len", "50", "--requests", "16", "--api-server-count", num_processes]
    assert run(["bench", "serve", "--platform", "cpu", *flags, "--json", str(file)]) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["failed requests"]["value"] == 0
    assert rows["output throughput"]["note"] == "800 in all"
    assert rows["output throughput"]["value"] < 1100

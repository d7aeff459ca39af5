"""``hardpoint generate`` on a stand-in for the engine: prompts in, text on stdout, facts on stderr."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hardpoint.cli.generate import _pace
from hardpoint.cli.main import run
from hardpoint.config import EngineConfig
from hardpoint.engine.client import EngineStats
from hardpoint.engine.control import MemoryReport
from hardpoint.engine.lora import LoRARequest
from hardpoint.engine.outputs import CompletionOutput, RequestOutput
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.selection import SelectionTable
from hardpoint.terminal.output import check_writable
from hardpoint_plugin_api import MemorySnapshot


class Echo:
    """An engine whose output is the prompt in capitals, a letter at a time."""

    last: Echo

    def __init__(self, config: EngineConfig) -> None:
        Echo.last = self
        self.config = config
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.adapters: list[LoRARequest | None] = []
        self.closed = False
        self.table = SelectionTable([])
        self.stats = EngineStats(load_seconds=0.5, prefill_tokens=10, prefill_seconds=0.1, decode_tokens=4)

    def memory_report(self) -> MemoryReport:
        return MemoryReport({"weights": 3, "kv": 4}, MemorySnapshot(5, 6, 7))

    def start_profile(self, folder: str, layers: bool) -> None:
        self.profiles = [f"{folder} started, layers {layers}"]

    def stop_profile(self) -> None:
        self.profiles.append(f"stopped after {len(self.prompts)}")

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.7, top_p=0.9)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        return {"prompt": "".join(f"[{message['role']}]{message['content']}" for message in messages)}

    def stream(self, prompt: Any, params: SamplingParams, lora_request: LoRARequest | None) -> Iterator[RequestOutput]:
        self.prompts.append(prompt)
        self.adapters.append(lora_request)
        self.params.append(params)
        text = prompt if isinstance(prompt, str) else prompt["prompt"]
        for end in range(1, len(text) + 1):
            completion = CompletionOutput(0, text[:end].upper(), [1] * end)
            yield RequestOutput("0", text, [1], [completion], finished=end == len(text))

    def generate(
        self, prompts: Sequence[Any], params: SamplingParams, use_tqdm: bool, lora_request: LoRARequest | None
    ) -> list[RequestOutput]:
        return [list(self.stream(prompt, params, lora_request))[-1] for prompt in prompts]

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardpoint.cli.generate._load", Echo)


def test_one_prompt_is_streamed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--prompt", "abc"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "ABC\n"
    assert "loaded in 0.50 s; first token after " in printed.err
    assert Echo.last.closed


def test_several_prompts_are_told_in_sum(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--prompt", "abc", "--prompt", "x"]) == 0
    assert "loaded in 0.50 s; prefill 100.0 tokens/s (10); decode 0.0 tokens/s (4)" in capsys.readouterr().err


def test_the_pace_is_that_of_the_median_step() -> None:
    assert _pace([10.0, 10.5, 12.5, 12.6, 12.7], 7) == {
        "first_token_seconds": 0.5,
        "steady_tokens_per_second": pytest.approx(20),  # two tokens a step, of 0.1 s in the median
    }
    assert _pace([1.0, 1.25], 1) == {"first_token_seconds": 0.25}
    assert _pace([1.0], 0) == {}


def test_drafts_that_were_right_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stats = EngineStats(drafted_tokens=9, accepted_tokens=7)
    monkeypatch.setattr(Echo, "stats", property(lambda self: stats, lambda self, value: None), raising=False)
    assert run(["generate", "--prompt", "abc", "--speculative-method", "ngram"]) == 0
    assert "drafts: 7 of 9 right" in capsys.readouterr().err


def test_quiet_prints_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--prompt", "abc", "--quiet", "--no-stream"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("ABC\n", "")


def test_several_prompts_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--prompt", "abc", "--prompt", "x\ny", "--quiet"]) == 0
    assert capsys.readouterr().out == "--- abc\nABC\n--- x\nX\nY\n"


@pytest.mark.parametrize("args", [[], ["--prompt", "-"]])
def test_the_prompt_can_come_from_stdin(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert run(["generate", *args, "--quiet"]) == 0
    assert capsys.readouterr().out == "PIPED\n"


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        (["--lora", "adapters/sql"], "adapters/sql"),
        (["--lora", "sql", "--enable-lora", "--lora-modules", "sql=some/where"], "some/where"),
    ],
)
def test_an_adapter_is_chosen(flags: list[str], path: str) -> None:
    for prompts in (["--prompt", "abc"], ["--prompt", "abc", "--prompt", "x"]):
        assert run(["generate", "--quiet", *prompts, *flags]) == 0
        adapters = Echo.last.adapters
        assert {(adapter.lora_name, adapter.lora_path) for adapter in adapters if adapter} == {(flags[1], path)}
        assert len(adapters) == len(prompts) // 2
        assert Echo.last.config.enable_lora
    assert run(["generate", "--quiet", "--prompt", "abc"]) == 0
    assert (Echo.last.adapters, Echo.last.config.enable_lora) == ([None], False)


def test_chat_prompts_are_messages() -> None:
    assert run(["generate", "--chat", "--system", "be kind", "--prompt", "hi", "--quiet"]) == 0
    assert Echo.last.prompts == [{"prompt": "[system]be kind[user]hi"}]


@pytest.mark.parametrize("flags", [["--temperature", "-1"], ["--top-p", "2"], ["--max-tokens", "0"]])
def test_bad_sampling_is_refused_before_anything_loads(flags: list[str]) -> None:
    Echo.last = earlier = Echo(EngineConfig.create(model="demo"))
    assert run(["generate", "--prompt", "abc", *flags]) == 2
    assert Echo.last is earlier


def test_flags_change_the_models_own_sampling() -> None:
    flags = ["--temperature", "0", "--top-k", "5", "--max-tokens", "3", "--stop", "x", "--stop", "y", "--seed", "7"]
    assert run(["generate", "--prompt", "abc", "--quiet", *flags]) == 0
    expected = SamplingParams(temperature=0, top_p=0.9, top_k=5, max_tokens=3, stop=("x", "y"), seed=7)
    assert Echo.last.params == [expected]
    assert Echo.last.config.seed == 7


def test_without_a_seed_flag_requests_have_none() -> None:
    assert run(["generate", "--prompt", "abc", "--quiet"]) == 0
    assert Echo.last.params[0].seed is None
    assert Echo.last.params[0].max_tokens == 128


def test_json_holds_outputs_speed_and_selection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert run(["generate", "--prompt", "abc", "--quiet", "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    assert data["outputs"][0]["outputs"][0]["text"] == "ABC"
    assert data["speed"]["prefill_tokens_per_second"] == 100
    assert data["speed"].pop("first_token_seconds") > 0
    assert data["speed"].pop("steady_tokens_per_second") > 0
    assert data["memory"] == {"weights": 3, "kv": 4}
    assert data["selection"]["rows"] == []
    capsys.readouterr()
    assert run(["generate", "--prompt", "abc", "--quiet", "--json", "-"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["speed"].keys() > data["speed"].keys()
    assert again | {"speed": data["speed"]} == data


def test_a_profile_spans_the_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    assert run(["generate", "--prompt", "abc", "--prompt", "d", "--quiet", "--profile", str(folder)]) == 0
    assert Echo.last.profiles == [f"{folder} started, layers True", "stopped after 2"]
    assert folder.is_dir()
    (tmp_path / "file").touch()
    assert run(["generate", "--prompt", "abc", "--profile", str(tmp_path / "file")]) == 2
    assert "--profile: cannot make the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "a", "--system", "s"], "--system goes with --chat"),
        (["--prompt", "a", "--prompt", "b", "--stream"], "--stream goes with one prompt"),
        (["--prompt", "-", "--prompt", "-"], "there is one stdin"),
        (["--prompt", "a", "--temperature", "-1"], "error: --temperature must be 0 or more"),
        (["--prompt", "a", "--max-tokens", "0"], "error: --max-tokens must be at least 1, got 0"),
        (["--prompt", "a", "--json", "/absent/x.json"], "cannot write /absent/x.json: No such file"),
    ],
)
def test_bad_input_is_one_error(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", *args, "--quiet"]) == 2
    assert message in capsys.readouterr().err


def test_the_json_file_is_tried_before_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hardpoint.cli.generate._load", None)  # an engine that is made would show
    cases = [(str(tmp_path), "Is a directory"), ("/absent/x.json", "No such file"), ("", "--json is empty")]
    for path, message in cases:
        assert run(["generate", "--prompt", "a", "--json", path]) == 2
        assert message in capsys.readouterr().err
    check_writable("--json", str(tmp_path / "new.json"))
    assert not list(tmp_path.iterdir()), "trying leaves nothing behind"
    file = tmp_path / "old.json"
    file.write_text("old")
    check_writable("--json", str(file))
    assert file.read_text() == "old"


@pytest.mark.parametrize("args", [[], ["--prompt", "-"]])
def test_a_closed_stdin_is_refused(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run(["generate", *args]) == 2
    assert "stdin is closed: give --prompt TEXT" in capsys.readouterr().err
    assert run(["generate", "--prompt", "a", "--quiet"]) == 0


def test_a_stdin_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert run(["generate"]) == 2
    assert "stdin cannot be read as text" in capsys.readouterr().err


def test_a_terminal_without_a_prompt_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    assert run(["generate"]) == 2
    assert "nothing to continue: give --prompt TEXT" in capsys.readouterr().err

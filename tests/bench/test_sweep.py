"""Sweeps: every point once, whatever happens between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hardpoint.bench import registry, startup, sweep
from hardpoint.bench.registry import BenchResult, BenchRow
from hardpoint.cli.main import run
from hardpoint.config import EngineConfig
from hardpoint_plugin_api import HardpointError

RUNS: list[tuple[str, int]] = []
SWITCHES: list[bool] = []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that takes no time, with the options of a real one; 13 repeats fail, 11 have no rows."""

    def fake(config: EngineConfig, repeat: int, **others: object) -> BenchResult:
        if repeat == 13:
            raise HardpointError("thirteen")
        RUNS.append((config.model, repeat))
        SWITCHES.append(config.enforce_eager)
        if repeat == 11:
            return BenchResult("startup", ())
        rows = BenchRow("time", repeat * 2.0, "s", peer=1.0), BenchRow("rate", 1 / repeat, "1/s", better="higher")
        return BenchResult("startup", rows, f"for {repeat} sequences", "theirs")

    fake.__click_params__ = startup.startup.__click_params__  # type: ignore[attr-defined]  # where click keeps them
    monkeypatch.setattr(startup, "startup", fake)
    RUNS.clear()
    SWITCHES.clear()


def swept(file: Path, *flags: str) -> dict[str, Any]:
    """A sweep's result."""
    out = file.with_suffix(".json")
    assert run(["bench", "sweep", "startup", "--file", str(file), "--json", str(out), *flags]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_it_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grid.jsonl"
    command = ["bench", "sweep", "startup", "--file", str(file), "--vary", "repeat=2,13,4", "--", "some/model"]
    assert run(command) != 0
    assert "thirteen" in capsys.readouterr().err
    assert RUNS == [("some/model", 2)]
    result = swept(file, "--vary", "repeat=2,4", "--", "some/model")
    assert RUNS == [("some/model", 2), ("some/model", 4)], "2 was done before"
    assert [row["name"] for row in result["rows"]] == ["repeat 2: time", "repeat 4: time"]
    assert [row["value"] for row in result["rows"]] == [4, 8]
    assert result["peer"] == "theirs"
    assert result["curves"][0]["x"] == [2, 4]


def test_a_line_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    file = tmp_path / "grid.jsonl"
    swept(file, "--vary", "repeat=2,3")
    whole = file.read_text()
    file.write_text(whole[:-20])
    assert [row["value"] for row in swept(file, "--vary", "repeat=2,3")["rows"]] == [4, 6]
    assert [repeat for _, repeat in RUNS] == [2, 3, 3]
    assert len(file.read_text().splitlines()) == len(whole.splitlines()) == 3


def test_a_grid_and_its_rows(tmp_path: Path) -> None:
    file, plot = tmp_path / "grid.jsonl", tmp_path / "plot.png"
    result = swept(file, "--vary", "repeat=1,2", "--show", "rate", "--show", "time", "--plot", str(plot))
    assert [row["value"] for row in result["rows"]] == [1, 2, 0.5, 4]
    assert {curve["name"] for curve in result["curves"]} == {"rate", "time"}
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--", "another/model"], "flags: ['some/model'] there, ['another/model'] now"),
        ([], "flags: ['some/model'] there, [] now"),
    ],
)
def test_another_configuration_is_refused(
    tmp_path: Path, change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.jsonl"
    swept(file, "--vary", "repeat=2", "--", "some/model")
    before = file.read_text()
    assert run(["bench", "sweep", "startup", "--file", str(file), "--vary", "repeat=3", *change]) == 2
    assert message in capsys.readouterr().err
    assert file.read_text() == before


def test_other_versions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grid.jsonl"
    swept(file, "--vary", "repeat=2")
    head, point = file.read_text().splitlines()
    file.write_text(head.replace('"torch": "', '"torch": "0.') + f"\n{point}\n")
    assert run(["bench", "sweep", "startup", "--file", str(file), "--vary", "repeat=2"]) == 2
    assert "environment:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["startup", "--vary", "repeat"], "names no flag and values"),
        (["startup", "--vary", "repeat=1", "--vary", "repeat=2"], "repeat varies already"),
        (["startup", "--vary", "repeet=1"], "No such option: --repeet (did you mean --repeat?)"),
        (["startup", "--vary", "repeat=1,none"], "'none' is not a valid integer"),
        (["start", "--vary", "repeat=1"], "startup"),
        (["sweep", "--vary", "repeat=1"], "unknown benchmark"),
        (["startup", "--vary", "repeat=1", "--show", "tine"], "time"),
        (["startup", "--vary", "enforce-eager=true,1"], "--enforce-eager takes no value; vary it as"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_sweeps(tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "sweep", *flags, "--file", str(tmp_path / "grid.jsonl")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[1]\n", "{}\n", "\x00\n{}\n", "7\n"])
def test_a_file_that_is_something_else(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grid.jsonl"
    file.write_text(content)
    assert run(["bench", "sweep", "startup", "--file", str(file), "--vary", "repeat=1"]) == 2
    assert f"--file {file} holds no sweep" in capsys.readouterr().err
    assert file.read_text() == content


def test_every_flag_is_checked_before_the_first_point_runs(tmp_path: Path) -> None:
    assert run(["bench", "sweep", "startup", "--file", str(tmp_path / "g"), "--vary", "repeat=1,x"]) == 2
    assert RUNS == []


def test_other_devices_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.jsonl"
    swept(file, "--vary", "repeat=2")
    here = registry.environment()
    monkeypatch.setattr(sweep, "environment", lambda: here | {"devices": "2 x another"})
    assert run(["bench", "sweep", "startup", "--file", str(file), "--vary", "repeat=2"]) == 2
    assert "'devices': '2 x another'" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_first_point_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nodir" / "grid.jsonl"
    assert run(["bench", "sweep", "startup", "--file", str(file), "--vary", "repeat=1"]) == 2
    assert f"--file: cannot write {file}" in capsys.readouterr().err
    assert RUNS == []


def test_a_row_that_is_not_there_is_refused_at_the_first_point(tmp_path: Path) -> None:
    file = tmp_path / "grid.jsonl"
    command = ["bench", "sweep", "startup", "--file", str(file), "--vary", "repeat=1,2,3"]
    assert run([*command, "--show", "tine"]) == 2
    assert len(RUNS) == 1
    assert run([*command, "--show", "time"]) == 0
    assert [repeat for _, repeat in RUNS] == [1, 2, 3], "the first was kept"


def test_flags_without_a_value_vary_over_true_and_false(tmp_path: Path) -> None:
    file = tmp_path / "grid.jsonl"
    result = swept(file, "--vary", "enforce-eager=true,false", "--vary", "no-enable-prefix-caching=true")
    assert SWITCHES == [True, False]
    assert [row["name"].partition(",")[0] for row in result["rows"]] == ["enforce-eager true", "enforce-eager false"]


def test_what_is_said_of_a_column_holds_for_all_points(tmp_path: Path) -> None:
    file = tmp_path / "grid.jsonl"
    assert swept(file, "--vary", "repeat=2")["roofline"] == "for 2 sequences"
    both = swept(file, "--vary", "repeat=2,4")
    assert both["roofline"] == f"another one at each point, which {file} names"
    assert both["peer"] == "theirs"


def test_a_point_without_rows(tmp_path: Path) -> None:
    result = swept(tmp_path / "grid.jsonl", "--vary", "repeat=2,11")
    assert [row["name"] for row in result["rows"]] == ["repeat 2: time"]

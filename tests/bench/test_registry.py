"""Benchmarks: found without importing them, and results with their ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardpoint import startup_times
from hardpoint.bench import startup
from hardpoint.bench.registry import BenchResult, BenchRow, environment, find
from hardpoint.cli.main import run
from hardpoint.config import EngineConfig
from hardpoint_plugin_api import DeviceInfo


def test_ratios_are_above_one_where_the_value_is_better() -> None:
    faster = BenchRow("time", 2.0, "s", roofline=1.0, peer=4.0)
    assert (faster.of_roofline, faster.of_peer) == (0.5, 2.0)
    higher = BenchRow("rate", 50.0, "GB/s", roofline=100.0, peer=25.0, better="higher")
    assert (higher.of_roofline, higher.of_peer) == (0.5, 2.0)
    alone = BenchRow("rate", 0.0, "GB/s", roofline=100.0)
    assert (alone.of_roofline, alone.of_peer) == (None, None)


def test_benchmarks_are_found_in_the_source_text(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(
        "import does_not_exist\n"
        "@benchmark('norm', 'Norms.')\ndef norm(): ...\n"
        "@benchmark('matmul', 'Matmuls.')\n@other\ndef run(): ...\n"
    )
    found = find(tmp_path, "pkg")
    assert {name: entry.target for name, entry in found.items()} == {
        "norm": "pkg.kernels:norm",
        "matmul": "pkg.kernels:run",
    }
    assert found["norm"].summary == "Norms."


def test_the_start_up_benchmark_is_there() -> None:
    assert find()["startup"].target == "hardpoint.bench.startup:startup"


def test_a_result_says_on_which_devices_and_with_which_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    from hardpoint import plugin_host

    found = environment()
    info = detect_host()
    assert found["devices"].startswith(f"{info.count} x {info.name}")
    records = plugin_host.discover(quiet=True).records
    assert {record.distribution for record in records if record.is_usable} <= found.keys()
    records[-1].version = "99"
    monkeypatch.setattr(plugin_host, "discover", lambda **_: plugin_host.PluginSet(records))
    assert environment() == found | {records[-1].distribution: "99"}


def test_a_stage_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_times, "_marks", {})
    startup_times.mark("a")
    startup_times.mark("b")
    startup_times.mark("a")
    startup_times.write(tmp_path / "marks.json")
    marks = json.loads((tmp_path / "marks.json").read_text())
    assert list(marks) == ["a", "b"]
    assert marks["a"] <= marks["b"]


def detect_host() -> DeviceInfo:
    from hardpoint_cpu.platform import CpuPlatform

    info = CpuPlatform.detect()
    assert isinstance(info, DeviceInfo)
    return info


def test_start_up_divides_the_time_between_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {"interpreter": 1.0, "torch": 2.0, "first token": 1.0}
    monkeypatch.setattr(startup, "_start", lambda config: startup._Run(stages, 4.0, 3.0))
    monkeypatch.setattr(startup, "_bare_torch", lambda: startup._Run({"interpreter": 1.0, "torch": 1.0}, 2.0, 1.5))
    monkeypatch.setattr(startup, "_command", lambda words: startup._Run({}, 0.25, 0.2))
    result = startup.startup(EngineConfig.create(model="demo"), 3)
    rows = {row.name: row for row in result.rows}
    commands = ["hardpoint --help", "hardpoint plugins list"]
    assert list(rows) == ["interpreter", "import of torch", "first token", "all", "all, processor time", *commands]
    assert rows["import of torch"].share == 0.5
    assert rows["import of torch"].of_peer == 0.5
    assert (rows["all"].value, rows["all"].roofline, rows["all"].of_roofline) == (4.0, 2.0, 0.5)
    assert (rows["all, processor time"].value, rows["all, processor time"].peer) == (3.0, 1.5)
    assert rows["hardpoint --help"].value == 0.25


def test_durations_follow_each_other() -> None:
    assert startup._durations(1.0, {"a": 1.5, "b": 4.0}) == {"a": 0.5, "b": 2.5}


def test_the_command_prints_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(config: EngineConfig, repeat: int, distributions: int) -> BenchResult:
        return BenchResult(
            "startup", (BenchRow(f"{config.model} x{repeat}", 2.0, "s", 1.0, 4.0),), "the floor", "theirs"
        )

    fake.__click_params__ = startup.startup.__click_params__  # type: ignore[attr-defined]  # where click keeps them
    monkeypatch.setattr(startup, "startup", fake)
    file = tmp_path / "result.json"
    assert run(["bench", "startup", "some/model", "--repeat", "2", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("some/model x2", "50.0%", "200.0%", "roofline: the floor", "peer: theirs"))
    saved = json.loads(file.read_text())
    assert saved["rows"][0]["of_peer"] == 2.0
    assert saved["environment"]["torch"]
    assert run(["bench", "startup", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["name"] == "demo x5"


def test_kernels_beside_what_the_device_can_do(tmp_path: Path) -> None:
    wanted = ["bench", "ops", "--platform", "cpu", "--rounds", "3", "--sequences", "2", "--length", "64"]
    for only, unit in (("attention", "GB/s"), ("linear int4 in groups of 64, 512", "GFLOP/s")):
        assert run([*wanted, "--only", only, "--json", str(tmp_path / "ops.json")]) == 0
        (row,) = json.loads((tmp_path / "ops.json").read_text())["rows"]
        assert row["unit"] == unit
        assert row["of_roofline"] > 0


def test_a_row_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "ops", "--platform", "cpu", "--only", "linaer"]) == 2
    assert "--only linaer: found in the name of no row; they are linear bfloat16, 1 rows;" in capsys.readouterr().err

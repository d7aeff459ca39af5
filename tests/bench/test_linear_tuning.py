"""``hardpoint tune linear`` on the demo model: every kernel of the CPU is run, and the selector reads the file."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.bench import linear_tuning
from hardpoint.bench.device_timer import DeviceTimer, Run
from hardpoint.bench.linear_tuning import LinearTuner, Measured, random_slots
from hardpoint.cli.main import run
from hardpoint.config import EngineConfig
from hardpoint.dtypes import dtype_of
from hardpoint.engine.explain import explain
from hardpoint.reference.batch_invariant_linear import BatchInvariantLinear
from hardpoint.selection import TuningFile, Verdict
from hardpoint.selection.table import Row
from hardpoint_plugin_api import DeviceInfo, LinearCall, LinearWorkload, QuantSpec, Scale, dequantize

pytest.importorskip("hardpoint_cpu")

TUNE = ["tune", "linear", "demo", "--platform", "cpu", "--rounds", "3"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_tuning, "_WORKING_SET", 2**20)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that a kernel is said to take, by the name of its class; others take a millisecond. Each still runs."""
    seconds: dict[str, float] = {}

    def in_turns(timer: DeviceTimer, runs: Sequence[Run], most_rounds: int) -> list[float]:
        found = []
        for call in runs:
            call()
            (kernel,) = (c.cell_contents for c in call.__closure__ or () if hasattr(c.cell_contents, "prepack"))
            found.append(seconds.get(type(kernel).__name__, 1e-3))
        return found

    monkeypatch.setattr(DeviceTimer, "in_turns", in_turns)
    return seconds


def linears(path: Path, **settings: object) -> list[Row]:
    """The rows of the plain matrices, chosen with a tuning file."""
    config = EngineConfig.create(model="demo", platform="cpu", tuning_file=str(path), **settings)
    return [row for row in explain(config).rows if row.family == "linear"]


@pytest.mark.parametrize("options", [[], ["--quantization", "int8"]], ids=["plain", "int8"])
def test_measuring_the_demo_model(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuned.json"
    assert run([*TUNE, *options, "--rows", "1,3", "--output", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "geometric means of 1,3 tokens" in shown
    assert f"--tuning-file {path}" in shown.replace("\n", "")
    entries = json.loads(path.read_text())["winners"]
    for entry in entries:
        assert entry["family"] == "linear"
        assert entry["versions"]["torch"] == torch.__version__
        assert all(entry["name"] in times and len(times) > 1 for times in entry["measured"].values())
    tables = {(entry["workload"], n) for entry in entries for n in entry["measured"]}
    workloads = {entry["workload"] for entry in entries}
    assert tables == {(workload, n) for workload in workloads for n in ("1", "3")}
    rows = linears(path, **({"quantization": "int8"} if options else {}))
    assert {row.workload for row in rows} == workloads
    for row in rows:
        assert row.rule == "tuning file"
        assert row.measured is not None
        assert " us at " in row.measured


def test_what_was_fastest_serves_and_is_found_again(
    clock: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tuned.json"
    clock["PlainLinear"] = 32e-6
    command = [*TUNE, "--rows", "1,16", "--output", str(path)]
    assert run(command) == 0
    for row in linears(path):
        assert (row.chosen, row.range, row.rule) == ("torch", "any", "tuning file")
        assert row.measured is not None
        assert row.measured.startswith("32.0 us at 1 token, next best ")
        against = {r.offer.contribution.name: str(r.reasons[0]) for r in row.rejected}
        if "cpu_native" in against:
            assert "torch was measured: 32.0 us at 1 token, this 1,000 us" in against["cpu_native"]
    written = path.read_text()
    clock["PlainLinear"] = 32.5e-6
    capsys.readouterr()
    assert run(command) == 0
    assert path.read_text() == written, "2 % is noise"
    assert "stays as it is" in capsys.readouterr().out
    clock["PlainLinear"] = 40e-6
    assert run(command) == 0
    assert path.read_text() == written.replace("32.0", "40.0")


def test_a_file_keeps_what_it_holds_of_others(clock: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    command = [*TUNE, "--rows", "1", "--output", str(path)]
    assert run(command) == 0
    before = TuningFile.read(path).winners
    assert run([*command, "--quantization", "int8"]) == 0
    after = TuningFile.read(path).winners
    assert before.items() <= after.items()
    assert len(after) > len(before)


def test_other_rows_are_added_to_what_was_measured(clock: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    command = [*TUNE, "--output", str(path), "--rows"]
    clock["PlainLinear"] = 32e-6
    assert run([*command, "1,2"]) == 0
    clock["PlainLinear"], clock["BatchInvariantLinear"] = 1e-3, 16e-6
    assert run([*command, "2,64"]) == 0
    for verdicts in TuningFile.read(path).winners.values():
        first, rest = sorted(verdicts, key=lambda verdict: verdict.tokens.min)
        assert (first.name, first.tokens.max, first.measured[1]["torch"]) == ("torch", 1, 32)
        assert (rest.name, sorted(rest.measured)) == ("torch_batch_invariant", [2, 64])
        assert rest.measured[2]["torch"] == 1e3, "measured again"


def test_other_versions_are_not_mixed_with_what_is_measured(clock: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    command = [*TUNE, "--output", str(path), "--rows"]
    assert run([*command, "1"]) == 0
    path.write_text(path.read_text().replace('"torch": "2', '"torch": "1'))
    assert run([*command, "64"]) == 0
    for (verdict,) in TuningFile.read(path).winners.values():
        assert list(verdict.measured) == [64]


def test_an_interrupt_keeps_what_was_measured(
    clock: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuned.json"
    measure, calls = LinearTuner.measure, []

    def interrupted(*arguments: Any) -> Measured:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(LinearTuner, "measure", interrupted)
    assert run([*TUNE, "--rows", "1", "--output", str(path)]) == 130
    assert len(TuningFile.read(path).winners) == 2


def test_times_hold_for_the_threads_they_were_measured_with(
    clock: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuned.json"
    command = [*TUNE, "--rows", "1", "--output", str(path), "--cpu.threads"]
    clock["PlainLinear"] = 32e-6
    assert run([*command, "1"]) == 0
    one = TuningFile.read(path).winners
    assert {v.context["threads"] for verdicts in one.values() for v in verdicts} == {"1"}
    assert {row.rule for row in linears(path, plugin_config={"cpu": {"threads": 1}})} == {"tuning file"}
    assert not caplog.records
    assert "tuning file" not in {row.rule for row in linears(path, plugin_config={"cpu": {"threads": 2}})}
    assert "threads 1 is left aside, since this engine has" in caplog.text
    clock["PlainLinear"], clock["BatchInvariantLinear"] = 1e-3, 16e-6
    assert run([*command, "2"]) == 0
    for number, name in ((1, "torch"), (2, "torch_batch_invariant")):
        assert {row.chosen for row in linears(path, plugin_config={"cpu": {"threads": number}})} == {name}


def test_what_cannot_run_is_left_out_unless_it_serves(
    clock: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(self: BatchInvariantLinear, call: LinearCall) -> torch.Tensor:
        raise RuntimeError("no room for the tile")

    path = tmp_path / "tuned.json"
    monkeypatch.setattr(BatchInvariantLinear, "apply", fail)
    command = [*TUNE, "--rows", "1", "--output", str(path)]
    assert run(command) == 0
    (record,) = (r for r in caplog.records if "no room for the tile" in r.getMessage())
    assert record.getMessage().startswith("left out: plugin core: linear: torch_batch_invariant: ")
    for verdicts in TuningFile.read(path).winners.values():
        assert all("torch_batch_invariant" not in times for v in verdicts for times in v.measured.values())
    found = TuningFile.read(path).winners
    TuningFile({key: (Verdict("torch_batch_invariant"),) for key in found}).write(path)
    assert run(command) == 2
    assert "no room for the tile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0,1"], "'0,1': write positive numbers with commas between them"),
        (["--rows", "one"], "'one': write positive numbers"),
        (["--rows", "1,2", "--layout-by", "3"], "--layout-by 3: it is none of --rows 1,2"),
        (["--linear-backend", "torch"], "'torch' was asked for as linear kernel, which leaves nothing to tune"),
        (["--output", "absent/tuned.json"], "--output: cannot write absent/tuned.json"),
        (["--output", "-"], "--output -: a tuning file cannot be stdout"),
        (["--output", "b.json", "--tuning-file", "a.json"], "--output b.json and --tuning-file a.json: one file"),
    ],
)
def test_bad_options(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*TUNE, *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_turns_are_not_wasted_on_what_is_hopeless() -> None:
    from hardpoint_cpu.platform import CpuPlatform

    info = CpuPlatform.detect()
    assert isinstance(info, DeviceInfo)
    calls = {"quick": 0, "slow": 0, "crawling": 0}

    def quick() -> None:
        calls["quick"] += 1
        time.sleep(0.001)

    def slow() -> None:
        calls["slow"] += 1
        time.sleep(0.05)

    def crawling() -> None:
        calls["crawling"] += 1
        time.sleep(0.6)

    timer = DeviceTimer(CpuPlatform(info, None), torch.device("cpu"), 2**20)
    first, second, third = timer.in_turns([quick, slow, crawling], 4)
    assert first < second < third
    assert calls["crawling"] == 2, "to see how many make a turn, and one turn"
    assert calls["slow"] == 3, "to see how many make a turn, and two turns"
    assert calls["quick"] >= 1 + 4
    assert timer.in_turns([], 4) == []


def test_one_turn_that_was_held_up_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from hardpoint_cpu.platform import CpuPlatform

    info = CpuPlatform.detect()
    assert isinstance(info, DeviceInfo)
    timer = DeviceTimer(CpuPlatform(info, None), torch.device("cpu"), 2**20)
    left = {"held up": [50.0, 3.0, 3.0, 3.0], "steady": [4.0] * 4}
    monkeypatch.setattr(timer, "_host_seconds", lambda runs: 1e-3)
    monkeypatch.setattr(timer, "_seconds", lambda runs, host_seconds: len(runs) * left[runs[0]].pop(0))
    runs: Any = list(left)
    assert timer.in_turns(runs, 4) == [3.0, 4.0]


def test_what_is_hopeless_with_many_tokens_is_not_tried_with_more(clock: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    clock["BatchInvariantLinear"] = 0.01
    assert run([*TUNE, "--rows", "1,2,16,32", "--output", str(path)]) == 0
    assert tried(path, "torch_batch_invariant") == {1, 2, 16}


def tried(path: Path, name: str) -> set[int]:
    """The numbers of tokens that a candidate has times of, of every matrix the same."""
    found = {
        frozenset(n for verdict in verdicts for n, times in verdict.measured.items() if name in times)
        for verdicts in TuningFile.read(path).winners.values()
    }
    (numbers,) = found
    return set(numbers)


def test_what_is_hopeless_is_left_where_one_more_call_would_take_long(clock: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    clock["BatchInvariantLinear"] = 0.2
    assert run([*TUNE, "--rows", "1,2,16", "--output", str(path)]) == 0
    assert tried(path, "torch_batch_invariant") == {1}, "two tokens would take 0.4 s"


def test_what_is_hopeless_is_found_with_few_tokens(
    clock: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with 1,024 tokens would take minutes where torch's matmul crawls; two tokens show it."""
    path, calls = tmp_path / "tuned.json", []
    apply = BatchInvariantLinear.apply

    def crawls(self: BatchInvariantLinear, call: LinearCall) -> torch.Tensor:
        calls.append(len(call.x))
        time.sleep(0.01)
        return apply(self, call)

    monkeypatch.setattr(BatchInvariantLinear, "apply", crawls)
    assert run([*TUNE, "--rows", "1,64", "--output", str(path)]) == 0
    assert tried(path, "torch_batch_invariant") == {1}
    assert set(calls) == {1, 2}


def crawl(monkeypatch: pytest.MonkeyPatch, *slow: torch.dtype) -> DeviceTimer:
    """A timer of a host whose matmul takes 30 times as long in some dtypes as in the others."""
    from hardpoint_cpu.platform import CpuPlatform

    info = CpuPlatform.detect()
    assert isinstance(info, DeviceInfo)
    timer = DeviceTimer(CpuPlatform(info, None), torch.device("cpu"), 2**20)

    def once(call: Run) -> float:
        product = call()
        assert isinstance(product, torch.Tensor)
        return 0.03 if product.dtype in slow else 0.001

    monkeypatch.setattr(timer, "once", once)
    return timer


def test_the_roofline_is_multiplied_in_a_dtype_that_does_not_crawl(monkeypatch: pytest.MonkeyPatch) -> None:
    half = (torch.bfloat16, torch.float16)
    quick, slow = crawl(monkeypatch), crawl(monkeypatch, *half)
    assert (quick.product.dtype, slow.product.dtype) == (torch.bfloat16, torch.float32)
    assert quick.dtype_at_speed(torch.float16) == torch.float16
    assert {slow.dtype_at_speed(dtype) for dtype in (*half, torch.float32)} == {torch.float32}
    assert slow.multiply().dtype == torch.float32
    assert str(slow.product) == "torch's float32 matmul of 512 x 512", "1,024 would take 0.064 s"


@pytest.mark.parametrize(
    "spec",
    [
        (QuantSpec("bfloat16"), QuantSpec("bfloat16")),
        (QuantSpec("int8", scales=(Scale("float32", (1, -1)),)), QuantSpec("bfloat16")),
        (QuantSpec("float8_e4m3fn", scales=(Scale("float32", (16, 32)),)), QuantSpec("bfloat16")),
        (QuantSpec("uint4", scales=(Scale("bfloat16", (1, 32)),), zero_point=True), QuantSpec("bfloat16")),
        (
            QuantSpec("int8", scales=(Scale("float32", (-1, -1)),)),
            QuantSpec("int8", scales=(Scale("float32", (-1, -1)),)),
        ),
    ],
    ids=lambda pair: str(pair[0]),
)
def test_random_weights_of_every_spec_are_numbers(spec: tuple[QuantSpec, QuantSpec]) -> None:
    workload = LinearWorkload(dtype="bfloat16", in_features=64, out_features=48, spec=spec)
    slots = random_slots(workload, torch.device("cpu"))
    weight = slots["weight"] if spec[0].is_plain else dequantize(slots, spec[0], dtype_of("float32"))
    assert weight.shape == (48, 64)
    assert weight.isfinite().all()
    assert weight.unique().numel() > 10
    assert ("input_scale" in slots) == (not spec[1].is_plain)

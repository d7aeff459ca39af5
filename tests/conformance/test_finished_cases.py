"""A run of the kit that was ended goes on from the file of its finished cases."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardpoint.cli.main import run as hardpoint
from hardpoint.conformance.certificate import Certificate
from hardpoint.conformance.certify import Silent, certify
from hardpoint.conformance.content import FileStamps, Loaded
from hardpoint.conformance.finished_cases import FinishedCases
from hardpoint.conformance.kit import Order, Shard
from hardpoint.conformance.processes import TrialProcess
from hardpoint.conformance.trials import Result
from hardpoint.plugin_host import Offer, discover
from hardpoint_plugin_api import ConfigError, PluginLoadError

KEY = ("op", "rms_norm", "tried_right")
DEVICE = {"platform": "cpu", "name": "a CPU", "arch": "x86_64", "isa": None, "driver": None}
ONE = Result(*KEY, "float32/odd", "values", "passed", measured={"peak": (0.5, 4.0)}, compared=3, claims=("dtype f",))


class Interrupting(Silent):
    """Interrupts a run after a number of results, or after a case's check, as Ctrl-C does."""

    def __init__(self, after: int, until: tuple[str, str] | None) -> None:
        self._left, self._until = after, until

    def found(self, offer: Offer, result: Result) -> None:
        self._left -= 1
        if not self._left or self._until == (result.case, result.check):
            raise KeyboardInterrupt


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cases that processes were asked to run."""
    cases, ask = list[str](), TrialProcess.ask

    def noted(self: TrialProcess, case: str, seconds: float) -> Iterator[Mapping[str, Any]]:
        cases.append(case)
        return ask(self, case, seconds)

    monkeypatch.setattr(TrialProcess, "ask", noted)
    return cases


def run(
    file: Path,
    after: int = 10**9,
    name: str = "right",
    until: tuple[str, str] | None = None,
    jobs: int = 2,
    **changes: Any,
) -> Certificate:
    changes.setdefault("settings", {"cpu": {"threads": 1}})
    order = Order("tried", name=f"tried_{name}", case=changes.pop("case", "float32/*"))
    return certify(discover(), replace(order, **changes), Interrupting(after, until), jobs=jobs, resume=file)


def test_a_run_that_was_ended_goes_on(tried_plugin: Path, tmp_path: Path, asked: list[str]) -> None:
    file, whole = tmp_path / "new" / "finished.jsonl", run(tmp_path / "whole.jsonl")
    everything = asked.copy()
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        run(file, after=40)
    kept = [json.loads(line)["case"] for line in file.read_text().splitlines()[1:]]
    assert len(set(kept)) == len(kept)
    assert 0 < len(kept) < len(everything)
    file.write_bytes(file.read_bytes() + b'{"key": ["op", "rms_n')  # it was killed while it wrote
    asked.clear()
    resumed = run(file)
    assert sorted(asked) == sorted(set(everything) - set(kept))
    assert [r.to_json() for r in resumed.results] == [r.to_json() for r in whole.results]
    assert (resumed.sources, resumed.case_list, resumed.device) == (whole.sources, whole.case_list, whole.device)
    asked.clear()
    assert run(file).results == resumed.results
    assert not asked


def test_a_case_that_ended_its_process_is_tried_again_by_a_run_that_goes_on(
    tried_plugin: Path, tmp_path: Path, asked: list[str]
) -> None:
    file = tmp_path / "finished.jsonl"

    def failed() -> list[tuple[str, str]]:
        asked.clear()
        found = run(file, name="crashes", jobs=1)
        return [(r.case, r.check) for r in found.results if r.outcome == "failed"]

    order = [json.loads(line)["case"] == "float32/odd" for line in whole_run(tmp_path, "crashes")]
    with pytest.raises(KeyboardInterrupt):
        run(file, name="crashes", jobs=1, until=("float32/odd", "process"))
    assert order.count(True) == 1
    assert failed() == [("float32/odd", "process")]
    assert "float32/odd" in asked
    assert failed() == [("float32/odd", "process")]  # the run had come to its end
    assert not asked


def whole_run(folder: Path, name: str) -> list[str]:
    """The lines of the cases of a run that came to its end."""
    run(folder / f"{name}.jsonl", name=name)
    return (folder / f"{name}.jsonl").read_text().splitlines()[1:]


def test_a_file_of_another_run_is_refused(tried_plugin: Path, tmp_path: Path) -> None:
    file = tmp_path / "finished.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(file, after=5)
    before = file.read_text()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 7}, "seed is 0 there and 7 here"),
        ({"name": "wrong"}, "name is 'tried_right' there and 'tried_wrong' here"),
        ({"level": "full"}, "level is"),
        ({"shard": Shard(1, 2)}, "shard is '1/1' there and '1/2' here"),
        ({"settings": {"cpu": {"threads": 2}}}, r"settings\.cpu\.threads is 1 there and 2 here"),
    ]
    for change, what in changes:
        with pytest.raises(ConfigError, match=rf"--resume .*finished.jsonl: is of another run: {what}.*name another"):
            run(file, **change)
    assert file.read_text() == before


def opened(file: Path, **run: Any) -> FinishedCases:
    return FinishedCases(file, {"level": "quick", **run}, FileStamps(discover().record("tried")))


def test_results_are_read_as_they_were_written(tried_plugin: Path, tmp_path: Path) -> None:
    file = tmp_path / "finished.jsonl"
    with opened(file) as finished:
        assert finished.results_of(KEY, ONE.case, DEVICE) is None
        finished.add(KEY, ONE.case, DEVICE, [ONE], Loaded(frozenset({"kernels.py"}), frozenset({"hp_tried.fast"})))
        finished.add(KEY, "other", DEVICE, [], Loaded(frozenset({"plugin.py"})))
    with opened(file) as finished:
        assert finished.results_of(KEY, "other", DEVICE) == []
        assert finished.results_of(KEY, ONE.case, DEVICE) == [ONE]
        loaded = Loaded(frozenset({"kernels.py", "plugin.py"}), frozenset({"hp_tried.fast"}))
        assert finished.loaded_by(KEY) == loaded
        with pytest.raises(ConfigError, match=r"is of another run: device\.arch is"):
            finished.results_of(KEY, ONE.case, {**DEVICE, "arch": "aarch64"})


@pytest.mark.parametrize("text", ["hello", "hello\n", "hello\nyou", "[]\n", '{"run": 5}\n{"', '{"schema": 1}\n'])
def test_a_file_of_something_else_is_left_alone(tried_plugin: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "finished.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is no file of --resume, and was left as it is"):
        opened(file)
    assert file.read_text() == text


def test_a_first_line_that_was_cut_is_written_again(tried_plugin: Path, tmp_path: Path) -> None:
    file = tmp_path / "finished.jsonl"
    opened(file).close()
    whole = file.read_text()
    for cut in (0, 5, len(whole) - 1):
        file.write_text(whole[:cut])
        opened(file).close()
        assert file.read_text() == whole


@pytest.mark.parametrize(
    "line", ["{}", "nothing", '{"key": ["op"], "case": "c", "device": {}, "loaded": [], "results": []}']
)
def test_a_line_that_is_no_case_is_named(tried_plugin: Path, tmp_path: Path, line: str) -> None:
    file = tmp_path / "finished.jsonl"
    opened(file).close()
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(ConfigError, match="line 2 is no finished case"):
        opened(file)


def test_a_file_is_one_runs_at_a_time(tried_plugin: Path, tmp_path: Path) -> None:
    file = tmp_path / "finished.jsonl"
    with opened(file), pytest.raises(ConfigError, match="another run writes to it"):
        opened(file)
    opened(file).close()
    with pytest.raises(ConfigError, match=r"cannot be opened: Is a directory"):
        opened(tmp_path)


def test_a_full_disk_ends_the_run(tried_plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path / "finished.jsonl") as finished:
        monkeypatch.setattr("hardpoint.conformance.finished_cases.os.write", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            finished.add(KEY, ONE.case, DEVICE, [ONE], Loaded())


def test_a_device_is_no_file(tried_plugin: Path) -> None:
    with pytest.raises(ConfigError, match="--resume /dev/zero: is no regular file"):
        opened(Path("/dev/zero"))


def test_no_case_of_changed_files_is_kept(tried_plugin: Path, tmp_path: Path) -> None:
    kernels, file = tried_plugin / "hp_tried" / "kernels.py", tmp_path / "finished.jsonl"
    stamp = kernels.stat()
    with opened(file) as finished:
        finished.add(KEY, ONE.case, DEVICE, [ONE], Loaded())
        kernels.write_text(kernels.read_text())
        os.utime(kernels, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as cp -p does
        with pytest.raises(PluginLoadError, match=r"hp_tried/kernels\.py changed while it was tried"):
            finished.add(KEY, "other", DEVICE, [ONE], Loaded())
        assert finished.results_of(KEY, "other", DEVICE) is None
        finished.drop()
    with opened(file) as finished:
        assert finished.results_of(KEY, ONE.case, DEVICE) is None


def test_a_file_among_the_plugins_is_refused(tried_plugin: Path) -> None:
    file = tried_plugin / "hp_tried" / "finished.jsonl"
    try:
        with pytest.raises(ConfigError, match="lies among the plugin's files"):
            opened(file)
    finally:
        file.unlink()


def test_a_file_is_of_one_device(tried_plugin: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "finished.jsonl", {**DEVICE, "arch": "aarch64"}
    with opened(file) as finished:
        finished.add(KEY, ONE.case, DEVICE, [ONE], Loaded())
        with pytest.raises(ConfigError, match=r"device\.arch is 'x86_64' there and 'aarch64' here"):
            finished.add(KEY, "other", other, [], Loaded())
    with opened(file) as finished, pytest.raises(ConfigError, match=r"device\.arch"):
        finished.results_of(KEY, "other", other)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, lines[1].replace("x86_64", "aarch64"), ""]))
    with pytest.raises(ConfigError, match=r"device\.arch"):
        opened(file)


def test_an_edited_plugin_is_another_run(tried_plugin: Path, tmp_path: Path) -> None:
    kernels, file = tried_plugin / "hp_tried" / "kernels.py", tmp_path / "finished.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(file, after=5)
    text = kernels.read_text()
    try:
        kernels.write_text(f"{text}\n")
        with pytest.raises(ConfigError, match=r"plugin\.content_hash is .* there and .* here; undo the change"):
            run(file)
    finally:
        kernels.write_text(text)


def test_an_edit_that_is_undone_during_a_run_is_seen(tried_plugin: Path, tmp_path: Path) -> None:
    kernels = tried_plugin / "hp_tried" / "kernels.py"
    text = kernels.read_text()

    class Meddler(Silent):
        def found(self, offer: Offer, result: Result) -> None:
            kernels.write_text(f"{text}\n")
            kernels.write_text(text)

    order = Order("tried", name="tried_right", case="float32/odd", settings={"cpu": {"threads": 1}})
    with pytest.raises(PluginLoadError, match=r"hp_tried/kernels\.py changed while it was tried"):
        certify(discover(), order, Meddler(), isolated=False)


def test_a_certificate_is_as_old_as_its_first_case(tried_plugin: Path, tmp_path: Path) -> None:
    file = tmp_path / "finished.jsonl"
    run(file, case="float32/odd")
    first, second, *rest = file.read_text().splitlines()
    early = {**json.loads(second), "date": "2026-01-02T03:04:05Z"}
    file.write_text("\n".join([first, json.dumps(early), *rest, ""]))
    assert run(file, case="float32/odd").created == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize(
    ("files", "match"),
    [
        (("--json", "a", "--resume", "./a"), "--json and --resume name the same file"),
        (("--json", "a", "--report", "a"), "--json and --report name the same file"),
        (("--resume", "-"), "--resume needs the name of a file"),
    ],
)
def test_options_name_files_of_their_own(
    tried_plugin: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: tuple[str, ...],
    match: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hardpoint(["conform", "tried", *files]) == 2
    assert match in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_debuggers_run_keeps_nothing(tried_plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "finished.jsonl"
    assert hardpoint(["conform", "tried", "--in-process", "--resume", str(file)]) == 2
    assert "--resume and --in-process exclude one another" in capsys.readouterr().err
    assert not file.exists()

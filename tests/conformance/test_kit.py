"""The kit as a whole: orders, processes, shards, certificates, the command line and the pytest plugin."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hardpoint.cli.main import run as hardpoint
from hardpoint.config import EngineConfig
from hardpoint.conformance import content
from hardpoint.conformance.certificate import (
    KIT_VERSION,
    Certificate,
    Certificates,
    merge,
    read_certificate,
)
from hardpoint.conformance.certify import Silent, certify
from hardpoint.conformance.content import content_of
from hardpoint.conformance.kit import Order, Shard
from hardpoint.conformance.plan import Level, Plan, covering_array
from hardpoint.conformance.trials import Result
from hardpoint.engine.explain import explain
from hardpoint.plugin_host import Offer, PluginSet, discover
from hardpoint_plugin_api import ConfigError, PluginLoadError, SelectionError, UnknownNameError
from tests.support.forked import run_module

NURSERY = "hardpoint.conformance.nursery"
ONE_THREAD = {"cpu": {"threads": 1}}


def order(name: str, **changes: Any) -> Order:
    return Order("tried", name=f"tried_{name}", settings=ONE_THREAD, **changes)


def certified(name: str, level: Level = "quick", **changes: Any) -> Certificate:
    return certify(discover(), order(name, level=level, **changes), isolated=False)


def outcomes(certificate: Certificate) -> Counter[str]:
    return Counter(result.outcome for result in certificate.results)


# Plans.


def test_a_covering_array_holds_every_pair_and_no_excluded_one() -> None:
    factors = {"a": (1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": ((1, 2), None)}
    rows = list(covering_array(factors, 2, seed=3, excludes={("a", "b"): lambda a, b: (a, b) == (1, "x")}))
    pairs = {(m, row[m], n, row[n]) for row in rows for m in factors for n in factors if m < n}
    wanted = {(m, i, n, j) for m in factors for n in factors if m < n for i in factors[m] for j in factors[n]}
    assert wanted - pairs == {("a", 1, "b", "x")}
    assert len(rows) < 3 * 2 * 2 * 2


def test_what_one_process_has_made_others_need_not_make(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = {name: tuple(range(3)) for name in "abcde"}
    first = Plan("full", seed=1)
    rows = list(first.combinations(factors, {("a", "b"): lambda a, b: a == b}))
    handed_on = Plan("full", seed=1, arrays=json.loads(json.dumps(first.arrays)))
    monkeypatch.setattr("covertable.make", lambda *_, **__: pytest.fail("made again"))
    assert list(handed_on.combinations(factors, {("a", "b"): lambda a, b: a == b})) == rows
    with pytest.raises(pytest.fail.Exception, match="made again"):  # what is excluded makes it another array
        list(handed_on.combinations(factors, {("a", "b"): lambda a, b: a > b}))


def test_levels_nest_and_seeds_differ() -> None:
    factors = {name: tuple(range(3)) for name in "abcde"}
    sizes = [len(list(Plan(level).combinations(factors))) for level in ("quick", "full", "exhaustive")]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 3**5
    assert Plan(seed=1).seed_of("case") == Plan(seed=1).seed_of("case") != Plan(seed=2).seed_of("case")


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "1/0", "a/b", "1/2/3"])
def test_a_shard_that_does_not_exist(text: str) -> None:
    with pytest.raises(ValueError, match=r"shard|invalid literal"):
        Shard.parse(text)


# Orders.


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"plugin": "tryed"}, "did you mean 'tried'"),
        ({"family": "opp"}, "family"),
        ({"family": "attention"}, "family with contributions of tried"),
        ({"name": "tried_rigth"}, "tried_right"),
        ({"platform": "gpu"}, "platform"),
        ({"settings": {"tried": {"sped": 1}}}, "speed"),
    ],
)
def test_what_does_not_exist_is_named_before_anything_runs(tried_plugin: Path, changes: Any, match: str) -> None:
    with pytest.raises(UnknownNameError, match=match):
        certify(discover(), Order(**{"plugin": "tried", **changes}))


def test_a_right_kernel_passes_and_says_how_near_it_came(tried_plugin: Path) -> None:
    found = certified("right")
    assert not [str(fault) for r in found.results for fault in r.faults]
    assert outcomes(found)["passed"] > 30
    values = [r for r in found.results if r.check == "values" and r.measured]
    assert all(error <= limit for r in values for error, limit in r.measured.values())
    assert found.plugin["content_hash"] == content_of(discover().record("tried")).hash
    assert (found.device["platform"], found.level, found.seed, found.is_complete) == ("cpu", "quick", 0, True)
    assert {"torch", "hardpoint-core", "hp-tried"} <= found.libraries.keys()


def test_equal_orders_find_the_same_and_a_seed_other_errors(tried_plugin: Path) -> None:
    first, again, other = (certified("right", case="*/random", seed=seed) for seed in (1, 1, 2))
    assert [r.to_json() for r in first.results] == [r.to_json() for r in again.results]
    assert [r.case for r in first.results] == [r.case for r in other.results]
    assert [r.measured for r in first.results] != [r.measured for r in other.results]


# Processes.


def test_a_crash_and_a_target_that_is_not_there_are_failures_and_the_rest_runs(tried_plugin: Path) -> None:
    found = certify(discover(), order("crashes"))
    failed = [r for r in found.results if r.outcome == "failed"]
    assert [(r.case, r.check, sorted(r.codes)) for r in failed] == [("float32/odd", "process", ["crash"])]
    assert "SIGABRT" in str(failed[0].faults[0])
    assert "about to fall" in str(failed[0].faults[0])
    assert {"float32/random", "float32/non_finite"} <= {r.case for r in found.results if r.outcome == "passed"}
    missing = certify(discover(), order("missing"))
    assert [(r.check, r.outcome, sorted(r.codes)) for r in missing.results] == [("load", "failed", ["load"])]
    assert not missing.proves("op", "rms_norm", "tried_missing")


def test_a_hang_is_a_failure(tried_plugin: Path) -> None:
    found = certify(discover(), order("hangs", case="*/odd"), seconds=2)
    assert [(r.case, r.outcome, sorted(r.codes)) for r in found.results] == [("float32/odd", "failed", ["hang"])]
    assert "in hangs" in str(found.results[0].faults[0])


# Certificates.


def test_shards_merge_into_the_whole(tried_plugin: Path, tmp_path: Path) -> None:
    whole = certified("right")
    parts = [certified("right", shard=Shard(i, 3)) for i in (3, 1, 2)]
    for i, part in enumerate(parts):
        assert not part.is_complete
        assert not part.proves("op", "rms_norm", "tried_right")
        part.write(tmp_path / "new" / f"{i}.json")
    merged = merge([read_certificate(tmp_path / "new" / f"{i}.json") for i in range(3)])
    assert merged.proves("op", "rms_norm", "tried_right")
    assert {(r.case, r.check) for r in merged.results} == {(r.case, r.check) for r in whole.results}
    with pytest.raises(ConfigError, match="2 times"):
        merge([parts[0], parts[0]])
    with pytest.raises(ConfigError, match="seed is 0 in one, 7"):
        merge([parts[0], replace(parts[1], seed=7)])
    assert not merge(parts[:2]).is_complete
    assert not replace(whole, num_shards=0, shards=()).is_complete


@pytest.mark.parametrize(
    ("what", "other"),
    [
        *(("device", {key: "another"}) for key in ("platform", "name", "arch", "isa", "driver")),
        ("libraries", {"torch": "1.0"}),
        ("api_version", "9.9"),
    ],
)
def test_shards_of_unlike_places_do_not_merge(what: str, other: Any) -> None:
    one = made_up()
    changes: dict[str, Any] = {what: {**getattr(one, what), **other} if isinstance(other, dict) else other}
    with pytest.raises(ConfigError, match=f"unlike runs: {what} is "):
        merge([one, replace(one, shards=(2,), **changes)])


def made_up(*results: Result) -> Certificate:
    """A certificate of nothing that was ever run."""
    return Certificate(
        plugin={"name": "tried", "version": "1.0", "content_hash": "0" * 64},
        device={"platform": "cpu", "name": "a CPU", "arch": "x86_64", "isa": "avx2", "driver": None},
        level="quick",
        seed=0,
        results=results,
        created="2026-01-01T00:00:00Z",
        case_list="0" * 16,
        libraries={"torch": "2.9.0"},
    )


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "level": "best"}', '{"schema": 1}'])
def test_a_file_that_is_no_certificate(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.json"):
        read_certificate(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scope", []),
        ("plugin", "x"),
        ("plugin", None),
        ("device", None),
        ("num_shards", "1"),
        ("created", 5),
        ("shards", ["1"]),
        ("level", "best"),
        ("settings", {"cpu": 1}),
        ("results", [{"outcome": "almost"}]),
    ],
)
def test_a_field_that_is_none_of_a_certificate_is_named(tmp_path: Path, field: str, value: Any) -> None:
    line = Result("op", "rms_norm", "n", "c", "values", "passed", measured={"peak": (float("nan"), 1)})
    data = made_up(line).to_json()
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data))
    assert read_certificate(path).to_json().keys() == data.keys()
    bad = [{**data["results"][0], **value[0]}] if field == "results" else value
    path.write_text(json.dumps({**data, field: bad}))
    with pytest.raises(ConfigError, match=rf"c\.json: is no certificate: {field}.*: Input should be"):
        read_certificate(path)


def test_a_plugin_that_changes_while_it_is_tried_is_not_certified(tried_plugin: Path) -> None:
    kernels = tried_plugin / "hp_tried" / "kernels.py"
    text = kernels.read_text()

    class Meddler(Silent):
        def found(self, offer: Offer, result: Result) -> None:
            kernels.write_text(text + "\n")

    try:
        with pytest.raises(PluginLoadError, match=r"tried.* changed while it was tried"):
            certify(discover(), order("right", case="*/zeros"), Meddler(), isolated=False)
    finally:
        kernels.write_text(text)


def standing(plugins: PluginSet, name: str, folder: Path | None, settings: Any = ONE_THREAD) -> str:
    offer = next(o for o in plugins.offers("op", "rms_norm") if o.contribution.name == name)
    config = EngineConfig.create(model="demo", certificates=str(folder) if folder else None, plugin_config=settings)
    certificates = Certificates(plugins, config.with_plugin_keys(plugins.config_keys()))
    return str(certificates.standing(offer, _cpu(plugins)))


def _cpu(plugins: PluginSet) -> Any:
    offer = next(o for o in plugins.offers("platform") if o.contribution.name == "cpu")
    platform: Any = plugins.load(offer)
    return platform.detect()


def test_a_certificate_counts_for_the_content_and_device_that_it_names(tried_plugin: Path, tmp_path: Path) -> None:
    good, plugins = certified("right"), discover()
    assert standing(plugins, "tried_right", tmp_path) == "no"
    assert standing(plugins, "reference", tmp_path) == "reference"
    others = {
        "content": replace(good, plugin={**good.plugin, "content_hash": "0" * 64}, sources=()),
        "device": replace(good, device={**good.device, "arch": "other"}),
        "isa": replace(good, device={**good.device, "isa": "other"}),
        "shard": replace(good, num_shards=2),
        "case": replace(good, scope={**good.scope, "case": "float32/*"}),
        "failed": replace(good, results=(*good.results, replace(good.results[0], outcome="failed"))),
        "rules": replace(good, kit_version=KIT_VERSION - 1),
    }
    for name, other in others.items():
        other.write(tmp_path / name / "c.json")
        assert standing(plugins, "tried_right", tmp_path / name) == ("failed" if name == "failed" else "no"), name
    good.write(tmp_path / "c.json")
    assert standing(plugins, "tried_right", tmp_path) == f"quick, {good.created[:10]}"
    with pytest.raises(ConfigError, match="no such folder"):
        standing(plugins, "tried_right", tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{}", '{"run": {}}\n{"key": []}\n', "", "\xff"])
def test_a_file_beside_certificates_that_is_none_is_passed_over(
    tried_plugin: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    good = certified("right")
    good.write(tmp_path / "good.json")
    (tmp_path / "bad.json").write_text(text, encoding="latin-1")
    assert standing(discover(), "tried_right", tmp_path) == f"quick, {good.created[:10]}"
    (warning,) = [r.getMessage() for r in caplog.records if "bad.json" in r.getMessage()]
    assert "is no certificate" in warning
    assert warning.endswith("nothing is certified by this file: move it, or make the certificate anew")


@pytest.mark.parametrize(
    ("made", "runs", "counts"),
    [
        ({"cpu": {"threads": "1"}}, {"cpu": {"threads": 1}}, True),
        ({"tried": {"speed": "1"}}, {}, True),  # the default, given
        ({}, {"tried": {"speed": 1}}, True),
        ({"tried": {"speed": "2"}}, {"tried": {"speed": 2}}, True),
        ({"tried": {"speed": "2"}}, {}, False),
        ({}, {"tried": {"speed": 2}}, False),
        ({"cpu": {"threads": "1"}}, {}, False),  # what is right on one thread may race on several
        ({}, {"cpu": {"threads": 1}}, True),  # of the platform, what the run was given counts alone
        ({"tried": {"size": "2"}}, {}, False),  # a key that there is no longer
        ({"cuda": {"overlap_launches": "false"}}, {}, True),  # of a plugin that has no part in it
    ],
)
def test_a_certificate_counts_for_engines_of_its_settings(
    tried_plugin: Path, tmp_path: Path, made: Any, runs: Any, counts: bool
) -> None:
    plugins = discover()
    passed = Result("op", "rms_norm", "tried_right", "float32/random", "values", "passed", compared=1)
    tried = {"name": "tried", "version": "1.0", "content_hash": content_of(plugins.record("tried")).hash}
    here = {"platform": "cpu", "arch": _cpu(plugins).arch, "isa": _cpu(plugins).isa}
    replace(made_up(passed), plugin=tried, device=here, settings=made).write(tmp_path / "c.json")
    assert standing(plugins, "tried_right", tmp_path, runs) == ("quick, 2026-01-01" if counts else "no")


def test_the_command_that_certifies_has_the_engines_settings(tried_plugin: Path) -> None:
    plugins = discover()
    offer = next(o for o in plugins.offers("op", "rms_norm") if o.contribution.name == "tried_right")
    config = EngineConfig.create(model="demo", plugin_config={"tried": {"speed": 2}, "cpu": {"threads": 1}})
    refused = Certificates(plugins, config.with_plugin_keys(plugins.config_keys())).refusal(offer, _cpu(plugins))
    assert refused is not None
    assert "--level full --setting tried.speed=2 --json" in str(refused.fix)


def test_a_refusal_names_the_file_that_changed(tried_plugin: Path, tmp_path: Path) -> None:
    certify(discover(), order("right", level="quick"), jobs=1).write(tmp_path / "c.json")
    plugins, kernels = discover(), tried_plugin / "hp_tried" / "kernels.py"
    config = EngineConfig.create(model="demo", certificates=str(tmp_path), plugin_config=ONE_THREAD)
    offer = next(o for o in plugins.offers("op", "rms_norm") if o.contribution.name == "tried_right")
    text = kernels.read_text()
    try:
        kernels.write_text(f"{text}\n")
        refused = Certificates(plugins, config.with_plugin_keys(plugins.config_keys())).refusal(offer, _cpu(plugins))
    finally:
        kernels.write_text(text)
    assert refused is not None
    assert refused.message == "its certificate was made with other sources: hp_tried/kernels.py has changed"


def test_a_shipped_certificate_is_found_and_changes_no_hash(tried_plugin: Path) -> None:
    before = content_of(discover().record("tried")).hash
    shipped = tried_plugin / "hp_tried" / "certificates" / "cpu.json"
    certified("right").write(shipped)
    try:
        assert content_of(discover().record("tried")).hash == before
        assert standing(discover(), "tried_right", None).startswith("quick, ")
        kernels = tried_plugin / "hp_tried" / "kernels.py"
        text = kernels.read_text()
        kernels.write_text(text + "\n")
        assert standing(discover(), "tried_right", None) == "no"
        kernels.write_text(text)
    finally:
        shipped.unlink()
        shipped.parent.rmdir()


def test_code_of_core_that_a_plugin_contributes_is_part_of_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = discover().record("cuda")
    assert any(c.target.startswith("hardpoint.kernels.") for c in record.contributions)
    before = content_of(record).hash
    shutil.copytree(content._CORE, tmp_path / "hardpoint", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(content, "_CORE", tmp_path / "hardpoint")
    assert content_of(record).hash == before
    (tmp_path / "hardpoint" / "engine" / "more.py").touch()
    assert content_of(record).hash == before
    (tmp_path / "hardpoint" / "kernels" / "more.py").touch()
    assert content_of(record).hash != before
    shutil.rmtree(tmp_path / "hardpoint" / "kernels")
    with pytest.raises(PluginLoadError, match=r"cuda.*kernels"):
        content_of(record)


def test_require_certified_refuses_the_rest_and_explain_says_why(tried_plugin: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "demo", "platform": "cpu", "dtype": "float32", "certificates": str(tmp_path)}
    settings["plugin_config"] = ONE_THREAD
    free = explain(EngineConfig.create(**settings, use={"op.rms_norm": "tried_right"}))
    assert {r.certified for r in free.rows if r.chosen == "tried_right"} == {"no"}
    assert {r.certified for r in free.rows if r.plugin == "core"} == {"reference"}
    with pytest.raises(SelectionError, match="platform cpu cannot be used"):
        explain(EngineConfig.create(**settings, require_certified=True))

    certify(discover(), Order("cpu", "platform", level="full", settings=ONE_THREAD), isolated=False).write(
        tmp_path / "cpu.json"
    )
    certified("right", level="quick").write(tmp_path / "quick.json")
    refused = explain(EngineConfig.create(**settings, require_certified=True))
    rows = [r for r in refused.rows if (r.family, r.of) == ("op", "rms_norm")]
    assert {r.chosen for r in rows} == {"reference"}
    reasons = {r.offer.contribution.name: r.reasons[0] for r in rows[0].rejected}
    assert reasons["tried_right"].code == "not-certified"
    assert (reasons["tried_right"].wanted, reasons["tried_right"].supported) == ("level full or better", "quick")
    assert reasons["tried_right"].message.endswith("is of level quick")
    command = "hardpoint conform tried --family op --name tried_right --level full --json"
    assert command in str(reasons["tried_right"].fix)
    assert f"by this kit's rules (version {KIT_VERSION})" in reasons["tried_right"].message
    assert {r.plugin for r in refused.rows} == {"core", "cpu"}

    certified("right", level="full").write(tmp_path / "full.json")
    allowed = explain(EngineConfig.create(**settings, require_certified=True))
    chosen = {(r.chosen, r.certified) for r in allowed.rows if (r.family, r.of) == ("op", "rms_norm")}
    assert [name for name, _ in chosen] == ["tried_right"]
    assert all(str(level).startswith("full, ") for _, level in chosen)


# The command line.


def test_the_command_reports_and_writes_a_certificate(
    tried_plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["conform", "tried", "--setting", "cpu.threads=1", "--in-process", "--case", "*/random"]
    file = tmp_path / "new" / "c.json"
    assert hardpoint([*arguments, "--name", "tried_wrong", "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "tried_wrong" in out
    assert "[gain]" in out
    assert "failed: tried_wrong" in out
    assert "repeat" not in out, "of a check that passed there is no line"
    assert f"written to {file}; 'explain' and 'serve' read it with --certificates {file.parent}" in out
    failed = [r for r in json.loads(file.read_text())["results"] if r["outcome"] == "failed"]
    assert {fault["code"] for r in failed for fault in r["faults"]} >= {"gain"}
    assert hardpoint([*arguments, "--name", "tried_right", "--all"]) == 0
    out = capsys.readouterr().out
    assert "certifies nothing" in out
    assert "No certificate is kept" not in out, "a part of a run makes none"
    assert "float32/random values passed" in " ".join(out.split())


def test_a_report_for_the_authors(tried_plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The failures with their faults, beside the machine: all that its authors ask somebody with the hardware for."""
    file = tmp_path / "new" / "report.json"
    command = ["conform", "tried", "--name", "tried_wrong", "--setting", "cpu.threads=1", "--in-process"]
    assert hardpoint([*command, "--report", str(file)]) == 1
    report = json.loads(file.read_text())
    said = " ".join(capsys.readouterr().err.split())
    assert f"report written to {file}: {len(report['failures'])} failed checks, " in said
    assert said.endswith("send it to the authors of tried 1.0.")
    assert {fault["code"] for failure in report["failures"] for fault in failure["faults"]} >= {"gain"}
    assert report["environment"]["packages"]["hardpoint-core"] == version("hardpoint-core")
    assert report["certificate"]["summary"]["failed"] == len(report["failures"])
    assert "results" not in report["certificate"]
    assert report["not_proved"] == {}


def test_a_report_of_a_part_of_a_run(tried_plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not say what is not proved, and leaves the certificate on stdout as it is."""
    file = tmp_path / "report.json"
    command = ["conform", "tried", "--name", "tried_right", "--setting", "cpu.threads=1", "--in-process"]
    assert hardpoint([*command, "--case", "float32/random", "--json", "-", "--report", str(file)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["complete"] is False
    assert json.loads(file.read_text())["not_proved"] is None
    assert "no word on what is not proved, since this is a part of a run" in printed.err


def test_a_run_says_how_its_certificate_is_kept(tried_plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["conform", "tried", "--name", "tried_right", "--setting", "cpu.threads=1", "--in-process"]
    assert hardpoint(command) == 0
    hint, conclusion = capsys.readouterr().out.splitlines()[-2:]
    assert "--json hardpoint-certificates/tried.json keeps one" in hint
    assert conclusion.endswith("none failed")


def test_shards_on_the_command_line(tried_plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / f"{i}.json") for i in (1, 2)]
    for i, file in enumerate(files, 1):
        command = ["conform", "tried", "--name", "tried_right", "--shard", f"{i}/2", "--json", file, "--in-process"]
        assert hardpoint([*command, "--setting", "cpu.threads=1"]) == 0
    assert hardpoint(["merge-certificates", *files, "--json", str(tmp_path / "whole.json")]) == 0
    assert json.loads((tmp_path / "whole.json").read_text())["complete"]
    assert capsys.readouterr().out.rstrip().endswith("none failed")


def test_a_shard_that_holds_no_case_has_failed_in_nothing(
    tried_plugin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["conform", "tried", "--name", "tried_right", "--setting", "cpu.threads=1", "--in-process"]
    assert hardpoint([*command, "--shard", "99/99"]) == 0
    assert "shard 99/99 holds none of these cases" in capsys.readouterr().out
    assert hardpoint([*command, "--case", "nothing"]) == 1
    assert "no case has a name that --case matches" in capsys.readouterr().out


def test_what_was_tried_in_no_case_is_named(
    tried_plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = certified("right")
    other = Result("op", "rms_norm", "tried_elsewhere", "all", "claim", "unsupported", reason="another device")
    replace(found, results=(*found.results, other)).write(tmp_path / "one.json")
    assert hardpoint(["merge-certificates", str(tmp_path / "one.json"), "--json", str(tmp_path / "whole.json")]) == 1
    assert "none failed; not proved: tried_elsewhere" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown plugin 'nothing'"),
        (["tried", "--family", "linear"], "known: op"),
        (["tried", "--name", "tried_write"], "tried_"),
        (["tried", "--shard", "3/2"], "write I/N"),
        (["tried", "--level", "fast"], "'fast' is not one of"),
        (["tried", "--seed", "9" * 20], f"not in the range 0<=x<={2**63 - 1}"),
        (["tried", "--timeout", "9" * 12], "not in the range 1<=x<=86400"),
        (["tried", "--setting", "speed=1"], "PLUGIN.KEY=VALUE"),
        (["tried", "--json", "/proc/nowhere/c.json"], "--json"),
        (["tried", "--report", "/dev"], "--report: cannot write /dev: Is a directory"),
        (["tried", "--json", "/dev"], "--json: cannot write /dev: Is a directory"),
    ],
)
def test_bad_input_is_one_clear_error(
    tried_plugin: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert hardpoint(["conform", *arguments]) == 2
    assert message in capsys.readouterr().err


# pytest.


def test_the_pytest_plugin_collects_a_test_for_each_case(tried_plugin: Path, tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")

    def pytest_run(*arguments: str) -> tuple[int, str]:
        options = ["-p", "no:cacheprovider", "-rA", "--hardpoint-plugin"]
        done = run_module("pytest", [*options, *arguments], tmp_path, 200, modules=[NURSERY])
        return done.returncode, done.stdout

    code, out = pytest_run("tried", "--hardpoint-name", "tried_wrong", "-k", "own or random or empty or zeros")
    assert code == 1, out
    assert "FAILED hardpoint::op/rms_norm/tried_wrong[float32/random]" in out
    assert "PASSED hardpoint::op/rms_norm/tried_wrong[float32/zeros]" in out
    assert "[gain]" in out
    assert "test_own.py::test_own" in out
    code, out = pytest_run("tried", "--hardpoint-name", "tried_right", "--hardpoint-platform", "cuda", "-k", "not own")
    assert code == 1, out
    assert "1 skipped" in out
    assert "nothing was proved: no case could be tried here" in out


def test_the_pytest_plugin_says_what_it_cannot_use(tried_plugin: Path, tmp_path: Path) -> None:
    """One after the other in one process, which is begun once."""
    wrong = {
        "did you mean 'tried'": ["tryed"],
        "--hardpoint-timeout is a whole number from 1 to 86400, not nan": ["tried", "--hardpoint-timeout", "nan"],
        "the seed is a whole number from 0": ["tried", "--hardpoint-seed", "9" * 20],
    }
    runs = [["-p", "no:cacheprovider", "--hardpoint-plugin", *arguments] for arguments in wrong.values()]
    code, out = run_python(tmp_path, ["-c", f"import pytest\nprint([int(pytest.main(run)) for run in {runs}])"])
    assert code == 0
    assert "[4, 4, 4]" in out
    assert not [message for message in wrong if message not in out], out


def run_python(folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """The exit code and output of a Python process in ``folder``."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr

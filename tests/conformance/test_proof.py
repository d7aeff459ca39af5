"""Proof: values that were compared, for each claim, with the libraries that are installed."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardpoint.cli.main import run as hardpoint
from hardpoint.config import EngineConfig
from hardpoint.conformance.certificate import KIT_VERSION, Certificate, Certificates, merge, read_certificate
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.proof import Asked, asked_of, elsewhere, met_by, prove, tally
from hardpoint.conformance.site import Site
from hardpoint.conformance.trials import Outcome, Result, Trial
from hardpoint.conformance.worker import Bench
from hardpoint.ops.comparison import Fault
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import (
    API_VERSION,
    Contribution,
    DeviceInfo,
    LinearWorkload,
    PlatformWorkload,
    QuantSpec,
    Reason,
    Scale,
    parse_requirement,
)
from hardpoint_plugin_api.families import FAMILIES
from tests.out_of_tree.build import Dist, importable, install
from tests.support.forked import run_module

_LINEAR = """
import torch
from torch.nn import functional

import lib_gain
from hardpoint_plugin_api import LinearKernel, Reason

class Right(LinearKernel):
    @classmethod
    def supports(cls, workload, device):
        if max(workload.in_features or 0, workload.out_features or 0) > 256:
            return [Reason("width", "narrow layers alone")]  # the kit is quick with them
        plain = workload.spec is None or workload.spec[0].is_plain
        return [] if plain else [Reason("spec", "plain weights alone")]

    def apply(self, call):
        return functional.linear(call.x * lib_gain.GAIN, call.weights["weight"], call.bias)

class Never(Right):
    @classmethod
    def supports(cls, workload, device):
        return [Reason("mood", "it serves nothing today")]
"""


def _contribution(name: str, spec: str, **more: Any) -> str:
    fields = "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())
    return f"""
[[contribution]]
family = "linear"
name = "{name}"
target = "hp_proving.kernels:{"Never" if name == "never" else "Right"}"
priority = 1
summary = "A product"
requires = [{{ dtype = ["float32"] }}, {{ spec = {spec} }}, {{ symbol = "lib_gain:GAIN", from = "lib-gain" }}]
{fields}"""


_MANIFEST = (
    'schema = 1\napi = "0.2"\n[plugin]\nname = "proving"\n'
    + _contribution("right", '["float32/float32"]', platforms=["cpu"])
    + _contribution("never", '["float32/float32"]', platforms=["cpu"])
    + _contribution("overclaims", '["float32/float32", "nf4@float32:1x64/float32"]', platforms=["cpu"])
    + _contribution("elsewhere", '["float32/float32"]', platforms=["cuda"])
    + """
[[contribution]]
family = "model"
of = "ProvingForCausalLM"
name = "proving_model"
target = "hp_proving.kernels:Right"
summary = "A model without samples has no generator"
"""
)
PROVING = Dist(
    "hp-proving",
    {
        "hp_proving/__init__.py": "",
        "hp_proving/plugin.py": "",
        "hp_proving/kernels.py": _LINEAR,
        "hp_proving/hardpoint.toml": _MANIFEST,
    },
    {"proving": "hp_proving.plugin"},
)
LIBRARY = Dist("lib-gain", {"lib_gain/__init__.py": "GAIN = 1.0\n"}, version="2.0")


@pytest.fixture
def site_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The plugin and the library that it wraps, installed for one test, which may change them."""
    folder = tmp_path / "site"
    install([PROVING, LIBRARY], folder, tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    monkeypatch.chdir(tmp_path)
    with importable(folder):
        yield folder


def conform(*arguments: str) -> int:
    """In this process: a child would import torch once more."""
    return hardpoint(["conform", "proving", "--setting", "cpu.threads=1", "--in-process", *arguments])


VALUES = Result("linear", None, "acme", "one", "values", "passed", compared=4, claims=("dtype float32",))
ACME = Asked(VALUES.contribution)


# The rule, on made-up results.


@pytest.mark.parametrize(
    ("changes", "verdict", "why"),
    [
        ({}, "proved", ""),
        ({"compared": 0}, "not proved", "no case has the check 'values', which compares values"),
        ({"check": "repeat"}, "not proved", "no case has the check 'values'"),
        ({"outcome": "unsupported", "reason": "not today"}, "not proved", "not today"),
        ({"outcome": "skipped", "reason": "2 GiB are missing"}, "not proved", "2 GiB are missing"),
        ({"outcome": "failed"}, "failed", ""),
        ({"check": "hardware", "outcome": "skipped", "reason": "it is for cuda"}, "not here", "it is for cuda"),
    ],
)
def test_values_that_were_compared_are_the_proof(changes: dict[str, Any], verdict: str, why: str) -> None:
    proof = prove(ACME, tally([replace(VALUES, **changes)]))
    assert proof.verdict == verdict
    assert why in "; ".join(proof.why)


def test_a_platform_is_proved_by_what_it_computes() -> None:
    detected = Result("platform", None, "acme", "detect", "detect", "passed")
    computed = replace(detected, case="dtype/float32", check="dtype", compared=48)
    asked = Asked(detected.contribution)
    assert prove(asked, tally([detected])).verdict == "not proved"
    assert prove(asked, tally([detected, computed])).verdict == "proved"


def test_one_failure_outweighs_every_comparison() -> None:
    late = replace(VALUES, check="replay", outcome="failed", compared=0)
    assert prove(ACME, tally([VALUES, late])).verdict == "failed"


def test_a_claimed_format_needs_a_case_and_other_claims_are_listed() -> None:
    claims = ("dtype float32", "dtype float16", "spec float32/float32", "spec nf4@float32:1x64/*")
    asked = Asked(VALUES.contribution, claims, formats=claims[2:])
    plain = replace(VALUES, claims=("dtype float32", "spec float32/float32"))
    proof = prove(asked, tally([plain]))
    assert proof.verdict == "not proved"
    assert proof.why == (
        "no case is for the claimed spec nf4@float32:1x64/*; leave the claim out, or see that it is tried",
    )
    refused = replace(
        VALUES, check="claim", outcome="unsupported", compared=0, claims=(claims[3],), reason="no nf4 here"
    )
    proof = prove(asked, tally([plain, refused]))
    assert proof.verdict == "proved", "what the target itself refuses here is never given to it either"
    assert proof.untried == ("dtype float16", claims[3])


def test_batch_invariance_is_proved_by_its_own_check() -> None:
    asked = Asked(VALUES.contribution, ("feature batch_invariant",))
    assert prove(asked, tally([VALUES])).untried == ("feature batch_invariant",)
    assert prove(asked, tally([VALUES, replace(VALUES, check="batch-invariant")])).untried == ()


def test_claims_are_read_from_the_manifest_and_met_by_workloads() -> None:
    tables: list[dict[str, object]] = [
        {"dtype": ["float32", "bfloat16"]},
        {"spec": ["bfloat16/bfloat16", "int8@float32:row/*float??"]},
        {"feature": ["batch_invariant"]},
        {"arch": ["sm_90*"]},
    ]
    requires = tuple(parse_requirement(table, FAMILIES["linear"], "here") for table in tables)
    kernel = Contribution("linear", "acme", "acme:K", requires=requires)
    cpu = DeviceInfo("cpu", "a CPU", "cpu", "x86_64", memory_bytes=2**30, dtypes=frozenset({"float32"}))
    asked = asked_of(kernel, cpu)
    assert asked.claims == (
        *("dtype float32", "dtype bfloat16"),
        *("spec bfloat16/bfloat16", "spec int8@float32:row/*float??", "feature batch_invariant"),
    )
    assert asked.formats == ("spec int8@float32:row/*float??",), "a device without bfloat16 cannot be asked for it"
    spec = QuantSpec("int8", scales=(Scale("float32", (1, -1)),)), QuantSpec("float32")
    met = met_by(kernel, LinearWorkload(dtype="float32", spec=spec), cpu, API_VERSION)
    assert met == ("dtype float32", "spec int8@float32:row/*float??")
    reason = elsewhere(kernel, cpu, API_VERSION, PlatformWorkload())
    assert reason is not None
    assert reason.code == "arch"


def test_the_compact_form_says_the_same_and_merges() -> None:
    asked = (Asked(VALUES.contribution, ("dtype float32", "dtype float16")),)
    failed: Outcome = "failed"
    results = (
        VALUES,
        replace(VALUES, case="two", measured={"peak": (1.0, 4.0)}),
        replace(VALUES, name="other", outcome=failed),
    )
    whole = _made_up(results, asked)
    compact = whole.compact()
    assert compact.results == ()
    assert [p.to_json() for p in compact.proofs] == [p.to_json() for p in whole.proofs]
    assert compact.outcomes == whole.outcomes == Counter(passed=2, failed=1)
    parts = [replace(_made_up(results[i : i + 2], asked), shards=(i // 2 + 1,), num_shards=2) for i in (0, 2)]
    joined = merge([parts[0].compact(), parts[1]])
    assert joined.tallies == whole.tallies
    assert joined.is_complete


@pytest.mark.parametrize("form", [lambda c: c, Certificate.compact])
def test_both_forms_are_read_as_they_were_written(form: Callable[[Certificate], Certificate], tmp_path: Path) -> None:
    written = form(_made_up((VALUES, replace(VALUES, check="claim", outcome="unsupported", reason="no")), (ACME,)))
    written.write(tmp_path / "c.json")
    read = read_certificate(tmp_path / "c.json")
    assert read.to_json() == written.to_json()
    assert read.proves(*VALUES.contribution)
    data = json.loads((tmp_path / "c.json").read_text())
    assert data["kit_version"] == KIT_VERSION == 11
    assert data["proofs"][0]["verdict"] == "proved"
    assert ("results" in data) != ("checks" in data)


def test_a_certificate_with_failures_is_read(tmp_path: Path) -> None:
    failed = replace(VALUES, outcome="failed", faults=(Fault("peak", "output 0", "is wrong"),))
    _made_up((failed,), ()).write(tmp_path / "c.json")
    (read,) = read_certificate(tmp_path / "c.json").results
    assert read.faults == failed.faults


def _made_up(results: tuple[Result, ...], asked: tuple[Asked, ...]) -> Certificate:
    return Certificate(
        plugin={"name": "acme", "version": "1.0", "content_hash": "0" * 64},
        device={"platform": "cpu", "name": "a CPU", "arch": "x86_64", "isa": "avx2", "driver": None},
        level="full",
        seed=0,
        results=results,
        created="2026-01-01T00:00:00Z",
        case_list="0" * 16,
        asked=asked,
    )


def test_a_pattern_that_is_refused_as_a_whole_was_asked_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def trials(self, subject: object, plan: object) -> Iterator[Trial]:
            yield Trial("spec/nf4", unsupported=Reason("spec", "no nf4 here"), claims=("spec nf4/*",))

    monkeypatch.setattr("hardpoint.conformance.worker.generator_for", lambda plugins, offer: Refusing())
    offer = next(o for o in site.plugins.offers("linear") if o.contribution.name == "torch")
    bench = Bench(site.plugins, offer, ("cpu",), Plan(), {"cpu": {"threads": 1}})
    (result,) = bench.run("spec/nf4")
    assert (result.check, result.outcome, result.claims) == ("claim", "unsupported", ("spec nf4/*",))


def test_a_trial_is_let_go_once_it_ran(site: Site) -> None:
    """It holds a kernel and all that was drawn for it; a contribution has over a thousand."""
    offer = next(o for o in site.plugins.offers("linear") if o.contribution.name == "torch")
    bench = Bench(site.plugins, offer, ("cpu",), Plan(), {"cpu": {"threads": 1}})
    case, *others = bench.cases
    trial = weakref.ref(bench._trials[case])
    assert all(result.outcome != "failed" for result in bench.run(case))
    gc.collect()
    assert trial() is None
    assert bench.cases == [case, *others]


# A plugin, as its author runs the kit.


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("never", "it serves nothing today"),
        ("overclaims", "no case is for the claimed spec nf4@float32:1x64/float32"),
        (
            "proving_model",
            "the kit has no trials for model ProvingForCausalLM: neither Transformers nor a plugin has a reference",
        ),
    ],
)
def test_what_is_not_proved_fails_the_run_and_says_why(
    site_folder: Path, name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conform("--name", name, "--json", "c.json") == 1
    said = " ".join(capsys.readouterr().out.split())
    if name == "overclaims":
        assert f"none failed; not proved: {name}" in said
    proof = json.loads((tmp_path / "c.json").read_text())["proofs"][0]
    assert proof["verdict"] == "not proved"
    assert why in "; ".join(proof["why"])


def test_a_kernel_for_other_hardware_fails_no_run_of_the_rest(
    site_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conform("--platform", "cpu", "--family", "linear", "--name", "elsewhere") == 1
    assert "nothing was proved: no case could be tried here" in capsys.readouterr().out
    manifest = site_folder / "hp_proving" / "hardpoint.toml"
    kept = [part for part in manifest.read_text().split("[[contribution]]") if '"never"' not in part]
    kept = [part for part in kept if "nf4" not in part and "proving_model" not in part]
    manifest.write_text("[[contribution]]".join(kept))
    assert conform("--json", "c.json", "--compact") == 0
    assert "not tried: elsewhere (" in capsys.readouterr().out
    proofs = json.loads((tmp_path / "c.json").read_text())["proofs"]
    assert [(p["name"], p["verdict"]) for p in proofs] == [("right", "proved"), ("elsewhere", "not here")]
    assert (tmp_path / "c.json").stat().st_size < 20_000, "small enough to ship"


def test_explain_and_require_certified_follow(site_folder: Path, tmp_path: Path) -> None:
    assert conform("--family", "linear", "--level", "quick", "--json", "hardpoint-certificates/linear.json") == 1
    plugins = discover()
    settings = {"cpu": {"threads": 1}}
    config = EngineConfig.create(model="demo", plugin_config=settings).with_plugin_keys(plugins.config_keys())
    certificates = Certificates(plugins, config)
    offers = {o.contribution.name: o for o in plugins.offers("linear") if o.plugin == "proving"}
    made = read_certificate(tmp_path / "hardpoint-certificates" / "linear.json").device
    device = DeviceInfo("cpu", "a CPU", "cpu", str(made["arch"]), memory_bytes=2**30, isa=made["isa"])
    assert str(certificates.standing(offers["right"], device)).startswith("quick, ")
    assert str(certificates.standing(offers["overclaims"], device)) == "not proved"
    refused = certificates.refusal(offers["overclaims"], device)
    assert refused is not None
    assert refused.code == "not-proved"
    assert ", and not proved: no case is for the claimed spec nf4" in refused.message


def test_a_certificate_counts_for_the_library_that_it_was_made_with(site_folder: Path, tmp_path: Path) -> None:
    assert conform("--name", "right", "--json", "hardpoint-certificates/right.json") == 0
    plugins = discover()
    settings = {"cpu": {"threads": 1}}
    config = EngineConfig.create(model="demo", plugin_config=settings).with_plugin_keys(plugins.config_keys())
    offer = next(o for o in plugins.offers("linear") if o.contribution.name == "right")
    made = read_certificate(tmp_path / "hardpoint-certificates" / "right.json")
    assert made.wrapped["lib-gain"].version == "2.0"
    device = DeviceInfo("cpu", "a CPU", "cpu", str(made.device["arch"]), memory_bytes=2**30, isa=made.device["isa"])

    def standing() -> str:
        return str(Certificates(plugins, config).standing(offer, device))

    assert standing().startswith("quick, ")
    library = site_folder / "lib_gain" / "__init__.py"
    library.write_text("GAIN = 1.5\n")
    assert standing() == "no"
    refused = Certificates(plugins, config).refusal(offer, device)
    assert refused is not None
    assert "another library than is installed: the files of lib-gain 2.0 are not those" in refused.message
    library.write_text("GAIN = 1.0\n")
    assert standing().startswith("quick, ")
    library.unlink()
    library.symlink_to("/proc/self/mem")  # what cannot be read is not what was tried
    assert standing() == "no"


def test_pytest_fails_for_what_is_not_proved(site_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    options = ["-p", "no:cacheprovider", "--hardpoint-plugin", "proving", "--hardpoint-name", "never", "test_own.py"]
    done = run_module("pytest", options, tmp_path, 200, modules=["hardpoint.conformance.nursery"])
    assert done.returncode == 1, done.stdout
    assert "linear: never: not proved: it serves nothing today" in done.stdout

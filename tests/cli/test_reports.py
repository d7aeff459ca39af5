"""The commands that report: plugins, env, explain and ops, and a whole run of generate on the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint.bench.startup import _STAGES
from hardpoint.cli import env as _env  # noqa: F401  # imported, so that its module can be patched by name
from hardpoint.cli.explain import _losers, _subject, _summary
from hardpoint.cli.main import run
from hardpoint.plugin_host import PluginRecord, PluginSet, discover
from hardpoint.terminal.output import print_table
from hardpoint_plugin_api import DeviceInfo, Reason, parse_manifest
from tests.support.checkpoints import write_checkpoint

MANIFEST = """
schema = 1
api = "0.2"
[plugin]
name = "acme"
[[contribution]]
family = "platform"
name = "acme"
target = "absent_acme.platform:Platform"
[[contribution]]
family = "op"
of = "rms_norm"
name = "acme_rms_norm"
target = "absent_acme.ops:rms_norm"
requires = [{ package = "absent-acme-kernels>=2" }]
"""


@pytest.fixture
def _acme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plugins: one whose code is not there, one that is refused."""

    def discover(**options: object) -> PluginSet:
        good = PluginRecord("acme", "hardpoint-acme", "1.2", "absent_acme", manifest=parse_manifest(MANIFEST, "acme"))
        bad = PluginRecord("old", "hardpoint-old", "0.1", "absent_old")
        bad.refuse(Reason("api-too-old", "built for another API", fix="upgrade the plugin"))
        return PluginSet([good, bad])

    for module in ("plugins", "env", "ops"):
        monkeypatch.setattr(f"hardpoint.cli.{module}.discover", discover)


@pytest.mark.parametrize("columns", ["", "0", "wide"])
def test_a_table_in_a_file_has_whole_rows(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_table(["name", "why"], [["a", "word " * 100 + "end"], ["b", None]], title="a title longer than a name")
    title, _, head, _, a, b, *rest = capsys.readouterr().out.split("\n")
    assert (title, head.split(), a.split()) == (
        "a title longer than a name",
        ["name", "why"],
        ["a", *["word"] * 100, "end"],
    )
    assert b == " b", "no blanks at the end"
    assert rest == ["", ""]


def test_a_table_in_a_file_follows_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    print_table(["name", "why"], [["a", "word " * 100]])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 50
    assert sum(line.count("word") for line in lines) == 100
    many = [f"column {number}" for number in range(9)]
    print_table(many, [[f"value {number}" for number in range(9)]])
    out = capsys.readouterr().out
    assert all(f"column {number}" in out and f"value {number}" in out for number in range(9)), "nothing is cut off"


@pytest.mark.usefixtures("_acme")
def test_plugins_are_listed_with_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "list"]) == 0
    acme, old = (line for line in capsys.readouterr().out.splitlines() if "hardpoint-" in line)
    assert acme.split()[:5] == ["acme", "1.2", "hardpoint-acme", "0.2", "ready"]
    assert "platform 1, op 1" in acme
    assert all(word in old for word in ("refused", "built for another API", "upgrade the plugin"))
    assert run(["plugins", "list", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [plugin["status"] for plugin in data] == ["ready", "refused"]
    assert data[0]["contributes"][1]["name"] == "acme_rms_norm"


@pytest.mark.usefixtures("_acme")
def test_env_says_what_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["hardpoint-core"]
    assert report["packages"]["absent-acme-kernels"] is None
    (platform,) = report["platforms"]
    assert platform["platform"] == "acme"
    assert "absent_acme" in platform["problem"]
    assert run(["env"]) == 0
    assert "hardpoint plugins list" in capsys.readouterr().out


def test_env_of_this_machine_has_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hardpoint_cpu")
    assert run(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert any(platform.get("present") for platform in report["platforms"])
    assert {plugin["status"] for plugin in report["plugins"] if plugin["name"] in ("core", "cpu")} == {"ready"}
    assert run(["env"]) == 0


def test_ops_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ops", "list"]) == 0
    assert "rms_norm" in capsys.readouterr().out
    assert run(["ops", "show", "rms_norm"]) == 0
    shown = capsys.readouterr().out
    assert "rms_norm(x: torch.Tensor" in shown
    assert "mutates: nothing" in shown
    assert "aliases: nothing" in shown
    assert "cases:   random, " in shown
    assert "reference" in shown
    assert run(["ops", "show", "rms_nrom"]) == 2
    assert "did you mean 'rms_norm'" in capsys.readouterr().err


def test_a_losers_reasons_stand_wanted_beside_supported() -> None:
    row = {
        "family": "op",
        "of": "rms_norm",
        "workload": "dtype=bfloat16 args=Args(a=1, b=2) head_size=64",
        "rejected": [
            {
                "name": "acme",
                "plugin": "acme",
                "reasons": [
                    {"message": "dtype not supported", "wanted": "bfloat16", "supported": "float16", "fix": "f"}
                ],
            }
        ],
    }
    assert _subject(row) == "op rms_norm\n  dtype=bfloat16\n  head_size=64"
    assert _losers(row).splitlines() == [
        "acme (acme)",
        "  dtype not supported",
        "    wanted bfloat16 | supported float16",
        "    fix: f",
    ]


def row_of(workload: str, range: str = "any", **changes: object) -> dict[str, object]:
    return {
        "family": "linear",
        "of": None,
        "workload": workload,
        "range": range,
        "chosen": "best",
        "plugin": "acme",
        "certified": "no",
        "rule": "priority",
        "rejected": [],
        **changes,
    }


def test_a_summary_has_a_line_for_what_is_served_alike() -> None:
    two = [row_of("n=2", "1-8"), row_of("n=2", "9+", chosen="torch", plugin="core", certified="reference")]
    rows = [row_of("n=1"), *two, row_of("n=3"), row_of("n=4", rule="tuning file", measured="32 us\nat 1 token")]
    heads, *lines = _summary(rows, 100)
    assert heads.split() == ["for", "tokens", "chosen", "certified", "rule"]
    assert [line.split() for line in lines[:4]] == [
        ["linear", "x2", "any", "best", "(acme)", "no", "priority"],
        ["linear", "1-8", "best", "(acme)", "no", "priority"],
        ["9+", "torch", "(core)", "reference", "priority"],
        ["linear", "any", "best", "(acme)", "no", "tuning", "file"],
    ]
    assert lines[4:] == ["", "linear: best: 32 us...", "all reasons: --all; for programs: --json"]
    assert _summary(rows, None)[6] == "linear: best: 32 us at 1 token"
    narrow = _summary([row_of("n=1", chosen="a_name_of_many_letters"), *two], 48)
    assert max(map(len, narrow[:3])) <= 48
    assert "a_name_o..." in narrow[1]


def test_a_summary_gives_the_reasons_that_are_of_use() -> None:
    def against(name: str, *codes: str, **more: str) -> dict[str, object]:
        return {
            "name": name,
            "plugin": "p",
            "reasons": [{"code": code, "message": f"{code}!", **more} for code in codes],
        }

    rejected = [
        against("far", "platform", "package-missing"),
        against("later", "comes-after"),
        against("other", "package-missing", "spec"),
        against("near", "package-missing", fix="pip install it"),
        against("picky", "head-size"),
    ]
    notes = _summary([row_of("n=1", rejected=rejected), row_of("n=2", rejected=rejected)], 100)[3:-1]
    assert notes == ["linear: not near: package-missing!; fix: pip install it", "linear: not picky: head-size!"]
    many = [row_of(f"n={i}", chosen=f"c{i}", rejected=[against(f"near{i}", "head-size")]) for i in range(80)]
    *_, cut, _ = _summary(many, 100)
    assert cut == "75 more reasons"


def test_a_summary_marks_who_was_not_asked() -> None:
    lines = _summary([row_of("n=1", not_asked="it cannot be imported here: No module named 'acme_kernels'")], 100)
    assert lines[1].split() == ["linear", "any", "best", "(acme)?", "no", "priority"]
    assert lines[3].startswith("? linear: best was not asked whether it supports this: it cannot be imported here: No")


def test_explain_answers_for_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hardpoint_cpu")
    assert run(["explain", "--platform", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {"platform", "model", "attention"} <= {row["family"] for row in rows}
    assert run(["explain", "--platform", "cpu"]) == 0
    short = capsys.readouterr().out
    assert "selection digest" in short
    assert len(short.splitlines()) <= 60
    assert "..." not in short, "nothing is cut where the output is no terminal"
    assert {line.split()[0] for line in short.splitlines() if line} >= {row["family"] for row in rows}
    assert run(["explain", "--platform", "cpu", "--all"]) == 0
    full = capsys.readouterr().out
    reasons = {reason["message"] for row in rows for loser in row["rejected"] for reason in loser["reasons"]}
    assert all(reason in full for reason in reasons)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a layer of experts."""
    folder = tmp_path_factory.mktemp("experts")
    write_checkpoint(folder, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    return folder


@pytest.mark.parametrize("model", ["demo", "experts"])
@pytest.mark.parametrize("options", [[], ["--quantization", "fp8"]], ids=["plain", "fp8"])
@pytest.mark.parametrize("preset", sorted(discover().devices()))
def test_a_summary_fits_a_screen(
    preset: str,
    options: list[str],
    model: str,
    experts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["explain", str(experts) if model == "experts" else model, "--device", preset, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--communicator", "nope"], "unknown communicator implementation 'nope'; known: "),
        (["--experts-backend", "referense"], "unknown experts implementation 'referense'; did you mean 'reference'"),
        (["--tool-parser", "nope"], "Asked for by --tool-parser."),
        (["--use", "op.moe_permute=nope"], "unknown op moe_permute implementation 'nope'"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_though_nothing_asks_for_it(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hardpoint_cpu")
    assert run(["explain", "--platform", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


_CUDA = "Plugin cuda has it, and is left out by --plugins: add cuda to --plugins."


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--use", "attention=cuda_hopper_latent"], f"Asked for by --use attention. {_CUDA}"),
        (["--attention-backend", "cuda_hopper_latent"], f"Asked for by --attention-backend. {_CUDA}"),
        (["--deny", "attention=cuda_hopper_latent"], f"It stands in --deny. {_CUDA}"),
        (["--platform", "cuda"], f"unknown platform 'cuda'; known: cpu. {_CUDA}"),
        (["--device", "h100"], _CUDA),
        (
            ["--use", "linear=triton_int8_gemm"],
            "Plugins cuda, rocm, xpu have it, and are left out by --plugins: add one of them to --plugins.",
        ),
    ],
)
def test_a_choice_of_a_plugin_that_is_left_out_names_the_plugin(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cpu", "cuda", "rocm", "xpu"):
        pytest.importorskip(f"hardpoint_{name}")
    assert run(["explain", "--plugins", "cpu", *options]) == 2
    assert capsys.readouterr().err.rstrip().endswith(told)
    assert run(["explain", "--plugins", "cpu", "--use", "attention=nobodys"]) == 2
    assert "Plugin" not in capsys.readouterr().err


def test_a_choice_that_decides_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("hardpoint_cpu")
    used = ["--use", "op.rms_norm=reference", "--linear-backend", "torch", "--tool-parser", "none"]
    assert run(["explain", "--platform", "cpu", *used]) == 0
    assert not caplog.records
    assert run(["explain", "--platform", "cpu", "--experts-backend", "reference"]) == 0
    assert "--experts-backend reference has no effect: nothing in this model asks for experts" in caplog.text


def test_generate_runs_the_demo_model_and_marks_its_stages(tmp_path: Path) -> None:
    pytest.importorskip("hardpoint_cpu")
    stages = tmp_path / "stages.json"
    options = ["--prompt", "Once", "--max-tokens", "4", "--platform", "cpu", "--kv-cache-memory", "16MiB"]
    done = subprocess.run(
        [sys.executable, "-m", "hardpoint.cli", "generate", *options, "--stages", str(stages)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "tokens/s" in done.stderr
    marks = json.loads(stages.read_text())
    assert list(marks) == list(_STAGES)
    assert sorted(marks.values()) == list(marks.values())


@pytest.mark.parametrize("answer", [None, 3])
def test_env_reports_a_platform_that_answers_nonsense(
    answer: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = pytest.importorskip("hardpoint_cpu.platform").CpuPlatform
    monkeypatch.setattr(cpu, "detect", classmethod(lambda cls: answer))
    assert run(["env", "--json"]) == 0
    (platform,) = (p for p in json.loads(capsys.readouterr().out)["platforms"] if p["platform"] == "cpu")
    assert platform["problem"] == f"detect() of CpuPlatform, plugin cpu, must return DeviceInfo or Reason, got {answer}"
    assert run(["generate", "--platform", "cpu", "--prompt", "x"]) == 2
    assert (
        f"cpu: detect() of CpuPlatform, plugin cpu, must return DeviceInfo or Reason, got {answer}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", ""], "unknown device ''; known: toy-1"),
        (
            ["--device", "toy-1", "--platform", "cpu"],
            "--device toy-1 is a device of the platform 'toy', and --platform asks for 'cpu'",
        ),
        (["--device", "toy"], "unknown device 'toy'; did you mean 'toy-1'? Known: toy-1. 'toy' is a platform; on this"),
        (["--device", "toy-1", "--use", "platform=cpu"], "of the platform 'toy', and --use platform asks for 'cpu'"),
    ],
)
def test_explain_refuses_a_preset_that_does_not_fit(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PluginSet, "devices", lambda self: {"toy-1": DeviceInfo("toy", "toy-1", "toy", "toy")})
    assert run(["explain", *args]) == 2
    assert message in capsys.readouterr().err

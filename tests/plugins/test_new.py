"""``hardpoint plugins new``: what it refuses, and that what it writes installs, is chosen, and computes rightly."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from filelock import FileLock

from hardpoint.authoring.scaffold import LANGUAGES, TEMPLATED, UNTEMPLATED, Recipe, write
from hardpoint.cli.main import run
from hardpoint_plugin_api import API_VERSION, FAMILIES, parse_manifest
from tests.support.environment import Environment
from tests.support.simulated import CACHE

ROOT = Path(__file__).resolve().parents[2]
ALL = ",".join(TEMPLATED)
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Acme"], "'Acme' cannot be a plugin's name: use lower-case letters"),
        (["2fast"], "a letter first, such as acme"),
        (["my-kernels"], "'my-kernels' cannot be a plugin's name"),
        (["core"], "a plugin named 'core' is installed already: hardpoint-core"),
        (["acme", "--families", "op,atention"], "unknown family 'atention'; did you mean 'attention'?"),
        (["acme", "--families", "model"], "'model': models are built from core's layers: start from a file of"),
        (["acme", "--families", ","], "--families is empty; choose among op, attention"),
        (["acme", "--language", "tritn"], "unknown language 'tritn'; did you mean 'triton'?"),
        (
            ["acme", "--families", "platform", "--language", "cpp"],
            "the templates of platform have no kernels",
        ),
        (["acme", "--folder", "taken"], "taken exists already and is not empty; choose another with --folder"),
        (["acme", "--folder", "taken/file"], "taken/file exists already"),
        (["acme", "--folder", "taken/file/deeper"], "cannot write taken/file/deeper"),
    ],
)
def test_bad_input_is_one_error_and_writes_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    assert run(["plugins", "new", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["taken", "taken/file"]


def test_it_says_what_it_wrote_and_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plugins", "new", "acme_2", "--families", "op, linear"]) == 0
    out = capsys.readouterr().out
    written = [line.strip() for line in out.splitlines() if line.startswith("  ")]
    assert sorted(written) == sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert "pip install -e 'hardpoint-acme-2[test]', then hardpoint conform acme_2" in out


def recipes(pairs: bool) -> list[Recipe]:
    """Every language with each family, all of them, and perhaps each pair of families."""
    with_kernels = set(TEMPLATED[:4])
    families = [*combinations(TEMPLATED, 1), TEMPLATED]
    if pairs:
        families += [pair for pair in combinations(TEMPLATED, 2) if with_kernels & set(pair) or "parser" in pair[1]]
    wanted = [(f, name) for name in LANGUAGES for f in families if name == "torch" or with_kernels & set(f)]
    return [Recipe.create(f"p{i}", f, language) for i, (f, language) in enumerate(wanted)]


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["part", "whole"])
def test_everything_it_writes_is_well_formed(tmp_path: Path, pairs: bool) -> None:
    """Python that parses and is as ruff likes it, TOML, a manifest that holds what was asked for."""
    for recipe in recipes(pairs):
        folder = tmp_path / recipe.distribution
        paths = write(recipe, folder)
        for path in paths:
            text = path.read_text()
            assert not [mark for mark in ("{%", "{#", "{{") if mark in text], path
            if path.suffix in (".py", ".pyi"):
                ast.parse(text)
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        assert project["project"]["entry-points"]["hardpoint.plugins"] == {recipe.name: f"{recipe.package}.plugin"}
        assert set(project["tool"]["setuptools"]["package-data"]) == {recipe.package}
        manifest = parse_manifest((folder / "src" / recipe.package / "hardpoint.toml").read_text(), str(folder))
        assert (manifest.name, manifest.api) == (recipe.name, API_VERSION)
        assert {c.family for c in manifest.contributions} == set(recipe.families)
        for contribution in manifest.contributions:
            module, _, attribute = contribution.target.partition(":")
            source = (folder / "src" / f"{module.replace('.', '/')}.py").read_text()
            body = ast.parse(source).body
            assigned = {ast.unparse(target) for node in body if isinstance(node, ast.Assign) for target in node.targets}
            assert attribute in assigned | {getattr(node, "name", None) for node in body}
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--quiet", "--isolated", "--line-length", "120", tmp_path], check=True)
    subprocess.run([*ruff, "format", "--quiet", "--check", tmp_path], check=True)


def test_there_is_a_template_or_a_word_for_every_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each family is written, or refused with what to do instead; and the help names those that are written."""
    assert set(TEMPLATED) | set(UNTEMPLATED) == set(FAMILIES)
    for family in FAMILIES:
        code = run(["plugins", "new", "acme", "--families", family, "--folder", str(tmp_path / family)])
        said = capsys.readouterr()
        if family in UNTEMPLATED:
            assert code == 2
            assert UNTEMPLATED[family] in said.err
        else:
            assert code == 0
            manifest = (tmp_path / family / "src/hardpoint_acme/hardpoint.toml").read_text()
            assert {c.family for c in parse_manifest(manifest, family).contributions} == {family}
            assert f"| {family}" in (tmp_path / family / "README.md").read_text()
    assert run(["plugins", "new", "--help"]) == 0
    assert ", ".join(TEMPLATED) in " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    with Environment.create(tmp_path_factory.mktemp("environment")).forking() as environment:
        yield environment


def check(environment: Environment, folder: Path, command: str) -> str:
    done = environment.run(command, folder)
    assert done.returncode == 0, done.stdout
    return done.stdout


def install(environment: Environment, folder: Path, name: str, families: str, language: str) -> Path:
    """Write a plugin and install it editable, as its author would."""
    check(environment, folder, f"hardpoint plugins new {name} --families {families} --language {language}")
    project = folder / f"hardpoint-{name}"
    check(environment, project, "pip install -e '.[test]'")
    listed = check(environment, project, "hardpoint plugins list")
    (line,) = (line for line in listed.splitlines() if f"hardpoint-{name}" in line)
    assert line.split()[:5] == [name, "0.1.0", f"hardpoint-{name}", str(API_VERSION), "ready"]
    return project


NAMES = {"torch": "plain", "triton": "interpreted", "cpp": "compiled"}
Installed = Callable[[str], Path]


@pytest.fixture(scope="module")
def installed(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A plugin of every family in the language that is asked for, by the name in NAMES; each is installed once."""

    @cache
    def of(language: str) -> Path:
        if language == "cpp" and not COMPILER:
            pytest.skip("no C++ compiler")
        return install(environment, tmp_path_factory.mktemp(language), NAMES[language], ALL, language)

    return of


@pytest.fixture
def plain(installed: Installed) -> Path:
    """The one in plain PyTorch."""
    return installed("torch")


def test_a_plugin_of_every_family_serves_an_engine(environment: Environment, plain: Path) -> None:
    """Its own tests: an engine with prepared steps, and one that quantizes."""
    assert "2 passed" in check(environment, plain, "pytest -o addopts= -q")


TRITON = pytest.param("triton", marks=pytest.mark.nightly)
"""Its kernels run in its interpreter, which takes a minute."""
CASES = {
    "op": "float32/random",
    "layer": "float32/*/tokens-7",
    "linear": "float32/*/odd/*/bias",
    "attention": "float32/kv-float32/*/decode/*",
}


def conform(environment: Environment, project: Path, name: str, cases: Mapping[str, str]) -> None:
    """Have each family's cases conform."""
    for family, case in cases.items():
        command = f"hardpoint conform {name} --platform cpu --in-process --family {family} --case '{case}'"
        assert "checks passed, none failed" in check(environment, project, f"TRITON_INTERPRET=1 {command}"), family


@pytest.mark.parametrize("language", ["torch", pytest.param("cpp", marks=pytest.mark.nightly), TRITON])
def test_a_part_of_its_kernels_cases_conforms(environment: Environment, installed: Installed, language: str) -> None:
    conform(environment, installed(language), NAMES[language], CASES)


@pytest.mark.nightly
def test_all_cases_of_an_interpreted_kernel_conform(environment: Environment, installed: Installed) -> None:
    """In every dtype that the manifest claims: the interpreter's own errors in bfloat16 are not the author's."""
    command = f"TRITON_INTERPRET=1 hardpoint conform {NAMES['triton']} --platform cpu --family op"
    assert "checks passed, none failed" in check(environment, installed("triton"), command)


@pytest.mark.parametrize("language", [pytest.param("torch", marks=pytest.mark.nightly), "cpp", TRITON])
def test_it_generates_what_an_engine_without_it_does(
    environment: Environment, installed: Installed, language: str
) -> None:
    project, name = installed(language), NAMES[language]
    command = "TRITON_INTERPRET=1 hardpoint generate demo --platform cpu --dtype float32 --prompt Hello --max-tokens 8"
    uses = f"--use op.rms_norm={name}_rms_norm --use layer.norm={name}_norm --attention-backend {name}_paged"
    told = check(environment, project, f"{command} --temperature 0 --plugins cpu 2>/dev/null")
    chosen = f"{uses} --linear-backend {name}_linear"
    assert check(environment, project, f"{command} --temperature 0 {chosen} 2>/dev/null") == told


def test_what_is_no_kernel_conforms(environment: Environment, plain: Path) -> None:
    families = ("element", "quantization", "tool_parser", "reasoning_parser", "all2all")
    conform(environment, plain, "plain", dict.fromkeys(families, "*"))


@pytest.mark.nightly  # and a part of ``make lint``: mypy reads torch and core for it, which takes a minute
def test_it_is_typed(tmp_path: Path) -> None:
    """mypy --strict, of all families in each language; nothing has to be compiled or run for that."""
    cache = CACHE / "mypy"  # outlives sessions: reading torch and core takes half a minute
    cache.mkdir(parents=True, exist_ok=True)
    for language in LANGUAGES:
        write(Recipe.create(f"typed_{language}", TEMPLATED, language), tmp_path / f"typed_{language}")
    # All at once, for mypy reads torch and core once then. Folders ``tests`` are told apart by their projects.
    parts = [folder / part for folder in tmp_path.iterdir() for part in ("src", "tests")]
    settings = ["--explicit-package-bases", "--config-file", str(tmp_path / "typed_triton/pyproject.toml")]
    command = [sys.executable, "-m", "mypy", "--strict", *settings, "--cache-dir", str(cache), *map(str, parts)]
    variables = os.environ | {"MYPYPATH": os.pathsep.join(str(part) for part in parts if part.name == "src")}
    with FileLock(cache / "lock"):
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert "Success: no issues found" in done.stdout, done.stdout


def test_its_compiled_variant_serves_an_engine(environment: Environment, installed: Installed) -> None:
    project = installed("cpp")
    (library,) = (project / "src/hardpoint_compiled").glob("_kernels*.so")
    assert library.name == "_kernels.abi3.so", "one binary for every CPython"
    assert "2 passed" in check(environment, project, "pytest -o addopts= -q")
    code = "from hardpoint_compiled import _kernels\ntry: _kernels.rms_norm(1)\nexcept TypeError as e: print(e)\n"
    code += "try: _kernels.rms_norm(*'123456789')\nexcept TypeError as e: print(e)\n"
    said = check(environment, project, f'python -c "{code}"').splitlines()
    assert said[0] == "expected 9 arguments, got 1"
    assert len(said) == 2


def test_its_compiled_kernels_are_replayed(environment: Environment, installed: Installed) -> None:
    """On the CPU's own platform, which records decode steps, and knows nothing of kernels that a plugin compiled."""
    project = installed("cpp")
    code = (
        "from hardpoint import LLM, SamplingParams\n"
        "use = {'linear': 'compiled_linear', 'op.rms_norm': 'compiled_rms_norm'}\n"
        "with LLM(platform='cpu', plugins='cpu,compiled', use=use) as llm:\n"
        "    llm.generate('The whale', SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))\n"
        "    print(llm.config.deny, llm.metrics.value('hardpoint_graph_replays_total'))\n"
    )
    (project / "replay.py").write_text(code)
    assert check(environment, project, "python replay.py").splitlines()[-1] == "() 4.0"


@pytest.mark.nightly
@pytest.mark.parametrize("language", ["torch", "cpp"])
def test_every_kernel_of_it_conforms(environment: Environment, tmp_path: Path, language: str) -> None:
    if language == "cpp" and not COMPILER:
        pytest.skip("no C++ compiler")
    project = install(environment, tmp_path, f"right{language}", ALL, language)
    assert "checks passed, none failed" in check(environment, project, f"hardpoint conform right{language}")


def test_the_wheels_hold_the_templates_and_the_frozen_versions(environment: Environment, tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "demo_model")
    for package in ("core", "plugin_api"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    check(environment, tmp_path, "pip wheel --wheel-dir out ./core ./plugin_api")
    shipped = {name for wheel in (tmp_path / "out").iterdir() for name in zipfile.ZipFile(wheel).namelist()}
    for folder in ("core/src/hardpoint/authoring/template", "plugin_api/src/hardpoint_plugin_api/api"):
        source = ROOT / folder
        for path in source.rglob("*.j*"):
            assert str(path.relative_to(source.parents[source.parts[::-1].index("src") - 1])) in shipped

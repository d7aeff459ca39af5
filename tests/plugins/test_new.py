"""``hardpoint plugins new``: what it refuses, and that what it writes installs, is chosen, and computes rightly."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from itertools import combinations
from pathlib import Path

import pytest

from hardpoint.cli.main import run
from hardpoint.plugins.scaffold import LANGUAGES, TEMPLATED, Recipe, write
from hardpoint_plugin_api import API_VERSION, FAMILIES, parse_manifest
from tests.support.environment import Environment

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
        (["acme", "--families", "runner"], "there is no template for the family 'runner' yet; there are op, attention"),
        (["acme", "--families", ","], "--families is empty; choose among op, attention"),
        (["acme", "--language", "tritn"], "unknown language 'tritn'; did you mean 'triton'?"),
        (["acme", "--families", "platform", "--language", "cpp"], "a platform has no kernels"),
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
    assert "pip install -e hardpoint-acme-2, then hardpoint conform acme_2" in out


def recipes() -> list[Recipe]:
    """Every language with each family, each pair of families, and all of them."""
    families = [*combinations(TEMPLATED, 1), *combinations(TEMPLATED, 2), TEMPLATED]
    wanted = [(f, language) for language in LANGUAGES for f in families if f != ("platform",) or language == "torch"]
    return [Recipe.create(f"p{i}", f, language) for i, (f, language) in enumerate(wanted)]


def test_everything_it_writes_is_well_formed(tmp_path: Path) -> None:
    """Python that parses and is as ruff likes it, TOML, a manifest that holds what was asked for."""
    for recipe in recipes():
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
            assert attribute in {getattr(node, "name", None) for node in ast.parse(source).body}
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--quiet", "--isolated", "--line-length", "120", tmp_path], check=True)
    subprocess.run([*ruff, "format", "--quiet", "--check", tmp_path], check=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_a_template_or_a_word_for_every_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = run(["plugins", "new", "acme", "--families", family])
    if family in TEMPLATED:
        (manifest,) = tmp_path.rglob("hardpoint.toml")
        assert code == 0
        assert [c.family for c in parse_manifest(manifest.read_text(), "acme").contributions] == [family]
    else:
        assert code == 2
        assert f"there is no template for the family {family!r} yet; there are " in capsys.readouterr().err


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.create(tmp_path_factory.mktemp("environment"))


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


def test_a_plugin_of_every_family_serves_an_engine(environment: Environment, tmp_path: Path) -> None:
    project = install(environment, tmp_path, "plain", ALL, "torch")
    assert "1 passed" in check(environment, project, "pytest -o addopts= -q")


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_its_compiled_variant_serves_an_engine(environment: Environment, tmp_path: Path) -> None:
    project = install(environment, tmp_path, "compiled", ALL, "cpp")
    (library,) = (project / "src/hardpoint_compiled").glob("_kernels*.so")
    assert library.name == "_kernels.abi3.so", "one binary for every CPython"
    assert "1 passed" in check(environment, project, "pytest -o addopts= -q")
    code = "from hardpoint_compiled import _kernels\ntry: _kernels.rms_norm(1)\nexcept TypeError as e: print(e)\n"
    code += "try: _kernels.rms_norm(*'123456789')\nexcept TypeError as e: print(e)\n"
    said = check(environment, project, f'python -c "{code}"').splitlines()
    assert said[0] == "expected 9 arguments, got 1"
    assert len(said) == 2


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
    for folder in ("core/src/hardpoint/plugins/template", "plugin_api/src/hardpoint_plugin_api/api"):
        source = ROOT / folder
        for path in source.rglob("*.j*"):
            assert str(path.relative_to(source.parents[source.parts[::-1].index("src") - 1])) in shipped

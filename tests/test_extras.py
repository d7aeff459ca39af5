"""Core runs models without its extras, and names the extra where a feature needs one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hardpoint.extras import EXTRAS, require_extra
from hardpoint_plugin_api import ConfigError

ROOT = Path(__file__).parents[1]

_TOP = sorted({module.partition(".")[0] for modules in EXTRAS.values() for module in modules.values()})
_WITHOUT = f"""
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {_TOP}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

import importlib.util
real = importlib.util.find_spec
sys.meta_path.insert(0, Absent())
"""

_GENERATES = """
from hardpoint import LLM, SamplingParams

with LLM("demo", platform="cpu") as llm:
    assert llm.generate(["It is"], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids
"""


def test_extras_are_those_of_the_distribution() -> None:
    declared = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra: sorted(Requirement(text).name for text in texts) for extra, texts in declared.items()}
    own = {extra: sorted(set(names) - {"hardpoint-core"}) for extra, names in named.items()}
    assert own == {extra: sorted(modules) for extra, modules in EXTRAS.items()}


def test_a_model_runs_without_extras() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT + _GENERATES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "demo"], "hardpoint serve needs fastapi, httptools, uvicorn, not installed here: pip install"),
        (
            ["conform", "cpu"],
            "hardpoint conform needs covertable, not installed here: pip install 'hardpoint-core[conf",
        ),
    ],
)
def test_a_missing_extra_is_named(arguments: list[str], said: str) -> None:
    run = f"import importlib.util, sys; sys.argv[1:] = {arguments}; from hardpoint.cli.main import main; main()"
    hidden = "importlib.util.find_spec = lambda name, package=None: None if name in (%s) else real(name, package)\n"
    names = ", ".join(repr(module) for modules in EXTRAS.values() for module in modules.values())
    program = _WITHOUT + hidden % names + run
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in done.stderr


def test_what_is_installed_is_not_missed() -> None:
    require_extra("serve", "this test")
    with pytest.raises(KeyError):
        require_extra("no-such-extra", "this test")


def test_the_error_is_one_of_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "serve", {"no-such-module": "no_such_module"})
    with pytest.raises(ConfigError, match=r"^this test needs no-such-module, not installed here: pip install 'hardp"):
        require_extra("serve", "this test")

"""The map from source files to their tests, over a small tree and over this repository."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def which_test() -> ModuleType:
    spec = importlib.util.spec_from_file_location("which_test", ROOT / "scripts" / "which_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["which_test"] = module
    spec.loader.exec_module(module)
    return module


FILES = {
    "core/src/shop/__init__.py": "from shop.price import net",
    "core/src/shop/price.py": "def net(): ...",
    "core/src/shop/till.py": "from shop import net",
    "core/src/shop/lonely.py": "",
    "tests/test_till.py": "def test() -> None:\n    from shop.till import net",
    "tests/test_price.py": "from shop import net",
    "tests/test_words.py": "NAMES = ['lonely']",
}


def test_the_nearest_tests_cover(which_test: ModuleType, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = which_test.ImportGraph.read(tmp_path)

    def covering(name: str) -> list[str]:
        return [path.name for path in graph.covering(tmp_path / "core/src/shop" / name)]

    assert covering("price.py") == ["test_price.py"], "by way of the package's front"
    assert covering("till.py") == ["test_till.py"]
    assert covering("lonely.py") == []
    assert [p.name for p in which_test.naming(tmp_path / "core/src/shop/lonely.py", tmp_path)] == ["test_words.py"]


@pytest.mark.nightly
def test_on_this_repository(which_test: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert which_test.main([str(ROOT / "core/src/hardpoint/engine/scheduling/scheduler.py")]) == 0
    assert "tests/engine/test_scheduler.py" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("arguments", "said"), [([], "name a file"), (["no/such.py"], "there is no file no/such.py")])
def test_bad_arguments(
    arguments: list[str], said: str, which_test: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert which_test.main(arguments) == 2
    assert said in capsys.readouterr().err

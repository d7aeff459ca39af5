"""A wheel of FlashMLA, made of files as vLLM's wheel has them."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/flash_mla_wheel.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flash_mla_wheel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vllm(script: ModuleType, folder: Path, interface: str) -> Path:
    path = folder / "vllm-0.25.0-cp38-abi3-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(script.EXTENSION, b"an extension")
        wheel.writestr(script.MODULE, interface)
    return path


def test_a_module_of_its_own(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = "".join(f"def {name}(): ...\n" for name in script.EXPORTS)
    made = script.repack(vllm(script, tmp_path, f"{script.IMPORT}\n{functions}"), tmp_path, "0.25.0")
    with zipfile.ZipFile(made) as wheel:
        assert wheel.read("flash_mla/_flashmla_C.abi3.so") == b"an extension"
        assert any(name.endswith(".dist-info/RECORD") for name in wheel.namelist())
    monkeypatch.syspath_prepend(str(made))
    monkeypatch.setitem(sys.modules, "flash_mla._flashmla_C", ModuleType("flash_mla._flashmla_C"))
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    import flash_mla  # type: ignore[import-not-found]  # of the wheel

    assert all(callable(getattr(flash_mla, name)) for name in script.EXPORTS)
    for name in ("flash_mla", "flash_mla.flash_mla_interface"):
        monkeypatch.delitem(sys.modules, name)


def test_another_form_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"does not say import vllm\._flashmla_C"):
        script.repack(vllm(script, tmp_path, "import vllm.flash\n"), tmp_path, "0.25.0")
    empty = tmp_path / "vllm-1.whl"
    with zipfile.ZipFile(empty, "w"):
        pass
    with pytest.raises(SystemExit, match=r"vllm-1\.whl has no vllm/_flashmla_C\.abi3\.so"):
        script.repack(empty, tmp_path, "1")

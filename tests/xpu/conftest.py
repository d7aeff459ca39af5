"""The stand-in of vllm-xpu-kernels, installed, and an Intel GPU whose tensors are on the host."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint_plugin_api import DeviceInfo
from hardpoint_xpu import vllm_library
from hardpoint_xpu.platform import XpuPlatform
from tests.support import xpu_flash_stand_in
from tests.support.on_host import HostModule
from tests.support.xpu_stand_in import CALLS

B580 = DeviceInfo("xpu", "Intel Arc B580", "cpu", "bmg_g21", memory_bytes=2**30)


@pytest.fixture
def xpu_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in, installed as the distribution ``vllm-xpu-kernels``; its package's folder."""
    folder = tmp_path / "site"
    package = folder / vllm_library.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .flash_attn_interface import flash_attn_varlen_func\n")
    source = Path(xpu_flash_stand_in.__file__).read_text()
    (package / "flash_attn_interface.py").write_text(source)
    for module in ("_C", "_xpu_C", "_moe_C"):
        schemas = "\n".join(text for name, text in vllm_library.SCHEMAS.items() if name.startswith(f"{module}."))
        (package / f"{module}.py").write_text(f'"""{schemas}"""\n\nimport tests.support.xpu_stand_in\n')
    info = folder / "vllm_xpu_kernels-0.1.16.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-xpu-kernels\nVersion: 0.1.16.2\n")
    (info / "RECORD").write_text("vllm_xpu_kernels/__init__.py,,\nvllm_xpu_kernels-0.1.16.2.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    CALLS.clear()
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == vllm_library.PACKAGE]:
        del sys.modules[name]
    vllm_library._load.cache_clear()


@pytest.fixture
def b580(monkeypatch: pytest.MonkeyPatch) -> None:
    """A B580 whose tensors are on the host."""
    monkeypatch.setattr(XpuPlatform, "detect", classmethod(lambda cls: B580))
    monkeypatch.setattr(XpuPlatform, "device_module", lambda self: HostModule())

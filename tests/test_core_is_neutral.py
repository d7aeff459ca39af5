"""Core knows no device and no vendor, and dependencies point one way."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core" / "src" / "hardpoint"
NAMES = re.compile(r"\b(cuda|hip|rocm|xpu|nvidia|amd|intel|aiter|flashinfer|nccl|rccl)\b", re.IGNORECASE)
SOURCES = [path for path in sorted(CORE.rglob("*")) if path.suffix in {".py", ".toml", ".jinja"}]


def test_core_names_no_device_or_vendor() -> None:
    assert len(SOURCES) > 50
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if NAMES.search(line)
    ]
    assert not found, "\n".join(found)


def test_core_imports_no_plugin_and_the_api_imports_neither() -> None:
    plugins = re.compile(r"^\s*(from|import) hardpoint_(cpu|cuda|rocm|xpu)\b", re.MULTILINE)
    core = re.compile(r"^\s*(from|import) (hardpoint|torch)\b(?!_)", re.MULTILINE)
    assert not [p for p in SOURCES if plugins.search(p.read_text(encoding="utf-8"))]
    lines = [
        line
        for path in (ROOT / "plugin_api" / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if core.match(line) and not line.startswith((" ", "\t"))
    ]
    assert not lines, lines


def test_importing_resolves_nothing() -> None:
    """Neither package imports torch, a plugin, or pydantic when it is imported."""
    code = (
        "import sys, hardpoint, hardpoint_plugin_api; "
        "heavy = {'torch', 'transformers', 'pydantic', 'hardpoint_cpu'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

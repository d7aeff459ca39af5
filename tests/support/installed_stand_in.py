"""Stand-ins of libraries, installed for a test as the distributions that they stand for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, version: str, modules: Mapping[str, str]
) -> Iterator[None]:
    """``modules``: name -> the module of tests/support that has its contents, or an empty text."""
    top = next(iter(modules)).partition(".")[0]
    for name, source in modules.items():
        path = folder.joinpath(*name.split(".")) / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"from tests.support.{source} import *\n" if source else "")
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{top}/__init__.py,,\n{info.name}/METADATA,,\n")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == top]:
        del sys.modules[name]

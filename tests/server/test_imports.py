"""A program that does not serve pays nothing for the server."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["hardpoint.engine.async_engine", "hardpoint.cli.generate", "hardpoint.cli.serve"])
def test_no_http_library_is_imported(module: str) -> None:
    heavy = {"fastapi", "uvicorn", "starlette"}
    code = f"import sys, {module}; found = {heavy} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

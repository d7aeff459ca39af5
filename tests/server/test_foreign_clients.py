"""Clients from the public index, unpatched, with the shared server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import foreign_clients
from tests.support.serving import RunningServer

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("name", foreign_clients.CLIENTS)
def test_a_client_works_as_it_is(server: RunningServer, tmp_path: Path, name: str) -> None:
    """An environment for each: they ask for unlike versions of the same libraries."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python = str(tmp_path / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", name], check=True)
    command = [python, foreign_clients.__file__, name, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

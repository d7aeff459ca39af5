"""Clients from the public indexes of Python and JavaScript, unpatched, with the shared server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import foreign_clients, foreign_programs
from tests.support.serving import RunningServer, running_server

pytestmark = pytest.mark.nightly

SCRIPTS = Path(__file__).with_name("foreign_clients.mjs")
PACKAGES = {
    "openai": ["openai"],
    "@anthropic-ai/sdk": ["@anthropic-ai/sdk"],
    "ai": ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"],
}
"""The packages of each JavaScript client."""
needs_node = pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node with npm")
CODEX = """
model = "demo"
model_provider = "hardpoint"
[model_providers.hardpoint]
name = "Hardpoint"
base_url = "{url}/v1"
wire_api = "responses"
"""


@pytest.mark.parametrize("name", [*foreign_clients.CLIENTS, *foreign_programs.CLIENTS])
def test_a_client_works_as_it_is(server: RunningServer, tmp_path: Path, name: str) -> None:
    """An environment for each: they ask for unlike versions of the same libraries."""
    script = foreign_clients.__file__ if name in foreign_clients.CLIENTS else foreign_programs.__file__
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python = str(tmp_path / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", name], check=True)
    succeeds([python, script, name, server.url], tmp_path)


@needs_node
@pytest.mark.parametrize("name", PACKAGES)
def test_a_client_of_javascript_works_as_it_is(server: RunningServer, tmp_path: Path, name: str) -> None:
    install(tmp_path, *PACKAGES[name])
    succeeds(["node", str(SCRIPTS), name, server.url], tmp_path)


@needs_node
def test_codex(tmp_path: Path) -> None:
    """OpenAI's agent for the command line, whose prompt and tools are some 7,000 of the demo model's tokens."""
    install(tmp_path, "@openai/codex")
    model, home = tmp_path / "model", tmp_path / "home"
    shutil.copytree(foreign_programs.DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    home.mkdir()
    flags = ["--served-model-name", "demo", "--tool-parser", "hermes"]
    with running_server(str(model), *flags, program=True) as server:
        (home / "config.toml").write_text(CODEX.format(url=server.url))
        command = [str(tmp_path / "node_modules/.bin/codex"), "exec", "--skip-git-repo-check", "--json", "Hello"]
        said = succeeds(command, tmp_path, CODEX_HOME=str(home))
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    (done,) = (event for event in events if event["type"] == "turn.completed")
    assert done["usage"]["input_tokens"] > 2048
    assert done["usage"]["output_tokens"] > 0


def install(folder: Path, *packages: str) -> None:
    (folder / "package.json").write_text('{"private": true}')
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *packages]
    subprocess.run(command, cwd=folder, check=True, timeout=300)


def succeeds(command: list[str], folder: Path, **environment: str) -> str:
    """The output of ``command``, run in ``folder``; it must succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

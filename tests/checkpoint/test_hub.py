"""Hub ids, with the real ``huggingface_hub`` and a stand-in of the hub.

The library reads its settings when it is imported, so each case is a child process.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.checkpoint.test_mistral_files import write_consolidated
from tests.support.checkpoints import write_checkpoint
from tests.support.forked import run_module
from tests.support.hub import Hub, Repository, running

OLD, NEW = "a" * 40, "b" * 40
ROOT = Path(__file__).resolve().parents[2]
RESOLVING = "tests.checkpoint.resolving"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    old = {**files, "config.json": files["config.json"] + b"\n"}
    others = {"README.md": b"# Tiny", "pytorch_model.bin": b"not wanted"}
    write_consolidated(folder / "own", write_checkpoint(folder / "source", "mistral", sliding_window=None))
    own = {path.name: path.read_bytes() for path in (folder / "own").iterdir()}
    both, branches = {OLD: old, NEW: {**files, **others}}, {"main": NEW, "v1": OLD}
    repositories = {
        "acme/tiny": Repository(both, branches),
        "acme/gated": Repository(both, branches, token="hf_mine", gated=True),
        "acme/private": Repository(both, branches, token="hf_mine"),
        "acme/tokenizer": Repository({NEW: {"tokenizer.json": b"{}"}}, {"main": NEW}),
        "acme/mistral": Repository({NEW: own}, {"main": NEW}),
        "acme/both": Repository({NEW: {**files, **own}}, {"main": NEW}),
        "acme/holed": Repository(both, branches, listed=("model-00002-of-00002.safetensors",)),
    }
    with running(Hub(repositories)) as hub, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.upper().startswith("HF_") or name.upper().endswith("_PROXY")]:
            patch.delenv(name)  # a child finds the rest
        yield hub


def run(hub: Hub, cache: Path, module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a forked process, whose server has not imported the hub's library; all output is one text."""
    given = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    hub.requests.clear()
    return run_module(module, arguments, ROOT, 120, {**given, **variables})


def resolved(hub: Hub, cache: Path, *arguments: str, **variables: str) -> Path:
    done = run(hub, cache, RESOLVING, *arguments, **variables)
    assert done.returncode == 0, done.stdout
    return Path(done.stdout.splitlines()[-1])  # behind what tells of downloads


def refused(hub: Hub, cache: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
    """The error, of one line."""
    done = run(hub, cache, RESOLVING, *arguments, **(variables or {}))
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("model ")]
    return line


def test_a_model_of_the_hub_generates(hub: Hub, tmp_path: Path) -> None:
    command = ["generate", "acme/tiny", "--prompt", "Hi", "--max-tokens", "4"]
    done = run(hub, tmp_path, "hardpoint.cli", *command, "--platform", "cpu", "--kv-cache-memory", "16MiB")
    assert done.returncode == 0, done.stdout
    assert f"GET /acme/tiny/resolve/{NEW}/model.safetensors" in hub.requests
    assert not [line for line in hub.requests if line.endswith(("README.md", "pytorch_model.bin"))]


@pytest.mark.parametrize(
    ("repo", "form", "downloaded"),
    [
        ("acme/tiny", "auto", {"config.json"}),
        ("acme/mistral", "auto", {"params.json"}),
        ("acme/mistral", "mistral", {"params.json"}),
        ("acme/both", "auto", {"config.json", "params.json"}),
        ("acme/both", "mistral", {"params.json"}),
    ],
)
def test_a_server_checks_a_model_by_its_config_alone(
    hub: Hub, tmp_path: Path, repo: str, form: str, downloaded: set[str]
) -> None:
    """Weights are downloaded after it has opened its port."""
    done = run(hub, tmp_path, "tests.checkpoint.checking", repo, form)
    assert done.returncode == 0, done.stdout
    prefix = f"GET /{repo}/resolve/{NEW}/"
    assert {line.removeprefix(prefix) for line in hub.requests if line.startswith(prefix)} == downloaded
    folder = resolved(hub, tmp_path, repo)
    assert any(folder.glob("*.safetensors"))


def test_a_branch_or_a_commit_names_the_revision(hub: Hub, tmp_path: Path) -> None:
    folder = resolved(hub, tmp_path, "acme/tiny", "v1")
    assert folder.name == OLD
    assert (folder / "config.json").read_bytes() == hub.repositories["acme/tiny"].files[OLD]["config.json"]
    assert resolved(hub, tmp_path, "acme/tiny", NEW).name == NEW
    assert resolved(hub, tmp_path, "acme/tiny").name == NEW


def test_files_are_downloaded_once_and_serve_offline(hub: Hub, tmp_path: Path) -> None:
    first = resolved(hub, tmp_path, "acme/tiny")
    assert resolved(hub, tmp_path, "acme/tiny") == first
    assert not [line for line in hub.requests if line.startswith("GET /acme/")]
    assert resolved(hub, tmp_path, "acme/tiny", HF_HUB_OFFLINE="1") == first
    assert hub.requests == []


def test_a_token_opens_what_is_gated_or_private(hub: Hub, tmp_path: Path) -> None:
    for repo in ("acme/gated", "acme/private"):
        assert resolved(hub, tmp_path, repo, HF_TOKEN="hf_mine").name == NEW


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (
            ("acme/gated",),
            {},
            "401 Client Error.*It is gated: accept its terms at http://.*/acme/gated, and set HF_TOKEN",
        ),
        (("acme/gated",), {"HF_TOKEN": "hf_other"}, "403 Client Error.*It is gated: accept its terms at"),
        (("acme/private",), {}, "401 Client Error.*Check the id; where it is private, set HF_TOKEN"),
        (("acme/nothing",), {"HF_TOKEN": "hf_mine"}, "404 Client Error.*Check the id"),
        (("acme/tiny", "v9"), {}, "It has no branch, tag or commit 'v9': check --hub-revision"),
        (("acme/tiny",), {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set: unset it for a first download"),
        (("acme/holed",), {}, "The hub lists a file that it does not have"),
        (("acme/tiny",), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "Give a local folder, or check the id and the network"),
    ],
    ids=["gated", "gated-other", "private", "missing", "revision", "offline", "holed", "no-network"],
)
def test_an_error_names_the_remedy(
    hub: Hub, tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], words: str
) -> None:
    line = refused(hub, tmp_path, *arguments, variables=variables)
    assert line.startswith(f"model {arguments[0]!r} is no local folder, and it could not be downloaded from the hub: ")
    assert re.search(words, line), line


def test_a_repository_without_a_config_is_no_model(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, RESOLVING, "acme/tokenizer")
    assert done.returncode == 1
    assert "holds no config.json; give the folder of a Hugging Face checkpoint" in done.stdout

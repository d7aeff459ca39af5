"""Loading by libraries that stream safetensors files, and the log of a long load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint import LLM
from hardpoint.checkpoint.formats import open_files
from hardpoint.checkpoint.streamed_files import streamed
from hardpoint.layers import load_progress
from hardpoint_plugin_api import ConfigError
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm

LIBRARIES = {"fastsafetensors": "fastsafetensors", "runai_streamer": "runai-model-streamer"}
"""The name for pip of each load format."""

COMPARE = """
import sys
from pathlib import Path
import torch
from hardpoint.checkpoint.formats import open_files
from hardpoint.checkpoint.streamed_files import streamed

files = open_files(Path(sys.argv[1])).tensors()
found = {name: tensor.clone() for name, tensor in streamed(files, sys.argv[2], "cpu")}
assert found.keys() == files.names
assert all(torch.equal(tensor, files.read(name)) for name, tensor in found.items())

Path(sys.argv[1], "model.safetensors").write_bytes(b"damaged")
try:
    list(streamed(files, sys.argv[2], "cpu"))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("load_format", LIBRARIES)
def test_a_library_that_is_not_installed(tmp_path: Path, load_format: str) -> None:
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=f"pip install {LIBRARIES[load_format]}, or leave it out"):
        small_llm(tmp_path, load_format=load_format)


def test_files_of_another_format() -> None:
    class Others:
        title = "a.gguf"

    with pytest.raises(ConfigError, match=r"reads safetensors files alone, not a\.gguf"):
        streamed(Others(), "fastsafetensors", "cpu")  # type: ignore[arg-type]  # no TensorFiles


@pytest.mark.nightly
@pytest.mark.parametrize("load_format", LIBRARIES)
def test_the_real_library(tmp_path: Path, load_format: str) -> None:
    """The tensors are those of the default, and damage is an error of ours."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    subprocess.run([*command, LIBRARIES[load_format], "humanize"], check=True, timeout=300)
    folder = tmp_path / "model"
    write_checkpoint(folder, "llama")
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(folder), load_format],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CheckpointError"), done.stdout


def test_a_long_load_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(load_progress, "SECONDS", 0.0)
    with caplog.at_level("INFO", logger=load_progress.__name__), LLM(str(tmp_path), platform="cpu"):
        pass
    count = len(open_files(tmp_path).tensors().names)
    lines = [message for message in caplog.messages if "tensors read" in message]
    assert len(lines) == count
    assert lines[-1].startswith(f"{tmp_path}: {count} of {count} tensors read, ")

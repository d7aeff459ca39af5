"""bitsandbytes' checkpoints: what is refused, and which modules are not quantized. Numbers: test_fixtures.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hardpoint_plugin_api import CheckpointError, ConfigError
from tests.parallel.ranks import ranks_in_threads
from tests.quantization.fixtures.base_model import FIXTURES, write_tokenizer
from tests.quantization.writing import change_config, change_tensors
from tests.support.engines import small_llm

Tensors = dict[str, torch.Tensor]
NAME = "model.layers.0.mlp.up_proj"
STATE = f"{NAME}.weight.quant_state.bitsandbytes__nf4"


def fixture(name: str, folder: Path) -> Path:
    """A copy of a fixture, with a tokenizer."""
    shutil.copytree(FIXTURES / f"bitsandbytes-{name}", folder, dirs_exist_ok=True)
    (folder / "dequantized.safetensors").unlink()
    (folder / "logits.safetensors").unlink(missing_ok=True)
    write_tokenizer(folder)
    return folder


def text(**values: object) -> torch.Tensor:
    """JSON as the library stores it."""
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}.weight.absmax"), r"missing tensors: .*up_proj.weight.absmax"),
        (lambda t: t.update({STATE: torch.zeros(3, dtype=torch.uint8)}), r"__nf4' holds no state of bitsandbytes: "),
        (lambda t: t.update({STATE: text(blocksize=64, shape=[32, 64])}), r"shape \[32, 64\], .*expects \[64, 32\]"),
        (lambda t: t.update({STATE: text(blocksize=48, shape=[64, 32])}), r"blocks of 48 end within its rows"),
        (
            lambda t: t.update({f"{NAME}.weight": torch.zeros(9, 1, dtype=torch.uint8)}),
            r"the model expects \[1024, 1\]",
        ),
    ],
)
def test_damaged_tensors(tmp_path: Path, change: Callable[[Tensors], object], message: str) -> None:
    change_tensors(fixture("nf4", tmp_path), change)
    with pytest.raises(CheckpointError, match=message):
        small_llm(tmp_path)


def test_another_order_of_rows(tmp_path: Path) -> None:
    name = f"{NAME}.weight_format"
    change_tensors(fixture("int8", tmp_path), lambda t: t.update({name: torch.tensor(2, dtype=torch.uint8)}))
    with pytest.raises(CheckpointError, match=r"weight_format': is 2, and rows in order \(0\) alone are read"):
        small_llm(tmp_path)


def test_neither_4_nor_8_bits(tmp_path: Path) -> None:
    change_config(fixture("nf4", tmp_path), quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match=r"'load_in_4bit' or 'load_in_8bit' must be true"):
        small_llm(tmp_path)


def test_ranks_cannot_divide_a_vector(tmp_path: Path) -> None:
    fixture("nf4", tmp_path)
    message = r"--tensor-parallel-size 2: layer .* is stored in a form that ranks cannot divide \(its 'weight' is one"
    with pytest.raises(ConfigError, match=message), ranks_in_threads(tmp_path, 2):
        pass

"""Memory while loading: a model that is quantized tensor by tensor never stands in memory twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hardpoint.checkpoint.gguf.container import Container
from hardpoint.checkpoint.gguf.types import BLOCKS
from tests.checkpoint.gguf_writer import Blocks, write_gguf
from tests.quantization.fixtures.base_model import CONFIG, write_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
FIXTURES = Path(__file__).parent / "fixtures" / "gguf"
CONSTANT = 24 * 2**20
"""Bytes that do not grow with the model: 16 MiB of the file are mapped, and the tensor that is quantized."""
NAMES = 12 * 2**20
"""Bytes of Python's objects for a thousand tensors of a checkpoint."""
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""For glibc's malloc: a freed tensor goes back to the system at once. Memory that malloc keeps for later differs from
run to run by tens of MB, and is no memory of loading's."""
METHODS = ("fp8", "int8", "int4", "mxfp8", "mxfp4", "nvfp4", "nf4")
BY_DAY = ("int4",)


def write_model(folder: Path, hidden: int, intermediate: int, layers: int) -> Path:
    """A Llama of bfloat16 numbers; what they are does not matter."""
    folder.mkdir()
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "head_dim": 64}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), hidden // 64)
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes | heads | {"torch_dtype": "bfloat16"}))
    write_tokenizer(folder)
    shapes = {"model.embed_tokens": (64, hidden), "lm_head": (64, hidden), "model.norm": (hidden,)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (intermediate, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (hidden, intermediate)}
        shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(tmp_path: Path, model: Path, *settings: str) -> tuple[int, int]:
    """Bytes that the model's slots hold in the end, and the rise of the peak while it loads."""
    small = write_model(tmp_path / "small", 128, 128, 1)
    command = [sys.executable, "-m", "tests.quantization.loading", str(small), str(model), *settings]
    root, environment = Path(__file__).parents[2], os.environ | GIVEN_BACK
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment)
    found = json.loads(done.stdout)
    return found["held"], found["peak"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("loading") / "model", 512, 1408, 24)


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=() if method in BY_DAY else pytest.mark.nightly) for method in METHODS]
)
def test_never_both_copies(tmp_path: Path, model: Path, method: str) -> None:
    held, peak = load(tmp_path, model, f"quantization={method}")
    assert 39e6 < held < 90e6
    assert peak < 1.2 * held + CONSTANT, "with the unquantized weights, of 154 MB, it would be twice as much"


def write_experts(folder: Path, experts: int, hidden: int, width: int, layers: int) -> Path:
    """A Qwen3-MoE of bfloat16 numbers."""
    folder.mkdir()
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": width, "head_dim": 16}
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    (folder / "config.json").write_text(json.dumps(CONFIG | kind | sizes | {"torch_dtype": "bfloat16"}))
    write_tokenizer(folder)
    shapes = {"model.embed_tokens": (64, hidden), "lm_head": (64, hidden), "model.norm": (hidden,)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}": (16,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (64 if name == "q" else 32, hidden) for name in "qkv"}
        shapes |= {f"{layer}.self_attn.o_proj": (hidden, 64), f"{layer}.mlp.gate": (experts, hidden)}
        shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        for expert in (f"{layer}.mlp.experts.{number}" for number in range(experts)):
            shapes |= {f"{expert}.{name}_proj": (width, hidden) for name in ("gate", "up")}
            shapes |= {f"{expert}.down_proj": (hidden, width)}
    tensors = {f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("method", ["int4", pytest.param("nvfp4", marks=pytest.mark.nightly)])
def test_experts_that_are_gathered(tmp_path: Path, method: str) -> None:
    """The matrices have 131,072 numbers, of which a call takes 4."""
    held, peak = load(tmp_path, write_experts(tmp_path / "model", 16, 512, 256, 12), f"quantization={method}")
    assert 38e6 < held < 60e6
    assert peak < 1.2 * held + CONSTANT + NAMES, "with the unquantized weights, of 75 MB, it would be 119"


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("loading") / "larger", 1024, 2816, 48)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [(), *((f"quantization={method}",) for method in METHODS)], ids=str)
def test_of_a_larger_model(tmp_path: Path, larger_model: Path, settings: tuple[str, ...]) -> None:
    """Of 300 MB and more."""
    held, peak = load(tmp_path, larger_model, *settings)
    assert held > 300e6
    assert peak < 1.2 * held


@pytest.mark.nightly
@pytest.mark.parametrize("down", ["Q4_K", "Q6_K"])
def test_experts_of_a_gguf_file(tmp_path: Path, down: str) -> None:
    """Blocks of experts that stay as they are, or become numbers since not all have one type. Nothing is packed."""
    kinds = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": down}
    experts, hidden, width = 64, 512, 768
    metadata = dict(Container.read(FIXTURES / "qwen3moe.gguf").metadata)
    for key, value in (("embedding_length", hidden), ("expert_feed_forward_length", width), ("expert_count", experts)):
        metadata[f"qwen3moe.{key}"] = value
    tensors: dict[str, torch.Tensor | Blocks] = {}
    for name, content in Container.read(FIXTURES / "qwen3moe.gguf").tensors.items():
        heads = name.endswith(("attn_k.weight", "attn_v.weight"))
        shape = [hidden if n == 32 and not (heads and axis == 0) else n for axis, n in enumerate(content.shape)]
        inner = name.split(".")[2] if name.startswith("blk.") else ""
        if inner in kinds:
            columns, kind = (width, hidden) if inner == "ffn_down_exps" else (hidden, width), BLOCKS[kinds[inner]]
            stored = torch.ones(experts, columns[1], columns[0] // kind.columns, kind.size, dtype=torch.uint8)
            tensors[name] = Blocks(kind.name, stored)
        else:
            tensors[name] = torch.ones([experts if inner == "ffn_gate_inp" and n == 3 else n for n in shape])
    file = tmp_path / "model.gguf"
    write_gguf(file, metadata, tensors)
    held, peak = load(tmp_path, file, "moe_backend=reference")
    assert held > (80e6 if down == "Q4_K" else 280e6)
    assert peak < 1.2 * held + CONSTANT

"""Mixtures of experts in GGUF files whose experts are quantized: each stack of them in one tensor of blocks.

``test_gguf.py`` compares the same architectures with Transformers on numbers that are not quantized. Here experts get
blocks that ggml quantized (``types.gguf``), and Transformers the numbers that gguf-py reads from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hardpoint import SamplingParams
from hardpoint.checkpoint.formats import open_files
from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.checkpoint.gguf.container import Container
from hardpoint.checkpoint.gguf.types import BLOCKS
from hardpoint.config import EngineConfig
from hardpoint.engine.explain import explain
from hardpoint_plugin_api import CheckpointError
from tests.checkpoint.gguf_writer import Blocks, write_gguf
from tests.parallel.ranks import ranks_in_threads
from tests.support.checkpoints import reference_logits
from tests.support.engines import prompt_logits, small_llm

FIXTURES = Path(__file__).parents[1] / "quantization" / "fixtures" / "gguf"
MODEL_TYPES = {"qwen3moe": "qwen3_moe", "qwen2moe": "qwen2_moe", "deepseek2-lite": "deepseek_v2", "gpt-oss": "gpt_oss"}
MODEL_TYPES |= {"deepseek2": "deepseek_v3", "mixtral": "mixtral", "glm4moe": "glm4_moe", "qwen3next": "qwen3_next"}
PROMPT = torch.randint(3, 64, (30,), generator=torch.Generator().manual_seed(2)).tolist()
Tensors = dict[str, Any]


def drawn_blocks(kind: str, shape: tuple[int, ...], seed: int) -> tuple[Blocks, torch.Tensor]:
    """A tensor of blocks drawn from those of ``types.gguf``, and its numbers by gguf-py."""
    stored = Container.read(FIXTURES / "types.gguf").tensors[f"{kind}.weight"].mapped().flatten(0, 1)
    numbers = load_file(FIXTURES / "types.safetensors")[kind].view(len(stored), -1)
    columns = BLOCKS[kind].columns
    size = (*shape[:-1], shape[-1] // columns)
    chosen = torch.randint(len(stored), size, generator=torch.Generator().manual_seed(seed))
    return Blocks(kind, stored[chosen]), numbers[chosen].flatten(-2)


def quantize(name: str, kinds: Mapping[str, str]) -> tuple[dict[str, Any], Tensors, Tensors]:
    """A fixture's metadata, and its tensors twice: with blocks for those of ``kinds``, and with their numbers."""
    container = Container.read(FIXTURES / f"{name}.gguf")
    stored: Tensors = {}
    plain: Tensors = {}
    for seed, (tensor, content) in enumerate(container.tensors.items()):
        kind = kinds.get(tensor.split(".")[2] if tensor.startswith("blk.") and tensor.endswith(".weight") else "")
        stored[tensor], plain[tensor] = drawn_blocks(kind, content.shape, seed) if kind else (content, content)
    return dict(container.metadata), stored, plain


def transformers_logits(file: Path, folder: Path, model_type: str) -> torch.Tensor:
    """Transformers' logits of a GGUF file without quantized tensors, under the names that core gives them."""
    files = open_files(file)
    config = {key: value for key, value in files.read_json("config.json").items() if key != "head_dim" or value}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type, "dtype": "float32"}))
    tensors = {name: tensor.float().clone() for name, tensor in files.tensors()}
    if model_type == "gpt_oss":
        tensors = in_stacks(tensors, config["num_hidden_layers"], config["num_local_experts"])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return reference_logits(model, PROMPT)


def in_stacks(tensors: dict[str, torch.Tensor], layers: int, experts: int) -> dict[str, torch.Tensor]:
    """gpt-oss's experts as its checkpoints hold them: gate and up by turns, matrices by columns."""
    for module in (f"model.layers.{i}.mlp.experts" for i in range(layers)):

        def stack(part: str, module: str = module) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{module}.{e}.{part}") for e in range(experts)])

        for last, to in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (stack(f"{x}_proj.{last}") for x in ("gate", "up", "down"))
            both = torch.stack([gate, up], dim=2).flatten(1, 2)
            turn: Callable[[torch.Tensor], torch.Tensor] = (lambda x: x) if to else (lambda x: x.transpose(1, 2))
            tensors[f"{module}.gate_up_proj{to}"], tensors[f"{module}.down_proj{to}"] = turn(both), turn(down)
    return tensors


def compare(tmp_path: Path, model_type: str, metadata: dict[str, Any], stored: Tensors, plain: Tensors) -> str:
    """Check the engine's logits of the quantized file against Transformers' of the numbers; the experts' specs."""
    write_gguf(tmp_path / "quantized.gguf", metadata, stored)
    write_gguf(tmp_path / "plain.gguf", metadata, plain)
    expected = transformers_logits(tmp_path / "plain.gguf", tmp_path / "plain", model_type)
    with small_llm(tmp_path / "quantized.gguf", dtype="float32", skip_tokenizer_init=True) as llm:
        got = prompt_logits(llm, PROMPT)
        specs = " ".join(str(row.workload) for row in llm.table.rows if row.family == "experts")
    assert float((got - expected).abs().max() / expected.abs().max()) < 2e-5
    return specs


EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


@pytest.mark.parametrize(
    ("name", "kind", "spec"),
    [
        ("qwen3moe", "Q8_0", "int8@float16:1x32"),
        ("qwen2moe", "Q4_0", "int4@float16:1x32"),
        ("deepseek2-lite", "Q5_1", "uint5@float16:1x32+min"),
        ("deepseek2", "IQ4_NL", "iq4_nl@float16:1x32"),
        ("glm4moe", "Q5_0", "int5@float16:1x32"),
        ("gpt-oss", "MXFP4", "float4_e2m1@float8_e8m0fnu:1x32"),
    ],
)
def test_experts_stay_in_their_blocks(tmp_path: Path, name: str, kind: str, spec: str) -> None:
    specs = compare(tmp_path, MODEL_TYPES[name], *quantize(name, dict.fromkeys(EXPERTS, kind)))
    assert spec in specs


@pytest.mark.parametrize(("gate", "blocks"), [("Q8_0", True), ("Q5_0", False)])
def test_rows_that_take_turns(tmp_path: Path, gate: str, blocks: bool) -> None:
    """Qwen3-Next's larger projection is two tensors in GGUF. Of one type they stay in their blocks, row by row."""
    kinds = {"attn_qkv": "Q8_0", "attn_gate": gate, "ssm_out": "Q4_0"} | dict.fromkeys(EXPERTS, "Q4_0")
    metadata, stored, plain = quantize("qwen3next", kinds)
    assert "int4@float16:1x32" in compare(tmp_path, MODEL_TYPES["qwen3next"], metadata, stored, plain)
    turned = {name for name in open_files(tmp_path / "quantized.gguf").tensors().names if ".in_proj_qkvz." in name}
    assert {name.rpartition(".")[2] for name in turned} == {"Q8_0" if blocks else "weight"}


@pytest.mark.parametrize(
    ("gate", "down", "width"),
    [("Q4_K", "Q6_K", 256), ("Q4_K", "Q5_0", 96), ("Q4_K", "Q8_0", 96), ("Q2_K", "Q3_K", 256)],
)
def test_a_down_projection_of_another_type_stays_in_its_blocks(
    tmp_path: Path, gate: str, down: str, width: int
) -> None:
    """As Q4_K_M has them, in the first layer alone; Q5_0 and Q8_0 where rows are no whole blocks of 256 columns."""
    metadata, stored, plain = widened(Container.read(FIXTURES / "qwen3moe.gguf"), width)
    kinds = {f"blk.{i}.ffn_{x}_exps.weight": gate for i in range(2) for x in ("gate", "up")}
    kinds |= {"blk.0.ffn_down_exps.weight": down, "blk.1.ffn_down_exps.weight": gate if width == 256 else "Q5_1"}
    for seed, (name, kind) in enumerate(kinds.items()):
        stored[name], plain[name] = drawn_blocks(kind, tuple(plain[name].shape), seed)
    specs = compare(tmp_path, "qwen3_moe", metadata, stored, plain)
    assert f"spec={SPECS[gate].spec}/float32 w2_spec={SPECS[down].spec}/float32" in specs


def test_experts_of_two_types_take_the_memory_of_the_file(tmp_path: Path) -> None:
    """Without compiled kernels six bits take a byte. Numbers of 16 bits would take three times as much."""
    metadata, stored, _ = widened(Container.read(FIXTURES / "qwen3moe.gguf"))
    for seed, name in enumerate(n for n in list(stored) if n.split(".")[-2] in EXPERTS):
        stored[name], _ = drawn_blocks("Q6_K" if "down" in name else "Q4_K", tuple(stored[name].shape), seed)
    write_gguf(tmp_path / "m.gguf", metadata, stored)
    in_file = sum(x.stored.nbytes for x in stored.values() if isinstance(x, Blocks))
    with small_llm(tmp_path / "m.gguf", dtype="bfloat16", skip_tokenizer_init=True) as llm:
        model: Any = llm.core.blueprint.model
        experts = [block.feed_forward.experts for block in model.stack.blocks.values()]
        in_memory = sum(x.nbytes for one in experts for x in one.weights.values())
    assert in_file <= in_memory < 1.2 * in_file


@pytest.mark.parametrize(
    ("gate", "down", "kernel"),
    [
        ("Q8_0", "Q8_0", "triton_grouped_quantized"),
        ("Q4_K", "Q6_K", "triton_blocks"),
        ("Q4_0", "Q8_0", "triton_blocks"),
        ("Q4_K", "MXFP4", "reference"),
    ],
)
def test_kernels_of_gpus(tmp_path: Path, gate: str, down: str, kernel: str) -> None:
    """Kernels that are measured come first where one takes both matrices; others do not claim two types."""
    metadata, stored, _ = widened(Container.read(FIXTURES / "qwen3moe.gguf"))
    for seed, name in enumerate(n for n in list(stored) if n.split(".")[-2] in EXPERTS):
        stored[name], _ = drawn_blocks(down if "down" in name else gate, tuple(stored[name].shape), seed)
    write_gguf(tmp_path / "m.gguf", metadata, stored)
    config = EngineConfig.create(model=str(tmp_path / "m.gguf"), plugins=("cuda",), skip_tokenizer_init=True)
    (row,) = (row for row in explain(config, "h100").rows if row.family == "experts")
    assert row.chosen == kernel
    refused = {rejected.offer.contribution.name: rejected.reasons[0].code for rejected in row.rejected}
    assert gate == down or refused["triton_grouped_quantized"] in ("feature", "spec")


def test_gate_and_up_of_two_types_become_numbers(tmp_path: Path) -> None:
    metadata, stored, plain = widened(Container.read(FIXTURES / "qwen3moe.gguf"))
    kinds = {f"blk.0.ffn_{x}_exps.weight": kind for x, kind in (("gate", "Q4_K"), ("up", "Q5_K"), ("down", "Q5_K"))}
    kinds |= {f"blk.1.{name}.weight": "Q5_K" for name in EXPERTS}
    for seed, (name, kind) in enumerate(kinds.items()):
        stored[name], plain[name] = drawn_blocks(kind, tuple(plain[name].shape), seed)
    specs = compare(tmp_path, "qwen3_moe", metadata, stored, plain)
    assert "spec=float32/float32" in specs
    assert f"spec={SPECS['Q5_K'].spec}" in specs


def widened(container: Container, width: int = 256) -> tuple[dict[str, Any], Tensors, Tensors]:
    """A model of 256 in place of 32 columns, and 4 in place of 3 experts: metadata, and random tensors twice.

    ``width`` is that of an expert.
    """
    generator, sizes = torch.Generator().manual_seed(3), {32: 256, 3: 4}
    tensors: Tensors = {}
    for name, content in container.tensors.items():
        heads, stack = name.endswith(("attn_k.weight", "attn_v.weight")), name.split(".")[-2]
        shape = [n if heads and axis == 0 else sizes.get(n, n) for axis, n in enumerate(content.shape)]
        if stack in EXPERTS:
            shape[2 if "down" in stack else 1] = width
        tensors[name] = 0.1 * torch.randn(shape, generator=generator) + float(len(shape) == 1)
    wide = {"embedding_length": 256, "expert_feed_forward_length": width, "expert_count": 4}
    metadata = dict(container.metadata) | {f"qwen3moe.{key}": value for key, value in wide.items()}
    return metadata, dict(tensors), dict(tensors)


@pytest.mark.parametrize("by_experts", [False, True])
@pytest.mark.parametrize("down", ["Q8_0", "Q4_0"])
def test_two_ranks_compute_what_one_does(tmp_path: Path, down: str, by_experts: bool) -> None:
    """Each has whole experts, or a slice of all, in blocks of one type or of two."""
    metadata, stored, _ = widened(Container.read(FIXTURES / "qwen3moe.gguf"))
    for seed, name in enumerate(n for n in list(stored) if n.split(".")[-2] in EXPERTS):
        kind = down if "down" in name else "Q8_0"
        stored[name], _ = drawn_blocks(kind, tuple(stored[name].shape), seed)
    write_gguf(tmp_path / "m.gguf", metadata, stored)
    settings = {"dtype": "float32", "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": PROMPT}
    with small_llm(tmp_path / "m.gguf", **settings) as llm:
        alone = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    with ranks_in_threads(tmp_path / "m.gguf", 2, enable_expert_parallel=by_experts, **settings) as llm:
        assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == alone


def test_matrices_that_no_block_divides(tmp_path: Path) -> None:
    """llama.cpp leaves those of 48 columns as they are: gate and up become numbers, too."""
    specs = compare(tmp_path, "mixtral", *quantize("mixtral", {"ffn_gate_exps": "Q8_0", "ffn_up_exps": "Q8_0"}))
    assert "spec=float32/float32" in specs


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0"])
def test_latents_become_plain_numbers(tmp_path: Path, kind: str) -> None:
    """The blocks of keys lie across what becomes rows."""
    metadata, stored, plain = quantize("deepseek2", {})
    for seed, name in enumerate(n for n in list(stored) if n.endswith("attn_kv_a_norm.weight")):
        block = name.removesuffix("attn_kv_a_norm.weight")
        for part, shape in (("attn_k_b", (4, 32, 32)), ("attn_v_b", (4, 12, 32))):
            tensor = f"{block}{part}.weight"
            stored[tensor], plain[tensor] = drawn_blocks(kind, shape, seed)
        for part, columns in (("attn_kv_a_norm", ()), ("attn_kv_a_mqa", (32,))):
            rows = 32 if part == "attn_kv_a_norm" else 40
            wide = torch.randn(rows, *columns, generator=torch.Generator().manual_seed(seed))
            stored[f"{block}{part}.weight"] = plain[f"{block}{part}.weight"] = wide
        for part, rows in (("attn_q_b", 4 * 40), ("attn_q", 4 * 40)):
            if f"{block}{part}.weight" in stored:
                wide = 0.3 * torch.randn(rows, 20, generator=torch.Generator().manual_seed(seed))
                stored[f"{block}{part}.weight"] = plain[f"{block}{part}.weight"] = wide
    prefix = "deepseek2.attention"
    metadata |= {f"{prefix}.kv_lora_rank": 32, f"{prefix}.key_length_mla": 40, f"{prefix}.key_length": 40}
    compare(tmp_path, "deepseek_v3", metadata, stored, plain)


def test_one_of_two_tensors_of_latents_is_missing(tmp_path: Path) -> None:
    metadata, stored, _ = quantize("deepseek2", {})
    stored.pop("blk.0.attn_v_b.weight")
    write_gguf(tmp_path / "m.gguf", metadata, stored)
    with pytest.raises(CheckpointError, match=r"tensors attn_k_b and attn_v_b of block 0 must both be there"):
        open_files(tmp_path / "m.gguf").tensors()


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """They stand behind the last one, which the number of blocks includes."""
    metadata, stored, plain = quantize("glm4moe", {})
    assert metadata["glm4moe.block_count"] == 3
    for name, shape in (("nextn.eh_proj", (32, 64)), ("nextn.enorm", (32,)), ("attn_q", (64, 32))):
        stored[f"blk.2.{name}.weight"] = torch.ones(shape)
    compare(tmp_path, "glm4_moe", metadata, stored, plain)

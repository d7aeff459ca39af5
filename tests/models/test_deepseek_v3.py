"""DeepSeek-V3's checkpoints: 8-bit floats in blocks, tensors for speculation, Kimi-K2's config; configs refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.models.deepseek_v3 import deepseek_v3
from hardpoint.models.glm4_moe import glm4_moe
from hardpoint_plugin_api import AttentionArgs, CheckpointError, MLAArgs, MoEArgs
from tests.quantization.formats import FORMATS
from tests.quantization.test_formats import TOLERANCE
from tests.quantization.writers import fp8_block, fp8_inputs
from tests.quantization.writing import write_quantized
from tests.support.checkpoints import DEEPSEEK_V3, GLM4_MOE, random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits, small_llm

KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "vocab_size": 163840,
}
"""config.json of moonshotai/Kimi-K2-Instruct, without ids of tokens and settings of training."""


def test_kimi_k2() -> None:
    args = deepseek_v3(HFConfig(Path(), KIMI_K2))
    mixers = [block.mixer for block in args.blocks]
    assert all(isinstance(mixer, MLAArgs) for mixer in mixers)
    mixture = args.blocks[-1].feed_forward
    assert isinstance(mixture, MoEArgs)
    assert (mixture.router.routing, mixture.router.bias, mixture.router.scaling) == ("topk_sigmoid", True, 2.827)
    assert (mixture.router.num_experts, mixture.shared_size) == (384, 2048)
    assert not isinstance(args.blocks[0].feed_forward, MoEArgs)
    assert args.facts.max_positions == 131072


def test_a_small_kimi_k2(tmp_path: Path) -> None:
    """The config as its authors write it, in Transformers 4's words; Transformers 5's model of V3 judges."""
    sizes = DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
    rope = {"rope_theta": 50000.0, **KIMI_K2["rope_scaling"], "rope_type": "yarn"}
    model = write_checkpoint(tmp_path, "deepseek_v3", rope_parameters=rope, **sizes)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    changes = {key: written[key] for key in KIMI_K2 if key in written and key not in ("model_type", "architectures")}
    path.write_text(json.dumps(KIMI_K2 | changes | {"rope_theta": 50000.0}))
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4


def config(**changes: Any) -> HFConfig:
    return HFConfig(Path("config.json"), DeepseekV3Config(**DEEPSEEK_V3).to_dict() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "greedy"}, "'topk_method' must be 'noaux_tc' in this model, got 'greedy'"),
        ({"scoring_func": "softmax"}, "'scoring_func' must be 'sigmoid'"),
        ({"n_group": 3}, "groups must divide the experts"),
        ({"num_nextn_predict_layers": -1}, "'num_nextn_predict_layers' must be a whole number, 0 or more, got -1"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        deepseek_v3(config(**changes))


def test_glm_rotates_half_of_a_head_unless_its_config_says_otherwise() -> None:
    for partial, rotated in ((None, 8), (0.25, 4)):
        keys = {"hidden_size": 64, "head_dim": 16, "partial_rotary_factor": partial} | GLM4_MOE
        keys |= {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 300}
        mixer = glm4_moe(HFConfig(Path(), keys | {"max_position_embeddings": 512})).blocks[0].mixer
        assert isinstance(mixer, AttentionArgs)
        assert mixer.rope is not None
        assert mixer.rope.rotary_dim == rotated


SIZES = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}


def experts_of(matrices: dict[str, torch.Tensor], folder: str) -> Callable[..., torch.Tensor]:
    """The output of Transformers' experts, one by one, with input rounded in tiles of 128 before each matrix."""
    rounded = fp8_inputs(128)

    def forward(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for e in ids.unique().tolist():
            gate, up, down = (matrices[f"{folder}.{e}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
            tokens, places = torch.where(ids == e)
            inner = rounded(x[tokens])
            inner = torch.nn.functional.silu(inner @ gate.T) * (inner @ up.T)
            y.index_add_(0, tokens, (rounded(inner) @ down.T) * weights[tokens, places, None])
        return y

    return forward


def test_blocks_of_8_bit_floats_and_tensors_of_a_further_layer(tmp_path: Path) -> None:
    """As DeepSeek publishes V3: tiles of 128 x 128 with scales, and behind the last layer that for speculation."""
    form = next(f for f in FORMATS if f.name == "fp8-block-apart")
    model = write_quantized(tmp_path, form, "deepseek_v3", **DEEPSEEK_V3 | SIZES)
    file = tmp_path / "model.safetensors"
    tensors, meant = load_file(file), {}
    for name in [name for name in tensors if ".experts." in name]:
        stored, meant[name] = fp8_block(128, 128)(name, tensors[name])
        tensors |= {name.replace("weight", key): value.contiguous() for key, value in stored.items()}
    further = {name.replace("layers.1.", "layers.2."): x.clone() for name, x in tensors.items() if "layers.1." in name}
    save_file(tensors | further | {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    model.get_submodule("model.layers.1.mlp.experts").forward = experts_of(meant, "model.layers.1.mlp.experts")
    for layer in range(2):  # absorbed here, so nothing rounds what it multiplies
        model.get_submodule(f"model.layers.{layer}.self_attn.kv_b_proj")._forward_pre_hooks.clear()
    (prompt,) = random_prompts(1, 40, seed=3, shortest=40)
    expected = reference_logits(model, prompt)
    with small_llm(tmp_path) as llm:
        families = {row.family for row in llm.table.rows if "float8_e4m3fn" in row.workload}
        assert families >= {"linear", "experts"}
        got = prompt_logits(llm, prompt)
    # An activation at the border of two elements may be rounded to either, which may change a token's experts.
    assert (got - expected).abs().median() < TOLERANCE
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).median() > 0.999

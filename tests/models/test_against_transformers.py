"""Every family against Transformers' own code: logits in float32, and greedy tokens through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from hardpoint import SamplingParams
from hardpoint_plugin_api import ConfigError, Span
from tests.support.checkpoints import (
    BAMBA,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GATED_DELTA,
    GATED_DELTA_MOE,
    GLM4_MOE,
    GRANITE_HYBRID,
    KIMI_LINEAR,
    LLAMA4,
    NEMOTRON_H,
    check_tokens_equal,
    random_prompts,
    reference_logits,
    write_checkpoint,
)
from tests.support.engines import prompt_logits, small_llm

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
}

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}

MIXTRAL = {"num_local_experts": 4}
QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-gqa7": ("llama", {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "llama-gqa4-tied": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head64": ("llama", {"head_dim": 64}),
    "llama-head80": ("llama", {"head_dim": 80}),
    "llama-head128": ("llama", {"head_dim": 128}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama4": ("llama4", LLAMA4),
    "llama4-several-experts": ("llama4", LLAMA4 | {"num_experts_per_tok": 3}),
    "llama4-interleaved-biases": (
        "llama4",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False}
        | {"no_rope_layer_interval": 2, "attention_bias": True, "rope_parameters": ROPES["llama3"]},
    ),
    "llama4-other-layers-tied": (
        "llama4",
        LLAMA4
        | {"layer_types": ["full_attention", "chunked_attention", "chunked_attention", "full_attention"]}
        | {"no_rope_layers": [1, 0, 1, 0], "moe_layers": [1, 2], "tie_word_embeddings": True},
    ),
    "mistral-window": ("mistral", {"sliding_window": 13}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral-window-tied": ("mixtral", MIXTRAL | {"sliding_window": 13, "tie_word_embeddings": True}),
    "mixtral-gelu-one-expert": ("mixtral", MIXTRAL | {"hidden_act": "gelu", "num_experts_per_tok": 1}),
    "qwen2-moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2-moe-normalized-tied": ("qwen2_moe", QWEN2_MOE | {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen2-moe-one-dense": ("qwen2_moe", QWEN2_MOE | {"mlp_only_layers": [1]}),
    "qwen2-moe-windows": ("qwen2_moe", QWEN2_MOE | WINDOWS | {"max_window_layers": 2}),
    "qwen3-moe": ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3-moe-every-second": ("qwen3_moe", QWEN3_MOE | {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "qwen3-moe-all-experts": ("qwen3_moe", QWEN3_MOE | {"num_experts_per_tok": 8, "attention_bias": True}),
    "qwen3-moe-window": ("qwen3_moe", QWEN3_MOE | WINDOWS | {"mlp_only_layers": [0, 2]}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-other-gate": (
        "gpt_oss",
        GPT_OSS | {"swiglu_alpha": 1.25, "swiglu_limit": 0.5, "tie_word_embeddings": True},
    ),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK_V2),
    "deepseek-v2-groups-biases": ("deepseek_v2", DEEPSEEK_V2 | GROUPS | {"attention_bias": True}),
    "deepseek-v2-lite-yarn": ("deepseek_v2", DEEPSEEK_V2 | {"q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek-v2-dense": ("deepseek_v2", DEEPSEEK_V2 | {"first_k_dense_replace": 9}),
    "deepseek-v2-yarn-tied": (
        "deepseek_v2",
        DEEPSEEK_V2 | {"rope_parameters": ROPES["yarn"], "tie_word_embeddings": True, "first_k_dense_replace": 0},
    ),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek-v3-yarn-odd-heads": (
        "deepseek_v3",
        DEEPSEEK_V3
        | {"rope_parameters": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True}
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 40, "qk_rope_head_dim": 12}
        | {"head_dim": 12},
    ),
    "deepseek-v3-uncompressed-halves": (
        "deepseek_v3",
        DEEPSEEK_V3 | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_group": 2},
    ),
    "deepseek-v32": ("deepseek_v32", DEEPSEEK_V32),
    "deepseek-v32-yarn-odd-heads": (
        "deepseek_v32",
        DEEPSEEK_V32
        | {"rope_parameters": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True}
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 40, "qk_rope_head_dim": 12}
        | {"head_dim": 12, "index_topk": 37, "index_head_dim": 33, "index_n_heads": 17, "first_k_dense_replace": 9},
    ),
    "deepseek-v32-all-positions": ("deepseek_v32", DEEPSEEK_V32 | {"index_topk": 500, "index_head_dim": 256}),
    "glm-moe-dsa": (
        "glm_moe_dsa",
        DEEPSEEK_V32 | {"n_group": 1, "topk_group": 1, "index_head_dim": 32, "index_topk": 9},
    ),
    "glm-moe-dsa-shared-indexers": (
        "glm_moe_dsa",
        DEEPSEEK_V32
        | {"indexer_types": ["full", "shared", "full", "shared"], "num_hidden_layers": 4, "q_lora_rank": 28}
        | {"num_attention_heads": 5, "num_key_value_heads": 5, "index_topk": 23, "index_n_heads": 13},
    ),
    "kimi-k2": (  # DeepSeek-V3's class, with one group of experts
        "deepseek_v3",
        DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5},
    ),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 20, "sliding_window": 9, "attn_logit_softcapping": 2.0}),
    "gemma3": (
        "gemma3",
        {"num_hidden_layers": 4, "sliding_window_pattern": 3, "sliding_window": 9, "tie_word_embeddings": True}
        | {"query_pre_attn_scalar": 20},
    ),
    "gemma3-scaled": (
        "gemma3",
        {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 3.0},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {"attention_bias": False, "num_key_value_heads": 4}),
    "granite": (
        "granite",
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_bias": True}
        | {"attention_multiplier": 0.0625, "tie_word_embeddings": True},
    ),
    "ministral": (
        "ministral",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": (
        "ministral3",
        {"rope_parameters": ROPES["yarn"] | {"original_max_position_embeddings": 24, "llama_4_scaling_beta": 0.4}},
    ),
    "ministral3-window-tied": (
        "ministral3",
        {"sliding_window": 13, "tie_word_embeddings": True}
        | {"rope_parameters": ROPES["yarn"] | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": (
        "olmo3",
        {"num_hidden_layers": 4, "sliding_window": 9}
        | {"rope_parameters": {"sliding_attention": ROPES["default"], "full_attention": ROPES["yarn"]}},
    ),
    "phi3": ("phi3", {}),
    "phi3-window-partial": (
        "phi3",
        {"sliding_window": 13, "rope_parameters": ROPES["default"] | {"partial_rotary_factor": 0.75}},
    ),
    "phi3-longrope-short": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 300}),
    "phi3-longrope-long": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "seed-oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "qwen3-next": ("qwen3_next", GATED_DELTA_MOE),
    "qwen3-next-dense-biases": (
        "qwen3_next",
        GATED_DELTA_MOE
        | {"mlp_only_layers": [1], "attention_bias": True, "norm_topk_prob": False, "linear_conv_kernel_dim": 3}
        | {"layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"]},
    ),
    "qwen3-5": ("qwen3_5", GATED_DELTA),
    "qwen3-5-tied-one-key-head": (
        "qwen3_5",
        GATED_DELTA | {"tie_word_embeddings": True, "linear_num_key_heads": 1, "linear_value_head_dim": 9},
    ),
    "qwen3-5-moe": ("qwen3_5_moe", GATED_DELTA_MOE | {"linear_num_key_heads": 4}),
    "bamba": ("bamba", BAMBA),
    "bamba-biases-one-group": (
        "bamba",
        BAMBA
        | {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_n_groups": 1, "attention_bias": True}
        | {"mlp_bias": True, "mamba_d_conv": 2, "time_step_limit": (0.1, float("inf")), "tie_word_embeddings": True},
    ),
    "granite-hybrid": ("granitemoehybrid", GRANITE_HYBRID),
    "granite-hybrid-dense-rotated": (
        "granitemoehybrid",
        GRANITE_HYBRID
        | {"num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True, "mamba_n_groups": 2}
        | {"tie_word_embeddings": True, "mamba_proj_bias": True},
    ),
    "kimi-linear": ("kimi_linear", KIMI_LINEAR),
    "kimi-linear-groups": (
        "kimi_linear",
        KIMI_LINEAR
        | {"num_local_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2}
        | {"linear_conv_kernel_dim": 3, "linear_head_dim": 20},
    ),
    "nemotron-h": ("nemotron_h", NEMOTRON_H),
    "nemotron-h-biases-groups": (
        "nemotron_h",
        NEMOTRON_H
        | {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "time_step_min": 0.3, "conv_kernel": 3}
        | {"layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention"]},
    ),
    "glm4-moe": ("glm4_moe", GLM4_MOE),
    "glm4-moe-groups-biases": (
        "glm4_moe",
        GLM4_MOE | {"attention_bias": True, "use_qk_norm": False, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
    ),
    **{f"llama-rope-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
}

LOGIT_TOLERANCE = 1e-4
MORE_TOKENS = {"phi3-longrope-long": 64}
"""Where Transformers rotates by the length of the whole sequence: with these, even short prompts become long ones."""


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_tokens(shape: str, tmp_path: Path) -> None:
    family, changes = SHAPES[shape]
    model = write_checkpoint(tmp_path, family, **changes)
    with small_llm(tmp_path, max_model_len=256) as llm:
        (prompt,) = random_prompts(1, 90, seed=1, shortest=90)
        expected = reference_logits(model, prompt)
        for chunk in (None, 8):
            difference = (prompt_logits(llm, prompt, chunk) - expected).abs().max()
            assert difference < LOGIT_TOLERANCE, f"chunk {chunk}: logits differ by {difference:.2e}"
        prompts, count = random_prompts(10, 60, seed=2), MORE_TOKENS.get(shape, 24)
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len({len(p) for p in prompts}) > 7, "the batch is meant to be ragged"
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == count
        check_tokens_equal(model, prompt, tokens, LOGIT_TOLERANCE)


DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": MIXTRAL,
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4},
    "qwen2": WINDOWS | {"max_window_layers": 1},
    "qwen2_moe": QWEN2_MOE | WINDOWS | {"max_window_layers": 2},
    "qwen3": WINDOWS | {"max_window_layers": 1},
    "qwen3_moe": QWEN3_MOE | WINDOWS,
}


@pytest.mark.parametrize("family", DEFAULTS)
def test_what_a_config_leaves_out(family: str, tmp_path: Path) -> None:
    """Theta, epsilon and window are then the family's own."""
    write_checkpoint(tmp_path, family, **DEFAULTS[family])
    path = tmp_path / "config.json"
    left_out = ("rope_parameters", "rope_theta", "rms_norm_eps", "sliding_window", "layer_types")
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in left_out}
    path.write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    (prompt,) = random_prompts(1, 90, seed=1, shortest=90)
    with small_llm(tmp_path, max_model_len=256) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < LOGIT_TOLERANCE
        found = [cast(Span, user.spec.retention).window for user in llm.core.blueprint.ctx.cache_users.users]
    theirs = getattr(model.config, "sliding_window", None)
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * len(found)
    assert found == [theirs if kind == "sliding_attention" else None for kind in kinds]


def test_a_gemma_3_of_before_transformers_5(tmp_path: Path) -> None:
    """As models on the hub have it: two keys for theta, scaling for layers without a window, no ``layer_types``."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    write_checkpoint(tmp_path, "gemma3", num_hidden_layers=4, sliding_window=9, tie_word_embeddings=True)
    path = tmp_path / "config.json"
    left_out = ("rope_parameters", "layer_types", "tie_word_embeddings")
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in left_out}
    config |= {"rope_theta": 5000.0, "rope_local_base_freq": 300.0, "rope_scaling": scaling}
    path.write_text(json.dumps(config | {"sliding_window_pattern": 2}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    (prompt,) = random_prompts(1, 90, seed=1, shortest=90)
    with small_llm(tmp_path, max_model_len=256) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_yarn_beyond_max_position_embeddings(key: str, tmp_path: Path) -> None:
    """Model cards have users add the scaling alone: its factor times the original length may be asked for."""
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=64, rope_parameters=ROPES["default"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 500.0} | {key: {name: x for name, x in ROPES["yarn"].items() if name != "rope_theta"}}
    path.write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    (prompt,) = random_prompts(1, 300, seed=1, shortest=300)
    with small_llm(tmp_path, max_model_len=512) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < LOGIT_TOLERANCE
    with small_llm(tmp_path) as llm:
        assert llm.core.blueprint.ctx.max_model_len == 64, "only who asks gets more"
    message = "--max-model-len 513 is beyond the 512 positions .*yarn's factor times original_max_position_embeddings"
    with pytest.raises(ConfigError, match=message):
        small_llm(tmp_path, max_model_len=513)


@pytest.mark.parametrize(
    ("family", "changes", "backend"),
    [("qwen3", {}, "reference"), ("qwen3", {}, "cpu_paged"), ("olmo3", {}, "auto"), ("llama4", LLAMA4, "auto")],
    ids=["reference", "cpu_paged", "olmo3", "llama4"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_precision_stays_close(
    family: str, changes: dict[str, Any], backend: str, dtype: str, tmp_path: Path
) -> None:
    """Teacher-forced logits in 16 bits are as far from float32 as Transformers' own are, within a factor of three."""
    model = write_checkpoint(tmp_path, family, **changes)
    (prompt,) = random_prompts(1, 70, seed=3, shortest=70)
    exact = reference_logits(model, prompt)
    rounded = reference_logits(model.to(getattr(torch, dtype)), prompt).float()
    chosen = {} if backend == "auto" else {"attention_backend": backend}
    with small_llm(tmp_path, dtype=dtype, **chosen) as llm:
        ours = prompt_logits(llm, prompt)
    theirs = float((rounded - exact).square().mean().sqrt())
    error = float((ours - exact).square().mean().sqrt())
    assert 0 < error < 3 * theirs, f"root mean square error {error:.3e}, Transformers' own {theirs:.3e}"


def test_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama", shards=True)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    (prompt,) = random_prompts(1, 30, shortest=30)
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < LOGIT_TOLERANCE

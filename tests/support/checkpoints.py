"""Tiny random checkpoints of each family, written by Transformers itself, and Transformers' own answers for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BambaConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from hardpoint.conformance.families.model_samples import TINY, random_model
from hardpoint.structured.bytes import byte_tokenizer

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "bamba": BambaConfig,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "deepseek_v32": DeepseekV32Config,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "glm": GlmConfig,
    "glm4": Glm4Config,
    "glm4_moe": Glm4MoeConfig,
    "glm_moe_dsa": GlmMoeDsaConfig,
    "gpt_oss": GptOssConfig,
    "granite": GraniteConfig,
    "granitemoehybrid": GraniteMoeHybridConfig,
    "kimi_linear": KimiLinearConfig,
    "llama": LlamaConfig,
    "llama4": Llama4TextConfig,
    "ministral": MinistralConfig,
    "ministral3": Ministral3Config,
    "mistral": MistralConfig,
    "nemotron_h": NemotronHConfig,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "phi3": Phi3Config,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "seed_oss": SeedOssConfig,
    "smollm3": SmolLM3Config,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5": Qwen3_5TextConfig,
    "qwen3_5_moe": Qwen3_5MoeTextConfig,
}

DEEPSEEK_V2: dict[str, Any] = {
    "num_key_value_heads": 4,  # Transformers repeats keys by their ratio
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
"""Config keys of a tiny DeepSeek-V2."""

LARGE_LATENT: dict[str, Any] = {"kv_lora_rank": 64, "qk_nope_head_dim": 6, "v_head_dim": 5}
"""Sizes beside which keys and values of a token cost little: from 8 queries on, prompts over any context take the
unabsorbed form."""

DEEPSEEK_V3: dict[str, Any] = DEEPSEEK_V2 | {
    "head_dim": 8,  # of the part that rotates
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
"""The same of DeepSeek-V3."""

DEEPSEEK_V32: dict[str, Any] = DEEPSEEK_V3 | {"index_topk": 16, "index_head_dim": 24, "index_n_heads": 15}
"""The same of DeepSeek-V3.2, with lists shorter than prompts. With few heads, many scores would be zero, and
Transformers leaves open which of equal scores are chosen."""

GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,  # the last has attention
    "head_dim": 32,  # of which a quarter rotates
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
"""The same of Qwen's hybrids of gated delta nets and attention."""

GATED_DELTA_MOE: dict[str, Any] = GATED_DELTA | {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

KIMI_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
"""The same of Kimi Linear."""

BAMBA: dict[str, Any] = {
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
}
"""The same of a hybrid of Mamba-2 and attention."""

GRANITE_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "shared_intermediate_size": 48,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "embedding_multiplier": 4.0,
    "logits_scaling": 2.0,
}
"""The same of Granite's hybrids."""

NEMOTRON_H: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
"""The same of Nemotron-H, whose layers are one mixer or feed-forward each."""

GLM4_MOE: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
}
"""Config keys of a tiny GLM-4-MoE."""


LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attention_chunk_size": 13,
    "floor_scale": 11,
    "attn_scale": 0.4,
    "num_local_experts": 6,
    "intermediate_size_mlp": 80,
}
"""The same of Llama 4: chunks and steps of its queries' growth are shorter than prompts."""


_FEW: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
FEW_EXPERTS = {"qwen2_moe": _FEW, "qwen3_moe": _FEW, "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3}}
"""Families whose configs have up to 128 large experts by default."""


def write_checkpoint(
    folder: Path, family: str, *, shards: bool = False, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Write a random model of ``family`` to ``folder`` and return it, in float32 and evaluation mode.

    ``changes`` override config keys.
    """
    model = random_model(CONFIGS[family](**(TINY | FEW_EXPERTS.get(family, {}) | changes)), seed)
    model.save_pretrained(folder, max_shard_size="60KB" if shards else "1GB")
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')


def random_prompts(count: int, longest: int, seed: int = 0, shortest: int = 1) -> list[list[int]]:
    """Ragged prompts of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Transformers' logits, float32 [T, vocab]."""
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def check_tokens_equal(model: PreTrainedModel, prompt: list[int], tokens: list[int], tolerance: float = 1e-4) -> None:
    """Assert that ``tokens`` is Transformers' greedy continuation of ``prompt``.

    Teacher-forced in one pass. Where a token is not the likeliest, the two must be a tie: their logits closer than
    twice ``tolerance`` (contract: what "equal" means); what follows such a tie is not compared.
    """
    logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
    for position, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        best = int(row.argmax())
        if best != token:
            margin = float(row[best] - row[token])
            assert margin < 2 * tolerance, f"token {position} is {token}, expected {best}: margin {margin:.2e}"
            return

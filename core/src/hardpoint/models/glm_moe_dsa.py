"""GLM-5 (Zhipu AI 2026): DeepSeek-V3.2's sparse attention, whose layers may share an indexer (arXiv:2603.12201)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.layers import CausalLMArgs
from hardpoint.models.decoder import Block, Sublayer, decoder, layer_kinds, mlp, norms, num_layers
from hardpoint.models.deepseek import (
    bias_corrected_mixture,
    layers_with_experts,
    multi_token_prediction,
    sparse_latent_attention,
)
from hardpoint_plugin_api import CheckpointError, MLAArgs

_DEFAULTS = {"routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "index_n_heads": 32}
_PATTERN = {"F": "full", "S": "shared"}


def glm_moe_dsa(config: HFConfig) -> CausalLMArgs:
    """Sparse latent attention in every layer; layers without an indexer read what the last one before them chose."""
    full, dense, norm = sparse_latent_attention(config, _DEFAULTS, interleaved=True), mlp(config), norms(config, 1e-5)
    shared = Sublayer[MLAArgs](
        replace(full.args, indexer=None), {name: slot for name, slot in full.names.items() if "indexer" not in name}
    )
    with_experts = layers_with_experts(config, 3)
    sparse = bias_corrected_mixture(config, _DEFAULTS) if any(with_experts) else dense
    blocks = [
        Block(full if chooses else shared, sparse if is_sparse else dense, norm)
        for chooses, is_sparse in zip(_layers_with_indexers(config), with_experts, strict=True)
    ]
    model = decoder(config, blocks)
    return replace(model, weight_names={**model.weight_names, **multi_token_prediction(config)})


def _layers_with_indexers(config: HFConfig) -> tuple[bool, ...]:
    """Which layers choose positions: those of ``indexer_types``, of ``index_topk_pattern``, or each
    ``index_topk_freq``-th. The first does.
    """
    found = tuple(_kinds(config))
    if found[0] != "full":
        raise CheckpointError(f"{config.path}: the first layer has no earlier one whose indexer it could share")
    return tuple(kind == "full" for kind in found)


def _kinds(config: HFConfig) -> Iterator[str]:
    pattern = config.get("index_topk_pattern")
    if config.get("indexer_types") is not None:
        yield from layer_kinds(config, "indexer_types", ("full", "shared"))
    elif isinstance(pattern, str) and len(pattern) == num_layers(config) and set(pattern) <= set(_PATTERN):
        yield from (_PATTERN[letter] for letter in pattern)
    elif pattern is not None:
        yield from layer_kinds(config, "index_topk_pattern", ("full", "shared"))
    else:
        frequency, offset = config.integer("index_topk_freq", 1), config.integer("index_skip_topk_offset", 2)
        for layer in range(num_layers(config)):
            yield "full" if max(layer - offset + 1, 0) % frequency == 0 else "shared"

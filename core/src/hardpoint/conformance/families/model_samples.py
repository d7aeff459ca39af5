"""Samples of models for the trials of architectures: a tiny random checkpoint, and the logits that it means.

Of an architecture that Transformers has, config, weights and logits are Transformers' own. A plugin brings samples of
an architecture of its own by the hook ``hardpoint_conformance``, see docs/conformance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hardpoint.structured.bytes import VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Reference = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Token ids of one sequence, and a dtype, float32 or float64 -> logits [T, vocab], computed in it on the host."""


@dataclass(frozen=True)
class ModelSample:
    """A checkpoint. ``write(folder, seed)`` writes config.json and safetensors files, and returns the reference.

    Equal seeds make equal checkpoints. Positions reach to 64 at least. ``may_be_refused`` says that the config has what
    an implementation of the architecture need not have: one that refuses it is not tried with it.
    """

    name: str
    write: Callable[[Path, int], Reference]
    may_be_refused: bool = False


TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": None,
}
"""Config keys of a tiny decoder."""
_MIXTURE: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
"""The same of latent attention, where heads share no keys, and a head's dimension is that of the part that rotates."""
_HYBRID: dict[str, Any] = {
    "head_dim": 32,  # of which a quarter rotates
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
"""The same of gated delta nets beside attention."""
_MAMBA: dict[str, Any] = {
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
}
"""The same of Mamba-2 beside attention, as different families call it."""
_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
"""Config keys of a tiny vision tower, which text does not use."""
_VARIATIONS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "window": {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
}
"""Config keys by variation; one is made for architectures whose configs have its first key."""


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model of Transformers' with random weights, in float32 and evaluation mode.

    Weights are larger than the initialisation's, so that attention is far from uniform and a wrong mask or position
    shows. Correction biases of routers, zero in a new model, change many choices.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model: PreTrainedModel = cast(Any, kind).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter) - 0.5)  # around one, stored less one where it is zero
            else:
                parameter.normal_(0, 0.08 if parameter.ndim >= 2 else 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    return model


def transformers_samples(architecture: str) -> tuple[ModelSample, ...]:
    """Small random models, to be compared with Transformers' code, of the class that its config calls ``architecture``.

    Empty where Transformers has no such class.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    has_images = architecture.endswith("ForConditionalGeneration")
    kinds = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if has_images:
        kinds = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    # Several model types may share a class: the first with a config that makes it is the class's own.
    stem = architecture.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM").lower()
    titles = (stem,) if has_images else (stem, f"{stem}text")  # the latter where a model of images has the name
    named = [kind for kind, name in kinds.items() if name == architecture and kind in CONFIG_MAPPING]
    configs = {kind: CONFIG_MAPPING[kind]() for kind in named if _title(CONFIG_MAPPING[kind]) in titles}
    own = [kind for kind, config in configs.items() if hasattr(config, "vision_config") == has_images]
    if not own:
        return ()
    config = configs[own[0]]
    own_keys = (config.text_config if has_images else config).to_dict()
    known = own_keys.keys() | {"head_dim"}
    # An architecture that chooses one expert for each token may have no other form.
    choices = {k: 1 for k in ("num_experts_per_tok", "num_experts_per_token") if own_keys.get(k) == 1}
    samples = []
    for name, changes in _VARIATIONS.items():
        if not changes or next(iter(changes)) in known:
            latent = _LATENT if "kv_lora_rank" in known else {}
            hybrid = _HYBRID if known & {"linear_num_value_heads", "linear_num_heads", "mamba_n_heads"} else {}
            keys = TINY | _MIXTURE | choices | latent | hybrid | _MAMBA | dict(changes)
            keys = {k: v for k, v in keys.items() if k in known or k in TINY}
            if has_images:
                vision = _VISION | {"out_hidden_size": TINY["hidden_size"]}
                tied = keys["tie_word_embeddings"]
                keys = {"text_config": keys, "vision_config": vision, "tie_word_embeddings": tied}
            samples.append(ModelSample(name, partial(_write, own[0], keys), may_be_refused=bool(changes)))
    return tuple(samples)


def _title(config: type) -> str:
    return config.__name__.removesuffix("Config").lower()


def _write(kind: str, keys: Mapping[str, Any], folder: Path, seed: int) -> Reference:
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    model = random_model(CONFIG_MAPPING[kind](**keys), seed)
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    return reference_of(model)


def reference_of(model: PreTrainedModel) -> Reference:
    """The logits of a model of Transformers'. Experts are run one by one: grouped matmuls have no float64."""
    model.set_experts_implementation("eager")

    @torch.inference_mode()
    def logits(ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        double = dtype == torch.float64
        (model.double if double else model.float)()
        found: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
        model.float()
        return found

    return logits

"""params.json of Mistral AI's own format as a config.json of Transformers.

Keys and their meaning are those that vLLM 0.12 (``vllm/transformers_utils/configs/mistral.py``) and Transformers 5
(``models/ministral3/convert_ministral3_weights_to_hf.py``) read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint_plugin_api import CheckpointError

_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "activation": "hidden_act",
    "tied_embeddings": "tie_word_embeddings",
    "max_seq_len": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
}
_READ_HERE = {"llama_4_scaling", "model_type", "moe", "multimodal", "quantization", "sliding_window", "yarn"}
_READ_HERE |= {"vision_encoder", "_sliding_window"}
_WINDOWS = ("sliding_window", "_sliding_window")
"""The window's key, and the one of Ministral-8B-Instruct-2410, which Transformers' converter of it reads
(``models/ministral/convert_ministral_weights_to_hf.py``)."""
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""The settings that params.json may leave out. Of positions it says nothing in most models."""
_YARN = {"beta": "beta_fast", "alpha": "beta_slow", "factor": "factor"}
_LENGTH = "original_max_position_embeddings"
_REMEDY = "take the checkpoint in Hugging Face's format"


def hugging_face_config(params: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config of the model that ``params``, read from ``path``, describe.

    A model with a vision encoder becomes the language model of a Mistral3ForConditionalGeneration. Raises
    CheckpointError for keys that mean a model of another kind.
    """
    if unknown := sorted(key for key in set(params) - set(_KEYS) - _READ_HERE if params[key]):
        raise CheckpointError(f"{path}: {', '.join(unknown)} is not read from Mistral's own format; {_REMEDY}")
    if params.get("model_type", "transformer") != "transformer":
        raise CheckpointError(f"{path}: 'model_type' must be 'transformer', got {params['model_type']!r}; {_REMEDY}")
    read = _Params(params, path)
    found = {_KEYS[key]: value for key, value in params.items() if value is not None and key in _KEYS}
    config = _DEFAULTS | read.rope() | read.architecture() | read.windows() | found
    quantization = read.quantization()
    if read.has_vision:
        config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"} | {
            "tie_word_embeddings": config["tie_word_embeddings"],
            "text_config": config,
        }
    return config | quantization


class _Params:
    """The keys that are no single setting of Transformers."""

    def __init__(self, params: Mapping[str, Any], path: Path) -> None:
        self._params, self._path = params, path

    @property
    def has_vision(self) -> bool:
        multimodal = self._object("multimodal")
        if other := sorted(set(multimodal) - {"vision_encoder_args"}):
            raise self._wrong("multimodal", f"may hold 'vision_encoder_args' alone, got {', '.join(other)}; {_REMEDY}")
        return bool(multimodal or self._object("vision_encoder"))

    def rope(self) -> dict[str, Any]:
        """YaRN, whose ``apply_scale`` says whether cosines and sines grow as its paper has it, and Llama 4's scaling of
        queries; without both, nothing."""
        yarn, scaling = self._object("yarn"), self._object("llama_4_scaling")
        rope: dict[str, Any] = {}
        if yarn:
            self._only("yarn", yarn, {*_YARN, _LENGTH, "apply_scale"}, needs={"factor", _LENGTH})
            rope = {"rope_type": "yarn", _LENGTH: yarn[_LENGTH]}
            rope |= {ours: self._number("yarn", yarn, theirs) for theirs, ours in _YARN.items() if theirs in yarn}
            rope |= {} if yarn.get("apply_scale", True) else {"attention_factor": 1.0}
        if scaling:
            self._only("llama_4_scaling", scaling, {"beta", _LENGTH}, needs={"beta", _LENGTH})
            if rope and scaling[_LENGTH] != rope[_LENGTH]:
                raise self._wrong("llama_4_scaling", f"must have the {_LENGTH} of 'yarn', {rope[_LENGTH]}; {_REMEDY}")
            rope = {"rope_type": "default", _LENGTH: scaling[_LENGTH], "llama_4_scaling_beta": scaling["beta"]} | rope
        if not rope:
            return {}
        theta = {"rope_theta": self._params["rope_theta"]} if self._params.get("rope_theta") else {}
        length = {"max_position_embeddings": int(rope["factor"] * self._count("yarn", yarn, _LENGTH))} if yarn else {}
        return {"rope_parameters": rope | theta, **length}

    def architecture(self) -> dict[str, Any]:
        """The class, and what it adds to the settings."""
        moe = self._object("moe")
        if moe:
            self._only("moe", moe, {"num_experts", "num_experts_per_tok"}, needs={"num_experts", "num_experts_per_tok"})
            if self._object("llama_4_scaling"):
                raise self._wrong("llama_4_scaling", f"is not read beside 'moe'; {_REMEDY}")
            sizes = {"num_local_experts": moe["num_experts"], "num_experts_per_tok": moe["num_experts_per_tok"]}
            return _named("MixtralForCausalLM", "mixtral") | sizes
        if self._object("llama_4_scaling"):
            return _named("Ministral3ForCausalLM", "ministral3")
        if isinstance(self._window()[1], list):
            return _named("MinistralForCausalLM", "ministral")
        return _named("MistralForCausalLM", "mistral")

    def windows(self) -> dict[str, Any]:
        """The sliding window: a number, in some files as a text, or one for each layer of a pattern that repeats."""
        key, given = self._window()
        if not isinstance(given, list):
            return {"sliding_window": None if given is None else self._size(key, given)}
        for other in ("moe", "llama_4_scaling"):
            if self._object(other):
                raise self._wrong(key, f"must be one size for all layers beside {other!r}, got {given}; {_REMEDY}")
        sizes = {self._size(key, size) for size in given if size is not None}
        layers = self._params.get("n_layers")
        if len(sizes) > 1 or not given or type(layers) is not int or layers % len(given):
            raise self._wrong(key, f"must be one size for a pattern of 'n_layers' layers, got {given}")
        kinds = ["full_attention" if size is None else "sliding_attention" for size in given]
        return {"sliding_window": next(iter(sizes), None), "layer_types": kinds * (layers // len(given))}

    def quantization(self) -> dict[str, Any]:
        """8-bit floats with a scale for each matrix, and one for its inputs unless they are scaled as they come."""
        found = self._object("quantization")
        if not found:
            return {}
        scheme = found.get("qscheme_act", "TENSOR")
        if found.get("qformat_weight") != "fp8_e4m3" or scheme not in ("TENSOR", "NO_SCALES"):
            raise self._wrong("quantization", f"must be of weights in fp8_e4m3, got {found}; {_REMEDY}")
        activations = "static" if scheme == "TENSOR" else "dynamic"
        left_out = ["lm_head", "model.embed_tokens"]
        method = {"quant_method": "fp8", "activation_scheme": activations, "modules_to_not_convert": left_out}
        return {"quantization_config": method}

    def _window(self) -> tuple[str, Any]:
        """The key of the sliding window, and its value."""
        given = [(key, self._params[key]) for key in _WINDOWS if self._params.get(key) is not None]
        if len(given) > 1 and given[0][1] != given[1][1]:
            raise self._wrong(_WINDOWS[0], f"and {_WINDOWS[1]!r} differ: {given[0][1]} and {given[1][1]}; keep one")
        return given[0] if given else (_WINDOWS[0], None)

    def _size(self, key: str, given: Any) -> int:
        """A number of tokens, in some files as a text."""
        text = str(given)
        if isinstance(given, bool) or not text.isdecimal() or int(text) < 1:
            raise self._wrong(key, f"must be a whole number of tokens, 1 or more, got {given!r:.80}")
        return int(text)

    def _number(self, key: str, found: Mapping[str, Any], name: str) -> float:
        if type(found[name]) not in (int, float) or not 0 < found[name] <= sys.float_info.max:
            raise self._wrong(key, f"must hold a finite number above 0 as {name!r}, got {found[name]!r:.80}")
        return float(found[name])

    def _count(self, key: str, found: Mapping[str, Any], name: str) -> int:
        if type(found[name]) is not int or found[name] < 1:
            raise self._wrong(key, f"must hold a positive whole number as {name!r}, got {found[name]!r:.80}")
        return int(found[name])

    def _object(self, key: str) -> Mapping[str, Any]:
        value = self._params.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, f"must be an object, got {value!r:.80}")
        return value

    def _only(self, key: str, found: Mapping[str, Any], known: set[str], needs: set[str]) -> None:
        if unknown := sorted(name for name in set(found) - known if found[name]):
            raise self._wrong(key, f"holds {', '.join(unknown)}, which is not read here; {_REMEDY}")
        if missing := sorted(needs - set(found)):
            raise self._wrong(key, f"must hold {', '.join(missing)}")

    def _wrong(self, key: str, fault: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {key!r} {fault}")


def _named(architecture: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type}

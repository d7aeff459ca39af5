"""A GGUF file's metadata as the ``config.json`` and ``generation_config.json`` of Hugging Face's format."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hardpoint.checkpoint.gguf.architectures import KEYS, LONG_FACTORS, SHORT_FACTORS, Architecture
from hardpoint.checkpoint.gguf.container import Container
from hardpoint_plugin_api import CheckpointError

METHOD = "gguf"
"""The quantization method of files with quantized tensors."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of Llama 3.1 to 3.3 (their config.json); files hold the factors that follow from them."""

_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>"}
    | {"_<EOT>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<end_of_utterance>"}
)
"""Control tokens that end a model's turn, by their text, as llama.cpp has it (``src/llama-vocab.cpp``)."""
_CONTROL = 3


def make_config(container: Container, architecture: Architecture) -> dict[str, Any]:
    """The ``config.json``.

    Raises CheckpointError for a rotary embedding that cannot be expressed there, and for more blocks than there are.
    """
    metadata, tensors = container.metadata, container.tensors
    prefix = f"{metadata['general.architecture']}."
    given = {key: _exact(metadata[prefix + key]) for key in metadata_keys(metadata, prefix)}
    _check_blocks(container, given, prefix)
    config: dict[str, Any] = {"architectures": [architecture.hf_class], **architecture.constants}
    config |= {ours: given[key] for key, ours in {**KEYS, **architecture.keys}.items() if key in given}
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    if "token_embd.weight" in tensors and len(tensors["token_embd.weight"].shape) == 2:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_output.bias" in tensors
    config |= _head_size(config, given, architecture) | _rope(container, given)
    if architecture.derive is not None:
        architecture.derive(given, tensors, config)
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config | _dtypes(container)


def _check_blocks(container: Container, given: Mapping[str, Any], prefix: str) -> None:
    """Compare the number of blocks with the tensors' names, since a model of any number would be built at first."""
    count, further = given.get("block_count"), given.get("nextn_predict_layers", 0)
    present = {name.split(".")[1] for name in container.tensors if name.startswith("blk.")}
    if type(count) is int and type(further) is int and count - further > len(present):
        raise CheckpointError(
            f"{container.file}: {prefix}block_count is {count}, and there are tensors of {len(present)} blocks; "
            "copy or download the file again"
        )


def make_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ``generation_config.json``: all tokens that end an output."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    texts, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ends = [i for i, kind in enumerate(kinds) if kind == _CONTROL and texts[i] in _END_TEXTS]
    found = list(dict.fromkeys(i for i in (*named, *ends) if i is not None))
    return {"eos_token_id": found} if found else {}


def metadata_keys(metadata: Mapping[str, Any], prefix: str) -> list[str]:
    """The keys that begin with ``prefix``, without it."""
    return [key.removeprefix(prefix) for key in metadata if key.startswith(prefix)]


def _exact(value: Any) -> Any:
    """A number of 32 bits as it was meant: the shortest decimal that rounds to it, 1e-6 for 9.99999997e-07."""
    if type(value) is not float:
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def _head_size(config: Mapping[str, Any], given: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    hidden, heads, rotary = config.get("hidden_size"), config.get("num_attention_heads"), "rope.dimension_count"
    if type(hidden) is not int or type(heads) is not int or heads < 1:
        return {}  # the model's family says what is wrong
    size = config.get("head_dim", hidden // heads)
    found: dict[str, Any] = {"head_dim": size}
    if type(given.get(rotary)) is int and given[rotary] != size:
        found["partial_rotary_factor"] = given[rotary] / size
    if architecture.wide_queries is not None:
        is_wide = config.get("num_hidden_layers") == architecture.wide_queries
        found["query_pre_attn_scalar"] = hidden // heads if is_wide else size
    return found


def _rope(container: Container, given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("rope.scaling.type", "none")
    factor = given.get("rope.scaling.factor", given.get("rope.scale_linear"))
    if "rope_freqs.weight" in container.tensors:
        return {"rope_scaling": _llama3(container, given)}
    if kind == "longrope" or not container.tensors.keys().isdisjoint((LONG_FACTORS, SHORT_FACTORS)):
        return {"rope_scaling": _longrope(container, given)}
    if kind == "none" and factor in (None, 0.0, 1.0):
        return {}
    scaling = {"rope_type": "linear" if kind == "none" else kind, "factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": given.get("rope.scaling.original_context_length"),
            "attention_factor": given.get("rope.scaling.yarn_attn_factor"),
            "beta_fast": given.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": given.get("rope.scaling.yarn_beta_slow"),
        }
    return {"rope_scaling": {key: value for key, value in scaling.items() if value is not None}}


def _longrope(container: Container, given: Mapping[str, Any]) -> dict[str, Any]:
    """LongRoPE of Phi-3 and 4: the file has two lists of what frequencies are divided by (``conversion/phi.py``)."""
    found = {"long_factor": LONG_FACTORS, "short_factor": SHORT_FACTORS}
    if missing := [name for name in found.values() if name not in container.tensors]:
        raise CheckpointError(f"{container.file}: {missing[0]} of LongRoPE is missing; convert the model anew")
    scaling = {
        "factor": given.get("rope.scaling.factor"),
        "original_max_position_embeddings": given.get("rope.scaling.original_context_length"),
        "attention_factor": given.get("rope.scaling.attn_factor"),
    }
    lists = {key: [_exact(x) for x in container.tensors[name].floats()] for key, name in found.items()}
    return {"rope_type": "longrope", **{key: x for key, x in scaling.items() if x is not None}, **lists}


def _llama3(container: Container, given: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, of which the file has what each frequency is divided by."""
    stored, theta = container.tensors["rope_freqs.weight"].floats(), given.get("rope.freq_base", 10_000.0)
    if not stored or type(theta) is not float:
        raise CheckpointError(
            f"{container.file}: rope_freqs.weight has {len(stored)} numbers, and rope.freq_base is {theta!r:.80}"
        )
    factor = float(_exact(max(stored)))
    low, high, context = _LLAMA3.values()

    def expected(i: int) -> float:
        wavelength = 2 * math.pi * math.pow(theta, i / len(stored))
        smooth = min(max((context / wavelength - low) / (high - low), 0.0), 1.0)
        return 1 / ((1 - smooth) / factor + smooth)

    if not all(math.isclose(expected(i), value, rel_tol=1e-4) for i, value in enumerate(stored)):
        raise CheckpointError(
            f"{container.file}: rope_freqs.weight is not that of Llama 3.1, 3.2 or 3.3, and no other is read; "
            "give the model in Hugging Face's format"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _dtypes(container: Container) -> dict[str, Any]:
    """The dtype of most matrices; bfloat16 where they are quantized, by the method that reads them."""
    matrices = Counter(tensor.kind for tensor in container.tensors.values() if len(tensor.shape) > 1)
    if any(kind.dtype is None for kind in matrices):
        return {"dtype": "bfloat16", "quantization_config": {"quant_method": METHOD}}
    return {"dtype": matrices.most_common(1)[0][0].dtype if matrices else "float32"}

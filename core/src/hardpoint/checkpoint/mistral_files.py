"""A folder in Mistral AI's own format, params.json and consolidated.safetensors, as a Hugging Face checkpoint's files.

Dense models alone: the keys of params.json that are read here are those of Mistral 7B and its successors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.checkpoint.files import Folder
from hardpoint.checkpoint.tensor_files import TensorFiles
from hardpoint_plugin_api import CheckpointError, TensorInfo

if TYPE_CHECKING:
    import torch

    from hardpoint.checkpoint.safetensors_files import SafetensorsFiles

PARAMS, STEM = "params.json", "consolidated"

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
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
    "max_seq_len": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
}
_CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "sliding_window": None,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The settings that params.json leaves out. Of positions it says nothing in most models."""
_ENDS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")


def is_mistral_folder(folder: Path) -> bool:
    """Whether ``folder`` holds Mistral's own files, and none of Hugging Face's."""
    has_tensors = any(folder.glob(f"{STEM}*.safetensors"))
    return not (folder / "config.json").is_file() and (folder / PARAMS).is_file() and has_tensors


class MistralFiles(Folder):
    """config.json is made of params.json; other files are the folder's own."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings. Raises CheckpointError for keys that mean a model of another kind."""
        params = Folder(self.location).read_json(PARAMS)
        if unknown := sorted(key for key in set(params) - set(_KEYS) if params[key]):
            raise CheckpointError(
                f"{self.location / PARAMS}: {', '.join(unknown)} is not read from Mistral's own format; take the "
                "checkpoint in Hugging Face's format"
            )
        return _CONFIG | {_KEYS[key]: value for key, value in params.items() if value is not None and key in _KEYS}

    def path(self, name: str) -> Path:
        return super().path(PARAMS if name == "config.json" else name)

    def read_text(self, name: str) -> str | None:
        return json.dumps(self.config | self._dtype()) if name == "config.json" else super().read_text(name)

    def tensors(self) -> TensorFiles:
        heads = {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}
        return MistralTensors(self._stored(), heads)

    def _dtype(self) -> dict[str, str]:
        return {"torch_dtype": self._stored().info("norm.weight").dtype}

    def _stored(self) -> SafetensorsFiles:
        from hardpoint.checkpoint.safetensors_files import SafetensorsFiles  # torch, which front ends do without

        return SafetensorsFiles(self.location, STEM)


class MistralTensors(TensorFiles):
    """``stored`` by Hugging Face's names. Rows of q and k, whose pairs rotate as neighbours, are put into halves.

    ``heads``: how many of them the projections of these names have.
    """

    def __init__(self, stored: SafetensorsFiles, heads: dict[str, int]) -> None:
        self._stored, self._heads = stored, heads
        self._names = {_hugging_face(name): name for name in stored.names}

    @property
    def title(self) -> str:
        return self._stored.title

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._stored:
            found = _hugging_face(name)
            yield found, self._in_halves(found, tensor)

    def info(self, name: str) -> TensorInfo:
        return self._stored.info(self._names[name])

    def read(self, name: str) -> torch.Tensor:
        return self._in_halves(name, self._stored.read(self._names[name]))

    def _in_halves(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        heads = self._heads.get(name.rpartition(".")[0].rpartition(".")[2])
        if heads is None:
            return tensor
        rows, columns = tensor.shape
        return tensor.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _hugging_face(name: str) -> str:
    """Hugging Face's name of a tensor; one that is not known keeps its own, and is refused when it is read."""
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in _MODULES:
        return f"model.layers.{layer[1]}.{_MODULES[layer[2]]}.weight"
    return _ENDS.get(name, name)

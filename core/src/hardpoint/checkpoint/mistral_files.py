"""A folder in Mistral AI's own format, params.json and consolidated.safetensors, as the files of a Hugging Face
checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.checkpoint.files import Folder
from hardpoint.checkpoint.mistral_config import hugging_face_config
from hardpoint.checkpoint.tensor_files import TensorFiles
from hardpoint_plugin_api import TensorInfo

if TYPE_CHECKING:
    import torch

    from hardpoint.checkpoint.safetensors_files import SafetensorsFiles

PARAMS, STEM = "params.json", "consolidated"

_ENDS = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
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
    "feed_forward.gate": "block_sparse_moe.gate",
}
_TENSORS = {"weight": "weight", "qscale_weight": "weight_scale", "qscale_act": "input_scale"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"feed_forward\.(experts\.\d+\.w[123])")
_OTHER_PARTS = {
    "vision_encoder.": "vision_tower.",
    "vision_language_adapter.": "multi_modal_projector.",
    "patch_merger.": "multi_modal_projector.patch_merger.",
    "pre_mm_projector_norm.": "multi_modal_projector.norm.",
}


def is_mistral_folder(folder: Path) -> bool:
    """Whether ``folder`` holds Mistral's own files, and none of Hugging Face's."""
    return not (folder / "config.json").is_file() and has_mistral_files(folder)


def has_mistral_files(folder: Path) -> bool:
    """Whether ``folder`` holds Mistral's own files."""
    return (folder / PARAMS).is_file() and any(folder.glob(f"{STEM}*.safetensors"))


class MistralFiles(Folder):
    """config.json is made of params.json; other files are the folder's own."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings. Raises CheckpointError for keys that mean a model of another kind."""
        return hugging_face_config(Folder(self.location).read_json(PARAMS), self.location / PARAMS)

    def path(self, name: str) -> Path:
        return super().path(PARAMS if name == "config.json" else name)

    def read_text(self, name: str) -> str | None:
        return json.dumps(self.config | self._dtype()) if name == "config.json" else super().read_text(name)

    def tensors(self) -> TensorFiles:
        text: dict[str, Any] = self.config.get("text_config", self.config)
        heads = {"q_proj": text["num_attention_heads"], "k_proj": text["num_key_value_heads"]}
        return MistralTensors(self._stored(), heads, "language_model." if text is not self.config else "")

    def _dtype(self) -> dict[str, str]:
        """Nothing where the tensors were not downloaded."""
        if not has_mistral_files(self.location):
            return {}
        return {"torch_dtype": self._stored().info("norm.weight").dtype}

    def _stored(self) -> SafetensorsFiles:
        from hardpoint.checkpoint.safetensors_files import SafetensorsFiles  # torch, which front ends do without

        return SafetensorsFiles(self.location, STEM)


class MistralTensors(TensorFiles):
    """``stored`` by Hugging Face's names. Rows of q and k, whose pairs rotate as neighbours, are put into halves.

    ``heads``: how many of them the projections of these names have. ``prefix``: of names of the language model.
    """

    def __init__(self, stored: SafetensorsFiles, heads: dict[str, int], prefix: str = "") -> None:
        self._stored, self._heads, self._prefix = stored, heads, prefix
        self._names = {hugging_face_name(name, prefix): name for name in stored.names}

    @property
    def title(self) -> str:
        return self._stored.title

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._stored:
            found = hugging_face_name(name, self._prefix)
            yield found, self._in_halves(found, tensor)

    def info(self, name: str) -> TensorInfo:
        return self._stored.info(self._names[name])

    def read(self, name: str) -> torch.Tensor:
        return self._in_halves(name, self._stored.read(self._names[name]))

    def _in_halves(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        heads = self._heads.get(module.rpartition(".")[2])
        if heads is None or kind != "weight":
            return tensor
        rows, columns = tensor.shape
        return tensor.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def hugging_face_name(name: str, prefix: str = "") -> str:
    """Hugging Face's name of a tensor; one that is not known keeps its own, and is refused when it is read."""
    for ours, theirs in _OTHER_PARTS.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    module, _, tensor = name.rpartition(".")
    if tensor not in _TENSORS:
        return name
    if module in _ENDS:
        return f"{prefix}{_ENDS[module]}.{_TENSORS[tensor]}"
    layer = _LAYER.fullmatch(module)
    if layer is None:
        return name
    expert = _EXPERT.fullmatch(layer[2])
    inner = f"block_sparse_moe.{expert[1]}" if expert else _MODULES.get(layer[2])
    return name if inner is None else f"{prefix}model.layers.{layer[1]}.{inner}.{_TENSORS[tensor]}"

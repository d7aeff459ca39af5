"""A checkpoint as an engine sees it: what all of them say of themselves, whatever their model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hardpoint.checkpoint.formats import open_files
from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.checkpoint.json_object import read_json
from hardpoint_plugin_api import CheckpointError

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_FREE_KEYS = frozenset(
    {"_name_or_path", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype", "transformers_version"}
    | {"use_cache"}
)
"""Keys of a config.json that no model is built from."""


OWN_FILE = "hf_quant_config.json"


def _own_file(path: Path) -> Mapping[str, Any] | None:
    """The config in ``path``, with the method that it is for; None where there is no such file."""
    if not path.is_file():
        return None
    data = read_json(path)
    if not isinstance(data.get("quantization"), Mapping):
        raise CheckpointError(f"{path}: 'quantization' must be an object, got {data.get('quantization')!r:.80}")
    return {**data["quantization"], "quant_method": "modelopt"}


@dataclass(frozen=True)
class Checkpoint:
    """A folder in Hugging Face's format, or a file that stands for one (see formats.py).

    ``config`` is for the model's family, which knows its keys.
    """

    config: HFConfig

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read the config of the checkpoint at ``folder``; raises CheckpointError if it is missing or malformed."""
        return cls(HFConfig.read(folder))

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint's files."""
        return self.config.folder

    @property
    def config_path(self) -> Path:
        """Path of the checkpoint's config.json, as error messages name it."""
        return self.config.path

    @property
    def architecture(self) -> str:
        """The model class that the checkpoint was written for."""
        names = self.config.data.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise CheckpointError(
                f"{self.config_path}: 'architectures' must name one model class, such as "
                f'["LlamaForCausalLM"], got {names!r}'
            )
        return names[0]

    @property
    def dtype(self) -> str:
        """The dtype of the weights, by today's key or the one before it; float32 where neither is set.

        float64 is a name like the others, but platforms without it (all of ours) run such a checkpoint in float32.
        """
        config = self.config.text
        key = "torch_dtype" if config.data.get("dtype") is None else "dtype"
        value = config.get(key, "float32")
        name = value.removeprefix("torch.") if isinstance(value, str) else None
        if name not in _DTYPES:
            raise CheckpointError(f"{self.config_path}: {key!r} must be one of {', '.join(_DTYPES)}, got {value!r}")
        return name

    @property
    def quantization_config(self) -> Mapping[str, Any] | None:
        """How the weights were quantized, as the tool that did it wrote it down; None where they were not.

        A model of several parts may have it in ``text_config``. Model Optimizer before 0.29 wrote a file of its own.
        """
        stored = self.config.get("quantization_config", self.config.text.get("quantization_config"))
        if stored is None:
            stored = _own_file(self.folder / OWN_FILE)
        if stored is None:
            return None
        method = stored.get("quant_method") if isinstance(stored, Mapping) else None
        if not isinstance(method, str) or not method:
            raise CheckpointError(
                f"{self.config_path}: 'quantization_config' must be an object with a 'quant_method', got {stored!r:.80}"
            )
        return cast(Mapping[str, Any], stored)

    @property
    def quantization_method(self) -> str | None:
        """The method that the weights were quantized with, None where they were not."""
        stored = self.quantization_config
        return None if stored is None else str(stored["quant_method"])

    def check_same_settings(self, folder: Path) -> None:
        """Raise CheckpointError unless the checkpoint in ``folder`` is of a model with the same settings."""
        files = open_files(folder)
        if not files.has("config.json"):
            raise CheckpointError(
                f"{folder} holds no config.json; give the folder of a Hugging Face checkpoint, or a GGUF file"
            )
        here, there = self.config.data, HFConfig.read(folder).data
        unlike = [key for key in sorted({*here, *there} - _FREE_KEYS) if here.get(key) != there.get(key)]
        if unlike:
            facts = ", ".join(f"{key} is {there.get(key)!r} and not {here.get(key)!r}" for key in unlike)
            raise CheckpointError(
                f"{files.path('config.json')} is of another model than the one that runs: {facts}; weights are updated "
                "from a checkpoint with the same settings, for another one build a new engine"
            )

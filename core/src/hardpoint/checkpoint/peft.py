"""LoRA adapters as PEFT writes them: ``adapter_config.json`` and ``adapter_model.safetensors``.

Format: PEFT's ``LoraConfig`` and ``get_peft_model_state_dict`` (https://github.com/huggingface/peft, 0.4 to 0.18). The
matrices of module M are named ``base_model.model.M.lora_A.weight`` [r, in] and ``...lora_B.weight`` [out, r].
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint.checkpoint.json_object import read_json
from hardpoint.checkpoint.safetensors_files import SafetensorsFiles
from hardpoint_plugin_api import CheckpointError

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")

_MUST_BE: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "use_qalora": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""The served values of keys that may change more than ``W + scale * B @ A`` of linear layers; null is right, too.

Other values of ``init_lora_weights`` (pissa, olora, corda, loftq) mean that training began from changed base weights.
"""


@dataclass(frozen=True)
class LoRAFiles:
    """An adapter on disk, with its config read: ranks and scales by module, matrices in ``tensors``.

    ``modules`` has the name of the A and of the B of each module, by the module's name in the checkpoint.
    """

    tensors: SafetensorsFiles
    modules: Mapping[str, Mapping[str, str]]
    _config: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> LoRAFiles:
        """Read the config and the tensors' headers.

        Raises CheckpointError for a file that is missing or damaged, a key that asks for more than LoRA on linear
        layers, a tensor of another kind, and a module with one of its two matrices.
        """
        file = folder / _CONFIG
        try:
            is_there = file.is_file()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        if not is_there:
            raise CheckpointError(f"{folder} holds no {_CONFIG}; give the folder of a LoRA adapter as PEFT saves it")
        config = read_json(file)
        _check(file, config)
        tensors = SafetensorsFiles(folder, _TENSORS)
        modules: dict[str, dict[str, str]] = {}
        for name in sorted(tensors.names):
            match = _NAME.fullmatch(name)
            if match is None:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is no LoRA matrix of a linear layer "
                    "(base_model.model.MODULE.lora_A.weight or lora_B.weight); adapters of other kinds are not served"
                )
            modules.setdefault(match["module"], {})[match["matrix"]] = name
        for module, found in modules.items():
            if len(found) < 2:
                (name,) = found.values()
                raise CheckpointError(
                    f"{folder}: module {module!r} has {name!r} without the other of lora_A and lora_B"
                )
        if not modules:
            raise CheckpointError(f"{folder}: the adapter holds no tensors")
        return cls(tensors, modules, config)

    def rank(self, module: str) -> int:
        """The rank of a module's matrices, r: by ``rank_pattern``, or the config's own."""
        rank: int = self._of("rank_pattern", module, self._config.get("r", 8))
        return rank

    def scale(self, module: str) -> float:
        """The factor of ``B @ A``: alpha / r, or alpha / sqrt(r) where ``use_rslora`` is set (arXiv:2312.03732)."""
        alpha: float = self._of("alpha_pattern", module, self._config.get("lora_alpha", 8))
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _of(self, patterns: str, module: str, default: Any) -> Any:
        """PEFT's rule: the first pattern that matches the end of the name, from a dot on."""
        for pattern, value in (self._config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default


def _check(file: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"{file}: 'peft_type' is {kind!r}; only LORA is served")
    for key, allowed in _MUST_BE.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(
                f"{file}: {key!r} is {value!r}, which is not served beside other adapters; merge the adapter into "
                "the model's weights, or train it without"
            )
    numbers = {"r": config.get("r", 8), "lora_alpha": config.get("lora_alpha", 8)}
    for patterns in ("rank_pattern", "alpha_pattern"):
        found = config.get(patterns) or {}
        if not isinstance(found, dict):
            raise CheckpointError(f"{file}: {patterns!r} must be an object of names and numbers, got {found!r:.80}")
        for pattern, value in found.items():
            numbers[f"{patterns}.{pattern}"] = value
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(f"{file}: {patterns!r}: {pattern!r} is no regular expression: {error}") from None
    for key, value in numbers.items():
        is_rank = key == "r" or key.startswith("rank_pattern")
        if not (_is_rank(value) if is_rank else _is_finite(value)):
            kind = "a whole number above 0" if is_rank else "a finite number"
            raise CheckpointError(f"{file}: {key!r} must be {kind}, got {value!r:.80}")


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False

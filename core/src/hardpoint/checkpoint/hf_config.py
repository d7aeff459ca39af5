"""A checkpoint's ``config.json``, read with clear errors for what is missing or of the wrong type."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hardpoint.checkpoint.json_object import read_json
from hardpoint_plugin_api import CheckpointError

_REQUIRED: Any = object()
_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class HFConfig:
    """The settings of one checkpoint; ``data`` is the file as it stands."""

    folder: Path
    data: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> HFConfig:
        """Read ``folder``/config.json; raises CheckpointError if it is missing or malformed."""
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; give the folder of a Hugging Face checkpoint")
        return cls(folder, read_json(path))

    @property
    def path(self) -> Path:
        """The file, for messages."""
        return self.folder / "config.json"

    @property
    def architecture(self) -> str:
        """The model class that the checkpoint was written for."""
        names = self.data.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise CheckpointError(f"{self.path}: 'architectures' must name one model class, got {names!r}")
        return names[0]

    @property
    def dtype(self) -> str:
        """The dtype of the weights, by today's key or the one before it; float32 where neither is set.

        float64 is a name like the others, but platforms without it (all of ours) run such a checkpoint in float32.
        """
        key = "torch_dtype" if self.data.get("dtype") is None else "dtype"
        value = self.get(key, "float32")
        name = value.removeprefix("torch.") if isinstance(value, str) else None
        if name not in _DTYPES:
            raise CheckpointError(f"{self.path}: {key!r} must be one of {', '.join(_DTYPES)}, got {value!r}")
        return name

    @property
    def quantization_config(self) -> Mapping[str, Any] | None:
        """How the weights were quantized, as the tool that did it wrote it down; None where they were not."""
        stored = self.get("quantization_config")
        if stored is None:
            return None
        method = stored.get("quant_method") if isinstance(stored, Mapping) else None
        if not isinstance(method, str) or not method:
            raise CheckpointError(
                f"{self.path}: 'quantization_config' must be an object with a 'quant_method', got {stored!r:.80}"
            )
        return cast(Mapping[str, Any], stored)

    @property
    def quantization_method(self) -> str | None:
        """The method that the weights were quantized with, None where they were not."""
        stored = self.quantization_config
        return None if stored is None else str(stored["quant_method"])

    def integer(self, key: str, default: int | None = _REQUIRED) -> int:
        """A positive whole number; null counts as missing."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self.path}: {key!r} must be a positive whole number, got {value!r}")
        return value

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A finite number above 0; null counts as missing."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(f"{self.path}: {key!r} must be a finite number above 0, got {value!r}")
        return float(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, 0 or more; none where the key is missing or null."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
            raise CheckpointError(f"{self.path}: {key!r} must be a list of whole numbers, 0 or more, got {value!r}")
        return tuple(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise CheckpointError(f"{self.path}: {key!r} must be true or false, got {value!r}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, or ``default`` where it is missing or null; CheckpointError where it is required."""
        value = self.data.get(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise CheckpointError(f"{self.path}: {key!r} is missing")
        return value

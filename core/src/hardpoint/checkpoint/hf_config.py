"""A checkpoint's ``config.json``, read with clear errors for what is missing or of the wrong type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint_plugin_api import CheckpointError

_REQUIRED: Any = object()


@dataclass(frozen=True)
class HFConfig:
    """The settings of one checkpoint; ``data`` is the file as it stands."""

    folder: Path
    data: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> HFConfig:
        """Read ``folder``/config.json; raises CheckpointError if it is missing or malformed."""
        path = folder / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
        return cls(folder, data)

    @property
    def architecture(self) -> str:
        """The model class that the checkpoint was written for."""
        names = self.data.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise CheckpointError(f"{self._path}: 'architectures' must name one model class, got {names!r}")
        return names[0]

    @property
    def dtype(self) -> str:
        """The dtype of the stored weights, by today's key or the one before it; float32 where neither is set."""
        value = self.data.get("dtype") or self.data.get("torch_dtype") or "float32"
        return str(value).removeprefix("torch.")

    def integer(self, key: str, default: int | None = _REQUIRED) -> int:
        """A positive whole number; null counts as missing."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self._path}: {key!r} must be a positive whole number, got {value!r}")
        return value

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A number."""
        value = self.get(key, default)
        if type(value) not in (int, float):
            raise CheckpointError(f"{self._path}: {key!r} must be a number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise CheckpointError(f"{self._path}: {key!r} must be true or false, got {value!r}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, or ``default`` where it is missing or null; CheckpointError where it is required."""
        value = self.data.get(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise CheckpointError(f"{self._path}: {key!r} is missing")
        return value

    @property
    def _path(self) -> Path:
        return self.folder / "config.json"

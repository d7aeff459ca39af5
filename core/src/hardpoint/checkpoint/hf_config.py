"""A checkpoint's ``config.json``, read with clear errors for what is missing or of the wrong type."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint.checkpoint.formats import open_files
from hardpoint_plugin_api import CheckpointError

_REQUIRED: Any = object()


@dataclass(frozen=True)
class HFConfig:
    """The settings of the checkpoint at ``folder``; ``data`` is the file as it stands.

    ``file`` holds the settings where that is not the folder's config.json.
    """

    folder: Path
    data: Mapping[str, Any]
    file: Path | None = None

    @classmethod
    def read(cls, folder: Path) -> HFConfig:
        """Read the config.json of the checkpoint at ``folder``, which may be a single file.

        Raises CheckpointError if it is missing or malformed.
        """
        files = open_files(folder)
        path = files.path("config.json")
        if not files.has("config.json"):
            raise CheckpointError(f"{path}: is missing; give the folder of a Hugging Face checkpoint")
        return cls(folder, files.read_json("config.json"), path)

    @property
    def path(self) -> Path:
        """The file, for messages."""
        return self.file or self.folder / "config.json"

    @property
    def text(self) -> HFConfig:
        """The settings of the language model, of a checkpoint that has other parts beside it: its ``text_config``, over
        the settings of all parts. Whether embeddings are tied is a setting of all."""
        inner = self.data.get("text_config")
        if not isinstance(inner, Mapping):
            return self
        tied = {key: value for key, value in self.data.items() if key == "tie_word_embeddings"}
        return HFConfig(self.folder, {**self.data, **inner, **tied})

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

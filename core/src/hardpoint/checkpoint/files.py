"""The files of a checkpoint by the names that Hugging Face gives them, whatever the format that has their contents."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint.checkpoint.tensor_files import TensorFiles
from hardpoint_plugin_api import CheckpointError


class CheckpointFiles(ABC):
    """A checkpoint at ``location``. ``config.json``, ``tokenizer.json`` and so on may be parts of one larger file."""

    location: Path

    @abstractmethod
    def path(self, name: str) -> Path:
        """The file that holds ``name``, for messages; it need not exist."""

    @abstractmethod
    def read_text(self, name: str) -> str | None:
        """The text of ``name``, None where there is none. Raises CheckpointError where it cannot be read."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a ``name``."""

    @abstractmethod
    def matching(self, pattern: str) -> list[str]:
        """Sorted names that match ``pattern`` as ``Path.glob`` does."""

    @abstractmethod
    def tensors(self) -> TensorFiles:
        """The tensors. Raises CheckpointError for files that are missing or damaged."""

    def read_json(self, name: str) -> dict[str, Any]:
        """The object in ``name``, empty where there is none. Raises CheckpointError for anything else in it."""
        text = self.read_text(name)
        if text is None:
            return {}
        try:
            data = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{self.path(name)}: cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"{self.path(name)}: must hold a JSON object, got {type(data).__name__}")
        return data


@dataclass(frozen=True)
class Folder(CheckpointFiles):
    """A folder in Hugging Face's format."""

    location: Path

    def path(self, name: str) -> Path:
        return self.location / name

    def read_text(self, name: str) -> str | None:
        if not self.has(name):
            return None
        try:
            return self.path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path(name)}: cannot be read: {error}") from error

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def matching(self, pattern: str) -> list[str]:
        return sorted(str(path.relative_to(self.location)) for path in self.location.glob(pattern))

    def tensors(self) -> TensorFiles:
        from hardpoint.checkpoint.safetensors_files import SafetensorsFiles  # torch, which front ends do without

        return SafetensorsFiles(self.location)

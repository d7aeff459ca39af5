"""A GGUF file, or the files of a split one, as the files of a Hugging Face checkpoint."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hardpoint.checkpoint.files import CheckpointFiles
from hardpoint.checkpoint.gguf.architectures import architecture_of
from hardpoint.checkpoint.gguf.config import make_config, make_generation_config
from hardpoint.checkpoint.gguf.container import Container
from hardpoint.checkpoint.gguf.vocabulary import make_tokenizer, make_tokenizer_config
from hardpoint.checkpoint.tensor_files import TensorFiles
from hardpoint_plugin_api import CheckpointError

_Maker = Callable[[Container], Mapping[str, Any] | None]


def _config(container: Container) -> dict[str, Any]:
    if not container.tensors:
        raise CheckpointError(
            f"{container.file} holds a vocabulary and no weights; give the GGUF file of a whole model"
        )
    return make_config(container, architecture_of(container.metadata, container.file))


_FILES: Mapping[str, _Maker] = {
    "config.json": _config,
    "generation_config.json": lambda container: make_generation_config(container.metadata),
    "tokenizer.json": lambda container: make_tokenizer(container.metadata, container.file),
    "tokenizer_config.json": lambda container: make_tokenizer_config(container.metadata, container.file),
}
"""The files that metadata makes; None where the metadata has nothing of the kind."""


class GgufFiles(CheckpointFiles):
    """``path`` is the GGUF file whatever the name: there is no other."""

    def __init__(self, container: Container) -> None:
        self.location = container.file
        self._container = container

    def path(self, name: str) -> Path:
        return self.location

    def read_text(self, name: str) -> str | None:
        if name not in _FILES:
            return None
        made = _FILES[name](self._container)
        return None if made is None else json.dumps(made)

    def has(self, name: str) -> bool:
        return self.read_text(name) is not None

    def matching(self, pattern: str) -> list[str]:
        return [name for name in sorted(_FILES) if fnmatch.fnmatchcase(name, pattern)]

    def tensors(self) -> TensorFiles:
        from hardpoint.checkpoint.gguf.tensors import GgufTensors  # torch, which front ends do without

        return GgufTensors(self._container, architecture_of(self._container.metadata, self.location))


def open_gguf(file: Path) -> GgufFiles:
    """Read the header of ``file``, once while it does not change. Raises CheckpointError for a damaged file."""
    try:
        facts = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    return GgufFiles(_container(file, facts.st_mtime_ns, facts.st_size))


@lru_cache(maxsize=2)
def _container(file: Path, changed: int, size: int) -> Container:
    """The header of a file as it is; ``changed`` and ``size`` tell one version from another."""
    return Container.read(file)

"""The tensors of a checkpoint, single or sharded safetensors, opened lazily.

Format: https://huggingface.co/docs/safetensors; shards are listed by ``model.safetensors.index.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open

from hardpoint.checkpoint.json_object import read_json
from hardpoint_plugin_api import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsFiles:
    """Names of all tensors and the file of each. Reading maps one file at a time; nothing is cached."""

    def __init__(self, folder: Path) -> None:
        """Find the files of ``folder`` and read their headers; raises CheckpointError, naming the file, for damage."""
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        for path in self._paths():
            for name in self._names(path):
                if name in self._file_of:
                    raise CheckpointError(f"{path}: tensor {name!r} is in {self._file_of[name].name} too")
                self._file_of[name] = path

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._file_of)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, file by file; each is a view of the mapped file and valid until the next file."""
        for path in dict.fromkeys(self._file_of.values()):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # the handle is no mapping
                    try:
                        yield name, file.get_tensor(name)
                    except SafetensorError as error:
                        raise CheckpointError(f"{path}: tensor {name!r} cannot be read: {error}") from error

    def _paths(self) -> list[Path]:
        index = self.folder / _INDEX
        if index.is_file():
            try:
                weight_map = read_json(index)["weight_map"]
                for name, shard in weight_map.items():
                    _check_shard(index, name, shard)
                shards = sorted(set(weight_map.values()))
            except (KeyError, AttributeError) as error:
                raise CheckpointError(f"{index}: 'weight_map' must be an object of tensor and file names") from error
            missing = [shard for shard in shards if not (self.folder / shard).is_file()]
            if missing:
                raise CheckpointError(f"{self.folder}: shards are missing: {', '.join(missing)}")
            return [self.folder / shard for shard in shards]
        if (self.folder / _SINGLE).is_file():
            return [self.folder / _SINGLE]
        found = ", ".join(sorted(p.name for p in self.folder.glob("*.bin"))) or "no weights"
        raise CheckpointError(
            f"{self.folder}: neither {_SINGLE} nor {_INDEX} is there ({found}); only safetensors checkpoints are read"
        )

    @staticmethod
    def _names(path: Path) -> list[str]:
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: damaged or truncated safetensors file: {error}") from error


def _check_shard(index: Path, tensor: str, shard: object) -> None:
    """By its name alone: a hub's cache is made of links that lead out of the folder."""
    if not isinstance(shard, str) or PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
        raise CheckpointError(
            f"{index}: 'weight_map' must name a file inside the folder for tensor {tensor!r}, got {shard!r}"
        )

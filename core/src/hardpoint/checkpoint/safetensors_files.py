"""The tensors of a checkpoint, single or sharded safetensors, opened lazily.

Format: https://huggingface.co/docs/safetensors; shards are listed by ``model.safetensors.index.json``.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open

from hardpoint.checkpoint.direct_reads import DirectFile, NoRoomError, Span, reads_faster
from hardpoint.checkpoint.json_object import read_json
from hardpoint.checkpoint.safetensors_header import DTYPES, Place, places_in
from hardpoint.checkpoint.tensor_files import TensorFiles
from hardpoint_plugin_api import CheckpointError, TensorInfo

logger = logging.getLogger(__name__)

_MAPPED_BYTES = 1 << 24
"""A file is opened anew after as many bytes, so that those read before no longer count as memory in use."""


class SafetensorsFiles(TensorFiles):
    """Names of all tensors and the file of each, as CheckpointTensors. Reading maps one file at a time."""

    def __init__(self, folder: Path, stem: str = "model") -> None:
        """Find the files of ``folder``, whose names begin with ``stem``, and read their headers.

        Raises CheckpointError, naming the file, for damage.
        """
        self.folder = folder
        self._single, self._index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
        self._file_of: dict[str, Path] = {}
        for path in self._paths():
            for name in self._names(path):
                if name in self._file_of:
                    other = self._file_of[name].name
                    raise CheckpointError(f"{path}: tensor {name!r} is in {other} too; remove one of the files")
                self._file_of[name] = path

    @property
    def title(self) -> str:
        """The folder, for messages."""
        return str(self.folder)

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._file_of)

    @cached_property
    def metadata(self) -> Mapping[str, str]:
        """The ``__metadata__`` of all headers; of a key in several files, the last one's text."""
        found: dict[str, str] = {}
        for path in self.paths:
            with safe_open(path, framework="pt") as file:
                found |= file.metadata() or {}
        return found

    @property
    def paths(self) -> list[Path]:
        """The files, in their order."""
        return list(dict.fromkeys(self._file_of.values()))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, file by file; each is a view of the mapped file, to be dropped when the next is asked
        for."""
        for path, names in self._names_in.items():
            yield from self._mapped(path, names)

    def of_rows(self, rows: Mapping[str, range]) -> Iterator[tuple[str, torch.Tensor]]:
        """See TensorFiles. Each file is mapped or read directly, whichever measures faster.

        Raises CheckpointError for a file that cannot be read.
        """
        num_direct = 0
        for path, names in self._names_in.items():
            try:
                places = places_in(path)
                spans = {name: span for name in names if (span := places[name].span(rows.get(name))) is not None}
                if reads_faster(path, list(spans.values())):
                    num_direct += yield from self._direct(path, names, places, spans)
                else:
                    yield from self._mapped(path, names)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
        if num_direct:
            logger.info("%s: direct reads were faster for %d of %d files", self.title, num_direct, len(self.paths))

    def _direct(
        self, path: Path, names: Sequence[str], places: Mapping[str, Place], spans: Mapping[str, Span]
    ) -> Generator[tuple[str, torch.Tensor], None, bool]:
        """Yield tensors with ``spans`` as these are read, those between from the mapped file.

        Returns False where the process may not have the addresses for direct reads: all come from the mapped file then.
        """
        with DirectFile(path) as file:
            try:
                read = file.spans([spans[name] for name in names if name in spans])
            except NoRoomError as error:
                logger.warning("%s: mapped, though direct reads were faster: %s", path, error)
                yield from self._mapped(path, list(names))
                return False
            for is_read, group in groupby(names, spans.__contains__):
                if not is_read:
                    yield from self._mapped(path, list(group))
                    continue
                for name in group:
                    memory, origin = next(read)
                    yield name, places[name].tensor(memory, origin)
        return True

    @cached_property
    def _names_in(self) -> dict[Path, list[str]]:
        found: dict[Path, list[str]] = {}
        for name, path in self._file_of.items():
            found.setdefault(path, []).append(name)
        return found

    def _mapped(self, path: Path, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        while names:
            names = yield from self._some_of(path, names)

    def _some_of(self, path: Path, names: list[str]) -> Generator[tuple[str, torch.Tensor], None, list[str]]:
        """Yield the first of ``names`` from one mapping of the file, and return those that are left."""
        mapped = 0
        with safe_open(path, framework="pt") as file:
            for done, name in enumerate(names, start=1):
                try:
                    tensor = file.get_tensor(name)
                except SafetensorError as error:
                    raise CheckpointError(f"{path}: tensor {name!r} cannot be read: {error}") from error
                mapped += tensor.nbytes
                yield name, tensor
                del tensor
                if mapped >= _MAPPED_BYTES:
                    return names[done:]
        return []

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor; KeyError where there is none of that name."""
        return self._file_of[name]

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor, by its file's header; KeyError where there is none of that name."""
        return self._infos[name]

    def read(self, name: str) -> torch.Tensor:
        """One tensor, copied. Raises CheckpointError for a file that is damaged or gone since."""
        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor.clone()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name!r} cannot be read: {error}") from error

    @cached_property
    def _infos(self) -> dict[str, TensorInfo]:
        infos = {}
        for path in self.paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # the handle is no mapping
                    header = file.get_slice(name)
                    dtype = header.get_dtype()
                    infos[name] = TensorInfo(tuple(header.get_shape()), DTYPES.get(dtype, dtype))
        return infos

    def _paths(self) -> list[Path]:
        index = self.folder / self._index
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
                raise CheckpointError(f"{self.folder}: shards are missing: {', '.join(missing)}; copy or download them")
            return [self.folder / shard for shard in shards]
        if (self.folder / self._single).is_file():
            return [self.folder / self._single]
        found = ", ".join(sorted(p.name for p in self.folder.glob("*.bin"))) or "no weights"
        raise CheckpointError(
            f"{self.folder}: neither {self._single} nor {self._index} is there ({found}); only safetensors are read"
        )

    @staticmethod
    def _names(path: Path) -> list[str]:
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: damaged or truncated safetensors file: {error}; copy or download it again"
            ) from error


def _check_shard(index: Path, tensor: str, shard: object) -> None:
    """By its name alone: a hub's cache is made of links that lead out of the folder."""
    if not isinstance(shard, str) or PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
        raise CheckpointError(
            f"{index}: 'weight_map' must name a file inside the folder for tensor {tensor!r}, got {shard!r}"
        )

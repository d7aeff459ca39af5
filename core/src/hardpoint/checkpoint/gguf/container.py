"""The container: header, metadata, and where each tensor's bytes lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. A model may be split
into files ``NAME-00001-of-0000N.gguf``, each with a header of its own; the first has the metadata.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.checkpoint.gguf.types import TYPES, UNREAD, GgufType
from hardpoint_plugin_api import CheckpointError

if TYPE_CHECKING:
    import torch

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata values -> struct's codes."""
_MOST_DIMS, _MOST_ENTRIES = 4, 1 << 20
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class StoredBytes:
    """One tensor: its type, its shape with the longest axis first as torch has it, and its place in a file."""

    name: str
    kind: GgufType
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        count = 1
        for size in self.shape:
            count *= size
        return count // self.kind.columns * self.kind.size

    @property
    def dtype(self) -> str:
        """The torch dtype of what ``mapped`` returns."""
        return self.kind.dtype or "uint8"

    @property
    def mapped_shape(self) -> tuple[int, ...]:
        """Numbers have their own shape; blocks [..., rows, blocks of a row, bytes of a block]."""
        if self.kind.dtype is not None:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // self.kind.columns, self.kind.size)

    def part(self, number: int) -> StoredBytes:
        """The part with one index of the first axis, which is whole rows."""
        each = self.nbytes // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + number * each)

    def mapped(self) -> torch.Tensor:
        """The tensor as a private mapping of its part of the file, which lives as long as the tensor does.

        Raises CheckpointError for a file that is shorter than its header says, or gone.
        """
        import torch  # here, since front ends do without

        dtype = getattr(torch, self.dtype)
        if not self.nbytes:
            return torch.empty(self.mapped_shape, dtype=dtype)
        start = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = self.offset - start + self.nbytes
        try:
            with self.file.open("rb") as file:
                view = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.file}: tensor {self.name!r} cannot be read: {error}") from error
        flat = torch.frombuffer(view, dtype=torch.uint8, count=self.nbytes, offset=self.offset - start)
        return flat.view(dtype).view(self.mapped_shape)

    def floats(self) -> list[float]:
        """The numbers of a small F32 tensor. Raises CheckpointError for another type, and a file that is gone."""
        if self.kind.name != "F32":
            raise CheckpointError(f"{self.file}: tensor {self.name!r} is {self.kind.name}, expected F32")
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                return list(struct.unpack(f"<{self.nbytes // 4}f", file.read(self.nbytes)))
        except (OSError, struct.error) as error:
            raise CheckpointError(f"{self.file}: tensor {self.name!r} cannot be read: {error}") from error


@dataclass(frozen=True)
class Container:
    """A model's metadata and tensors, in the order of its files."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredBytes]

    @classmethod
    def read(cls, file: Path) -> Container:
        """Read the headers of ``file``, and of all files of a split model.

        Raises CheckpointError, naming the file, for one that is missing, damaged, of another version, or with tensors
        of a type that is not read.
        """
        files = split_files(file)
        metadata: dict[str, Any] = {}
        tensors: dict[str, StoredBytes] = {}
        for number, part in enumerate(files):
            more, found = _read_file(part)
            metadata |= more if number == 0 else {}
            for tensor in found:
                if tensor.name in tensors:
                    other = tensors[tensor.name].file
                    where = "stands there twice; convert the model anew"
                    where = where if other == part else f"is in {other.name} too; remove one of the files"
                    raise CheckpointError(f"{part}: tensor {tensor.name!r} {where}")
                tensors[tensor.name] = tensor
        return cls(files[0], metadata, tensors)


def split_files(file: Path) -> list[Path]:
    """All files of the model that ``file`` is a part of. Raises CheckpointError where some are missing."""
    match = _SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise CheckpointError(f"{file}: the name says part {int(match['number'])} of {count}; rename the file")
    files = [file.with_name(f"{match['stem']}-{n:05}-of-{match['count']}.gguf") for n in range(1, count + 1)]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(f"{file}: parts of the model are missing: {', '.join(missing)}; copy or download them")
    return files


def split_name(file: Path) -> tuple[str, int]:
    """A file's name without its number among the parts of a split model, and that number, from 1."""
    match = _SPLIT.fullmatch(file.name)
    return (file.stem, 1) if match is None else (match["stem"], int(match["number"]))


def _read_file(file: Path) -> tuple[dict[str, Any], list[StoredBytes]]:
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(file, content).read()
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    except (struct.error, IndexError, UnicodeDecodeError, RecursionError) as error:  # the last by arrays in arrays
        raise CheckpointError(f"{file}: damaged or truncated GGUF file: {error}; copy or download it again") from error


class _Header:
    """Reads a header from its beginning; ``_at`` is the next byte."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self._file, self._content, self._at = file, content, 0

    def read(self) -> tuple[dict[str, Any], list[StoredBytes]]:
        if self._content[:4] != _MAGIC:
            raise CheckpointError(
                f"{self._file} is no GGUF file: it begins with {self._content[:4]!r}, not {_MAGIC!r}; "
                "copy or download it again"
            )
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            told = "it is big-endian" if swapped in _VERSIONS else f"it has version {version}"
            raise CheckpointError(f"{self._file}: {told}; GGUF of versions 2 and 3, little-endian, is read")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        if max(num_tensors, num_values) > _MOST_ENTRIES:
            raise CheckpointError(f"{self._file}: damaged GGUF header: {num_tensors} tensors, {num_values} values")
        metadata = {self._string(): self._value(self._number("I")) for _ in range(num_values)}
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(f"{self._file}: general.alignment must be a positive whole number, got {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = [StoredBytes(t.name, t.kind, t.shape, t.file, t.offset + start) for t in found]
        for tensor in tensors:
            if tensor.offset + tensor.nbytes > len(self._content):
                raise CheckpointError(
                    f"{self._file}: damaged or truncated GGUF file: tensor {tensor.name!r} ends at byte "
                    f"{tensor.offset + tensor.nbytes} of {len(self._content)}; copy or download it again"
                )
        return metadata, tensors

    def _tensor(self) -> StoredBytes:
        name, num_dims = self._string(), self._number("I")
        if not 1 <= num_dims <= _MOST_DIMS:
            raise CheckpointError(f"{self._file}: tensor {name!r} has {num_dims} axes; 1 to {_MOST_DIMS} are read")
        shape = tuple(self._number("Q") for _ in range(num_dims))[::-1]
        number, offset = self._number("I"), self._number("Q")
        if number not in TYPES:
            known = ", ".join(kind.name for kind in TYPES.values())
            told = UNREAD.get(number, str(number))
            raise CheckpointError(f"{self._file}: tensor {name!r} has type {told}, which is not read; read are {known}")
        kind = TYPES[number]
        if kind.dtype is None and shape[-1] % kind.columns:
            raise CheckpointError(
                f"{self._file}: tensor {name!r} has rows of {shape[-1]} numbers, and blocks of {kind.name} have "
                f"{kind.columns}"
            )
        return StoredBytes(name, kind, shape, self._file, offset)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        if kind not in _NUMBERS:
            raise CheckpointError(f"{self._file}: damaged GGUF header: a value of type {kind}")
        return self._number(_NUMBERS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in _NUMBERS:
            code = f"<{count}{_NUMBERS[kind]}"
            values = struct.unpack_from(code, self._content, self._at)
            self._at += struct.calcsize(code)
            return list(values)
        return [self._value(kind) for _ in range(count)] if kind == _ARRAY else list(self._strings(count))

    def _strings(self, count: int) -> Iterator[str]:
        """Texts of a vocabulary, of which there are hundreds of thousands."""
        content, at = self._content, self._at
        size: Callable[[Any, int], tuple[int]] = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + size(content, at)[0]
            if at > len(content):
                raise IndexError("a text reaches beyond the file")
            yield content[start:at].decode("utf-8", errors="surrogateescape")
        self._at = at

    def _string(self) -> str:
        (text,) = self._strings(1)
        return text

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._content, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

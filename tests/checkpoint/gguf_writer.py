"""GGUF files by their specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), version 3."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hardpoint.checkpoint.gguf.container import StoredBytes
from hardpoint.checkpoint.gguf.types import TYPES

_NUMBERS = {kind.name: number for number, kind in TYPES.items()}


class Blocks:
    """A tensor of a quantized type: ``stored`` uint8 [..., blocks of a row, bytes of a block]."""

    def __init__(self, kind: str, stored: torch.Tensor) -> None:
        self.kind, self.stored = kind, stored


def write_gguf(
    file: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor | Blocks | StoredBytes],
    unread: tuple[str, int] | None = None,
) -> None:
    """Write ``tensors``: plain ones as float32, others as they are. ``unread``: name and type of an empty one."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors) + (unread is not None), len(metadata))
    for key, item in metadata.items():
        kind, content = _value(item)
        head += _text(key) + struct.pack("<I", kind) + content
    data = b""
    for name, tensor in tensors.items():
        kind_name, shape, content = _content(tensor)
        head += _text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape[::-1], _NUMBERS[kind_name], len(data)
        )
        data += content + b"\0" * (-len(content) % 32)
    if unread is not None:
        head += _text(unread[0]) + struct.pack("<IQIQ", 1, 256, unread[1], 0)
    file.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def _content(tensor: torch.Tensor | Blocks | StoredBytes) -> tuple[str, tuple[int, ...], bytes]:
    """The type, the shape and the bytes of a tensor."""
    if isinstance(tensor, StoredBytes):
        return tensor.kind.name, tensor.shape, tensor.mapped().numpy().tobytes()
    if isinstance(tensor, torch.Tensor):
        return "F32", tuple(tensor.shape), tensor.float().contiguous().numpy().tobytes()
    columns = next(kind.columns for kind in TYPES.values() if kind.name == tensor.kind)
    *rows, blocks, _ = tensor.stored.shape
    return tensor.kind, (*rows, blocks * columns), tensor.stored.contiguous().numpy().tobytes()


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(x: Any) -> tuple[int, bytes]:
    if isinstance(x, bool):
        return 7, struct.pack("<?", x)
    if isinstance(x, int):
        return 4, struct.pack("<I", x)
    if isinstance(x, float):
        return 6, struct.pack("<f", x)
    if isinstance(x, str):
        return 8, _text(x)
    inner = [_value(item) for item in x]
    return 9, struct.pack("<IQ", inner[0][0], len(inner)) + b"".join(content for _, content in inner)

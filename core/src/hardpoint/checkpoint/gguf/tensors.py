"""A GGUF file's tensors by the names, and with the meaning, that Hugging Face's checkpoints give them.

Plain numbers are ``MODULE.weight``. A tensor of blocks is ``MODULE.TYPE`` (``model.layers.0.mlp.down_proj.Q6_K``):
uint8 [rows, blocks of a row, bytes of a block].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from hardpoint.checkpoint.gguf.architectures import OUTER, ROPE_FACTORS, Architecture
from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.checkpoint.gguf.changes import Change
from hardpoint.checkpoint.gguf.container import Container, StoredBytes
from hardpoint.checkpoint.tensor_files import TensorFiles
from hardpoint_plugin_api import CheckpointError, TensorInfo

_ROTATED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
"""Modules whose rows llama.cpp may hold in its own order -> the metadata key with the number of their heads."""
_ONE_ROW = ("ffn_gate_inp_shexp",)
"""Matrices of one row, which GGUF holds without that axis."""


_UP_KEYS, _UP_VALUES, _UP = "attn_k_b", "attn_v_b", "self_attn.kv_b_proj.weight"
"""The projections of latents to keys and to values: GGUF has a tensor for each, Hugging Face one for both."""


_QKV, _GATE = "attn_qkv", "attn_gate"
_LAST = ("weight", "bias")
"""The names of tensors within modules; others are modules of one tensor."""
_FURTHER = "nextn."
"""Begins modules of layers that predict further tokens."""


class _Source(Protocol):
    """Where a tensor comes from."""

    @property
    def info(self) -> TensorInfo:
        """Its shape and dtype."""
        ...

    def tensor(self) -> torch.Tensor:
        """The tensor, mapped; a copy where its rows or numbers change."""
        ...


@dataclass(frozen=True)
class _Stored:
    """A tensor of the file. ``heads``: rows are permuted. ``one_row``: the axis of rows is left out there."""

    stored: StoredBytes
    heads: int | None = None
    minus_one: bool = False
    one_row: bool = False

    @property
    def info(self) -> TensorInfo:
        shape = self.stored.mapped_shape
        return TensorInfo((1, *shape) if self.one_row else shape, self.stored.dtype)

    def tensor(self) -> torch.Tensor:
        tensor = self.stored.mapped()
        if self.heads is not None:
            tensor = _in_halves(tensor, self.heads)
        if self.minus_one:
            tensor = tensor.float() - 1
        return tensor[None] if self.one_row else tensor


@dataclass(frozen=True)
class _LatentUp:
    """The matrix from latents L to keys and values of H heads: ``keys`` [H, L, keys], ``values`` [H, values, L].

    Blocks of ``keys`` lie along an axis that becomes rows, so that all become plain numbers.
    """

    keys: StoredBytes
    values: StoredBytes

    @property
    def info(self) -> TensorInfo:
        heads, latent, size = self.keys.shape
        return TensorInfo((heads * (size + self.values.shape[1]), latent), "float32")

    def tensor(self) -> torch.Tensor:
        return torch.cat([_numbers(self.keys).transpose(1, 2), _numbers(self.values)], dim=1).flatten(0, 1)


@dataclass(frozen=True)
class _Changed:
    """A tensor of the file that ``change`` leads back to Hugging Face's."""

    stored: StoredBytes
    change: Change

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.change.shape(self.stored.mapped_shape), self.change.dtype or self.stored.dtype)

    def tensor(self) -> torch.Tensor:
        return self.change.tensor(self.stored.mapped())


@dataclass(frozen=True)
class _Turned:
    """The rows of q, k and v, which ``qkv`` has one after the other, and of a ``gate`` by turns: ``groups`` of each.

    A group has as many rows of q, and of k, as ``keys`` says. Blocks stay blocks where both tensors have one type.
    """

    qkv: StoredBytes
    gate: StoredBytes
    groups: int
    keys: int

    @property
    def is_of_one_type(self) -> bool:
        return self.qkv.kind == self.gate.kind

    @property
    def info(self) -> TensorInfo:
        rows = self.qkv.shape[0] + self.gate.shape[0]
        if self.is_of_one_type:
            return TensorInfo((rows, *self.qkv.mapped_shape[1:]), self.qkv.dtype)
        return TensorInfo((rows, *self.qkv.shape[1:]), "float32")

    def tensor(self) -> torch.Tensor:
        qkv, gate = (x.mapped() if self.is_of_one_type else _numbers(x) for x in (self.qkv, self.gate))
        keys = self.groups * self.keys
        parts = (*qkv.split([keys, keys, len(qkv) - 2 * keys]), gate)
        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _numbers(stored: StoredBytes) -> torch.Tensor:
    """The numbers of a tensor, float32 in its own shape."""
    mapped = stored.mapped()
    if stored.kind.dtype is not None:
        return mapped.float()
    return SPECS[stored.kind.name].numbers(mapped.flatten(0, -3), torch.float32).view(stored.shape)


def _in_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pairs of neighbours (0, 1, 2, ...) to halves (0, 2, 4, ..., 1, 3, ...)."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


class GgufTensors(TensorFiles):
    """The tensors of one model. Each is mapped when it is asked for."""

    def __init__(self, container: Container, architecture: Architecture) -> None:
        """Name all tensors. Raises CheckpointError for rows that the number of heads does not divide."""
        self._container, self._architecture = container, architecture
        self._prefix = f"{container.metadata['general.architecture']}."
        self._sources: dict[str, _Source] = {}
        for stored in container.tensors.values():
            if stored.name not in ROPE_FACTORS:
                self._sources.update(self._named(stored))

    @property
    def title(self) -> str:
        return str(self._container.file)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._sources)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, source in self._sources.items():
            yield name, source.tensor()

    def info(self, name: str) -> TensorInfo:
        return self._sources[name].info

    def read(self, name: str) -> torch.Tensor:
        return self._sources[name].tensor().clone()

    def _named(self, stored: StoredBytes) -> Iterator[tuple[str, _Source]]:
        """The tensors that ``stored`` holds, by their names; a name that is not known stays as it is."""
        gguf_module, _, last = stored.name.rpartition(".")
        if last not in _LAST:
            gguf_module, last = stored.name, ""
        block, _, inner = gguf_module.removeprefix("blk.").partition(".")
        in_block = gguf_module.startswith("blk.") and block.isdecimal()
        if in_block and inner.startswith(_FURTHER):
            yield f"model.layers.{block}.{inner}.{last}", _Stored(stored)
            return
        if in_block and inner in (_UP_KEYS, _UP_VALUES):
            yield from self._latent_up(block, inner)
            return
        if in_block and inner in (_QKV, _GATE) and self._architecture.turned is not None:
            yield from self._in_turns(block, inner, self._architecture.turned)
            return
        module = self._architecture.modules.get(inner) if in_block else OUTER.get(gguf_module)
        if module is None:
            yield stored.name, _Stored(stored)
            return
        if in_block:
            module = f"model.layers.{block}.{module}"
        name = f"{module}.{stored.kind.name if stored.kind.dtype is None else last}"
        if inner in self._architecture.bare:
            name = module
        if (change := self._architecture.changes.get(inner)) is not None:
            yield name, _Changed(stored, change)
            return
        if "*" in name:
            for expert in range(stored.shape[0]):
                yield name.replace("*", str(expert)), _Stored(stored.part(expert))
            return
        is_norm = module.endswith("norm")
        yield (
            name,
            _Stored(
                stored,
                heads=self._heads(stored, inner),
                minus_one=is_norm and self._architecture.norms_plus_one,
                one_row=inner in _ONE_ROW and len(stored.shape) == 1,
            ),
        )

    def _latent_up(self, block: str, inner: str) -> Iterator[tuple[str, _Source]]:
        """The one tensor that both make, when the second of them comes. Raises CheckpointError for one alone."""
        keys, values = (self._container.tensors.get(f"blk.{block}.{part}.weight") for part in (_UP_KEYS, _UP_VALUES))
        if keys is None or values is None or len(keys.shape) != 3 or len(values.shape) != 3:
            raise CheckpointError(
                f"{self._container.file}: tensors {_UP_KEYS} and {_UP_VALUES} of block {block} must both be there, "
                "with an axis of heads each; convert the model anew"
            )
        if inner == _UP_VALUES:
            yield f"model.layers.{block}.{_UP}", _LatentUp(keys, values)

    def _in_turns(self, block: str, inner: str, module: str) -> Iterator[tuple[str, _Source]]:
        """The one tensor that both make, when the second of them comes. Raises CheckpointError for one alone, and for
        rows that the number of key heads does not divide."""
        qkv, gate = (self._container.tensors.get(f"blk.{block}.{part}.weight") for part in (_QKV, _GATE))
        groups, keys = (self._container.metadata.get(f"{self._prefix}ssm.{x}") for x in ("group_count", "state_size"))
        if qkv is None or gate is None or type(groups) is not int or type(keys) is not int:
            raise CheckpointError(
                f"{self._container.file}: tensors {_QKV} and {_GATE} of block {block} must both be there, and numbers "
                f"{self._prefix}ssm.group_count and {self._prefix}ssm.state_size; convert the model anew"
            )
        values = qkv.shape[0] - 2 * groups * keys
        if groups < 1 or values < 1 or values % groups or gate.shape != (values, *qkv.shape[1:]):
            raise CheckpointError(
                f"{self._container.file}: tensors {_QKV} {list(qkv.shape)} and {_GATE} {list(gate.shape)} of block "
                f"{block} are not those of {groups} key heads of {keys} elements"
            )
        if inner == _GATE:
            turned = _Turned(qkv, gate, groups, keys)
            is_blocks = turned.is_of_one_type and qkv.kind.dtype is None
            yield f"model.layers.{block}.{module}.{qkv.kind.name if is_blocks else 'weight'}", turned

    def _heads(self, stored: StoredBytes, inner: str) -> int | None:
        if not self._architecture.permuted or inner not in _ROTATED:
            return None
        metadata = self._container.metadata
        default = metadata.get(f"{self._prefix}attention.head_count")
        heads = metadata.get(self._prefix + _ROTATED[inner], default)
        if type(heads) is not int or heads < 1 or stored.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{stored.file}: {self._prefix}{_ROTATED[inner]} is {heads!r}, and tensor {stored.name!r} has "
                f"{stored.shape[0]} rows, which are no such number of heads of even size"
            )
        return heads

"""The tensors that ``compressed-tensors`` stores for one module, by its group's format; see compressed_tensors.py."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from hardpoint.numerics import pack_nibbles
from hardpoint.quantization.methods import block_floats
from hardpoint.quantization.methods.block_floats import (
    check_columns,
    outer_scale,
    stored_elements,
    stored_group_scales,
)
from hardpoint.quantization.methods.compressed_tensors_config import (
    BY_ELEMENT,
    MXFP4,
    MXFP8,
    NVFP4,
    PACKED,
    Group,
    Numbers,
)
from hardpoint.quantization.methods.fp8 import column, copied, single, single_value, stored_under
from hardpoint.quantization.methods.gptq import check_group_index, check_groups
from hardpoint.quantization.methods.packed import elements_of_rows, integer_spec, unpacked
from hardpoint_plugin_api import (
    CheckpointError,
    CheckpointTensors,
    Dim,
    Module,
    QuantSpec,
    Scale,
    StoredTensor,
)

_SCALES = ("bfloat16", "float16", "float32")
_OUT, _IN, _ONE = Dim("out"), Dim("in"), Dim(None)


@dataclass(frozen=True)
class ModuleReader:
    """The checkpoint's tensors of one module of a group."""

    tensors: CheckpointTensors
    module: Module
    group: Group

    def weights(self) -> tuple[QuantSpec, tuple[StoredTensor, ...], Hashable]:
        """The weight's spec, its tensors, and the numbers in which merged modules must agree."""
        if self.group.format == PACKED:
            return self.packed()
        if self.group.format in BY_ELEMENT:
            return self.by_element()
        return (*self.block_floats(), None)

    def packed(self) -> tuple[QuantSpec, tuple[StoredTensor, ...], Hashable]:
        """``weights`` of a pack-quantized module."""
        weights = self.group.weights
        bits, symmetric = weights.bits, weights.symmetric
        permutation = self._permutation() if weights.reordered else None
        scale, stored_scale = self._weight_scale()
        per_word = 32 // bits
        stored = [
            StoredTensor(
                "weight_packed",
                (_OUT, Dim("in", per_word)),
                ("int32",),
                ("weight",),
                lambda words: {"weight": elements_of_rows(words, bits, symmetric)[:, : self._bytes(bits)]},
            ),
            stored_scale,
            self._weight_shape(),
        ]
        if not symmetric:
            stored.append(self._packed_zero_points(scale, bits))
        if weights.reordered:
            slot = ("weight_group_index",) * (permutation is not None)
            stored.append(
                StoredTensor("weight_g_idx", (_IN,), ("int32", "int64"), slot, lambda g: dict.fromkeys(slot, g[None]))
            )
        spec = integer_spec(bits, symmetric, scale, permuted=permutation is not None)
        return spec, tuple(stored), permutation

    def by_element(self) -> tuple[QuantSpec, tuple[StoredTensor, ...], Hashable]:
        """The same of weights that are stored one by one."""
        weights = self.group.weights
        scale, stored_scale = self._weight_scale()
        if weights.bits == 4:
            return self._four_bits_in_bytes(scale, stored_scale)
        if weights.symmetric:
            stored = (copied("weight", (_OUT, _IN), weights.element, "weight"), stored_scale)
            return QuantSpec(weights.element, scales=(scale,)), stored, None
        if weights.is_float:
            raise CheckpointError(f"{self.tensors.title}: 8-bit floats with zero points are not supported")
        unsigned = StoredTensor("weight", (_OUT, _IN), ("int8",), ("weight",), lambda q: {"weight": _unsigned(q)})
        zero_point = StoredTensor(
            "weight_zero_point",
            stored_scale.dims,
            ("int8",),
            ("weight_zero_point",),
            lambda z: {"weight_zero_point": column(_unsigned(z))},
        )
        return integer_spec(8, False, scale), (unsigned, stored_scale, zero_point), None

    def _four_bits_in_bytes(
        self, scale: Scale, stored_scale: StoredTensor
    ) -> tuple[QuantSpec, tuple[StoredTensor, ...], Hashable]:
        """int-quantized weights of 4 bits, a byte for each; two of them share one from here on."""
        if not self.group.weights.symmetric:
            raise CheckpointError(
                f"{self.tensors.title}: 4-bit weights with zero points are read from format {PACKED!r} only"
            )
        self._check_even()
        weight = StoredTensor("weight", (_OUT, _IN), ("int8",), ("weight",), lambda q: {"weight": pack_nibbles(q)})
        return integer_spec(4, True, scale), (weight, stored_scale), None

    def block_floats(self) -> tuple[QuantSpec, tuple[StoredTensor, ...]]:
        """The spec and the tensors of floats with 8-bit scales."""
        spec = {NVFP4: block_floats.NVFP4, MXFP4: block_floats.MXFP4, MXFP8: block_floats.MXFP8}[self.group.format]
        check_columns(self.tensors.title, self.module, spec.scales[0].block[1])
        name = "weight" if spec.per_byte == 1 else "weight_packed"
        stored = [stored_elements(name, spec), stored_group_scales("weight_scale", spec)]
        if len(spec.scales) == 2:
            stored.append(outer_scale(self.tensors, self.module, "weight_global_scale", "weight_scale_2", divides=True))
        return spec, tuple(stored)

    def inputs(self, numbers: Numbers) -> tuple[QuantSpec, tuple[StoredTensor, ...], Hashable]:
        """The spec of the input activations, their tensors, and the numbers in which merged modules must agree."""
        zero_point = not numbers.symmetric
        spec = QuantSpec(
            numbers.element,
            scales=numbers.scales,
            zero_point=zero_point,
            static=not numbers.dynamic,
        )
        if len(numbers.scales) == 2:
            name = "input_global_scale"
            stored_under(self.tensors, self.module, (name,), "activations have 4 bits")
            value = single_value(self.tensors, f"{self.module.name}.{name}")
            return spec, (outer_scale(self.tensors, self.module, name, "input_scale_2", divides=True),), value
        if numbers.dynamic:
            return spec, (), None
        names = ["input_scale", *(["input_zero_point"] if zero_point else [])]
        for name in names:
            stored_under(self.tensors, self.module, (name,), "activations are static")
        values = tuple(single_value(self.tensors, f"{self.module.name}.{name}") for name in names)
        return spec, tuple(single(self.tensors, self.module, name, name) for name in names), values

    @property
    def _size(self) -> tuple[int, int]:
        return self.module.out_features, self.module.in_features

    def _bytes(self, bits: int) -> int:
        return -(-self.module.in_features * bits // 8)

    def _check_even(self) -> None:
        if self.module.in_features * self.group.weights.bits % 8:
            raise CheckpointError(f"{self.tensors.title}: {self.module.name!r} has an odd number of 4-bit columns")

    def _weight_scale(self) -> tuple[Scale, StoredTensor]:
        block = self.group.weights.block
        if block[0] == 1:
            check_groups(self.tensors, self.module, block[1])
        if self.group.format == PACKED:
            self._check_even()
        name = f"{self.module.name}.weight_scale"
        info = self.tensors.info(name) if name in self.tensors.names else None
        scale = Scale(info.dtype if info else _SCALES[0], block)
        n, k = block
        dims: tuple[Dim, ...] = (_ONE if n == -1 else Dim("out", n), _ONE if k == -1 else Dim("in", k))
        if block == (-1, -1):
            dims = (_ONE,) * (len(info.shape) if info else 1)
        elif info and len(info.shape) == 1 and block == (1, -1):
            dims = (_OUT,)
        return scale, StoredTensor(
            "weight_scale", dims, _SCALES, ("weight_scale",), lambda x: {"weight_scale": column(x)}
        )

    def _weight_shape(self) -> StoredTensor:
        def read(shape: torch.Tensor) -> Mapping[str, torch.Tensor]:
            if tuple(shape.tolist()) != self._size:
                raise CheckpointError(f"is {shape.tolist()}, the model expects {list(self._size)}")
            return {}

        return StoredTensor("weight_shape", (Dim(None, 2),), ("int64", "int32"), (), read)

    def _packed_zero_points(self, scale: Scale, bits: int) -> StoredTensor:
        rows = self.module.out_features
        groups = Dim("in", scale.block[1]) if scale.block[1] != -1 else _ONE

        def read(words: torch.Tensor) -> Mapping[str, torch.Tensor]:
            return {"weight_zero_point": unpacked(words.t(), bits)[:, :rows].t()}

        dims = (Dim("out", 32 // bits), groups)
        return StoredTensor("weight_zero_point", dims, ("int32",), ("weight_zero_point",), read)

    def _permutation(self) -> str | None:
        """A digest of the columns' groups where they are not in order. -1 for all is the library's "not set"."""
        name = f"{self.module.name}.{stored_under(self.tensors, self.module, ('weight_g_idx',), 'actorder is set')}"
        groups = self.tensors.read(name).int()
        size = self.group.weights.block[1]
        if bool((groups == -1).all()):
            return None
        check_group_index(self.tensors.title, name, groups, self.module.in_features // size)
        if torch.equal(groups.long(), torch.arange(self.module.in_features) // size):
            return None
        return hashlib.sha256(groups.numpy().tobytes()).hexdigest()


def _unsigned(q: torch.Tensor) -> torch.Tensor:
    """int8 -> uint8, 128 more."""
    return q.contiguous().view(torch.uint8) ^ 0x80

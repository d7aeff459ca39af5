"""``quant_method: bitsandbytes``: NF4, FP4 and 8-bit integers, as the library stores them (read in its version 0.50).

* 4 bits (``load_in_4bit``): ``weight`` uint8 [out * in / 2, 1], two elements a byte, the first in the high bits;
  ``weight.absmax`` float32, one for 64 elements of the flattened matrix; ``weight.quant_map`` float32 [16];
  ``weight.quant_state.bitsandbytes__TYPE`` uint8, JSON. With ``bnb_4bit_use_double_quant`` ``absmax`` is uint8, an
  index of ``weight.nested_quant_map`` [256], times ``weight.nested_absmax``, plus ``nested_offset`` (arXiv:2305.14314).
* 8 bits (``load_in_8bit``): ``weight`` int8 [out, in], ``SCB`` float32 [out], ``weight_format`` uint8, 0.
  ``w = q * SCB / 127``. Activations stay as they are: the library rounds those that are no outliers.

Modules without such tensors are not quantized.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from hardpoint.quantization.elements import BNB_FP4, NF4
from hardpoint.quantization.methods.fp8 import copied
from hardpoint.quantization.methods.settings import Settings
from hardpoint_plugin_api import (
    CheckpointError,
    CheckpointTensors,
    Dim,
    MethodRequest,
    Module,
    QuantizationMethod,
    QuantSpec,
    Scale,
    Scheme,
    StoredTensor,
)

_ELEMENTS = {"nf4": NF4, "fp4": BNB_FP4}
_STATE = "weight.quant_state.bitsandbytes__"
_STEP = 7.874015718698502e-3
"""1 / 127, as the library multiplies by it."""


class BitsAndBytes(QuantizationMethod):
    """Reads 4- and 8-bit checkpoints of bitsandbytes. A matrix of 4 bits is one vector, which ranks cannot divide."""

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        settings = Settings(request.config, f"{request.where}: quantization_config")
        if not settings.flag("load_in_4bit", False) and not settings.flag("load_in_8bit", False):
            raise settings.wrong("load_in_4bit", "or 'load_in_8bit' must be true")
        settings.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
        self._tensors, self._dtype = request.tensors, request.dtype

    def scheme(self, module: Module) -> Scheme | None:
        names = self._tensors.names
        if f"{module.name}.SCB" in names:
            return self._eight_bits(module)
        kind = next((kind for kind in _ELEMENTS if f"{module.name}.{_STATE}{kind}" in names), None)
        return None if kind is None else self._four_bits(module, kind)

    def _eight_bits(self, module: Module) -> Scheme:
        spec = QuantSpec("int8", scales=(Scale("float32", (1, -1)),))
        stored = [
            copied("weight", (Dim("out"), Dim("in")), "int8", "weight"),
            StoredTensor("SCB", (Dim("out"),), ("float32",), ("weight_scale",), _row_scales),
        ]
        if f"{module.name}.weight_format" in self._tensors.names:
            stored.append(StoredTensor("weight_format", (), ("uint8",), (), _check_format))
        return Scheme(spec, QuantSpec(self._dtype), tuple(stored))

    def _four_bits(self, module: Module, kind: str) -> Scheme:
        rows, columns = module.out_features, module.in_features
        state = _State.read(self._tensors, module, kind)
        block = _block(self._tensors.title, module, state.size)
        spec = QuantSpec.of(_ELEMENTS[kind], [Scale("float32", block)])
        scales = spec.scales[0].shape(rows, columns)

        def elements(stored: torch.Tensor) -> Mapping[str, torch.Tensor]:
            return {"weight": ((stored >> 4) | (stored << 4)).view(rows, columns // 2)}

        def absmax(stored: torch.Tensor) -> Mapping[str, torch.Tensor]:
            return {"weight_scale": state.numbers(stored).view(scales)}

        count = rows * columns // state.size
        stored = [
            StoredTensor("weight", (Dim(None, rows * columns // 2), Dim(None)), ("uint8",), ("weight",), elements),
            StoredTensor("weight.absmax", (Dim(None, count),), (state.dtype,), ("weight_scale",), absmax),
            *(self._unread(module, name) for name in ("weight.quant_map", f"{_STATE}{kind}", *state.nested)),
        ]
        return Scheme(spec, QuantSpec(self._dtype), tuple(stored))

    def _unread(self, module: Module, name: str) -> StoredTensor:
        """A tensor that is read beside others, or says what its method says already."""
        full = f"{module.name}.{name}"
        size = self._tensors.info(full).shape if full in self._tensors.names else (1,)
        return StoredTensor(name, tuple(Dim(None, n) for n in size), ("float32", "uint8"), (), lambda x: {})


class _State:
    """The state beside a matrix of 4 bits: the ``size`` of blocks, and how their scales are stored.

    ``nested``: the size of blocks of scales, which are 8-bit then, and what is added to them.
    """

    def __init__(
        self, tensors: CheckpointTensors, module: Module, size: int, nested: tuple[int, float] | None = None
    ) -> None:
        self._tensors, self._name, self.size, self._nested = tensors, f"{module.name}.weight", size, nested

    @classmethod
    def read(cls, tensors: CheckpointTensors, module: Module, kind: str) -> _State:
        """The state of a module. Raises CheckpointError where it is not JSON, or of another shape."""
        name = f"{module.name}.{_STATE}{kind}"
        try:
            values = json.loads(bytes(tensors.read(name).tolist()))
            sizes, shape, nested = [values["blocksize"]], values["shape"], None
            if "nested_blocksize" in values:
                sizes.append(values["nested_blocksize"])
                nested = values["nested_blocksize"], float(values["nested_offset"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{tensors.title}: tensor {name!r} holds no state of bitsandbytes: {error}") from None
        wanted = [module.out_features, module.in_features]
        if shape != wanted or not all(type(size) is int and size >= 1 for size in sizes):
            raise CheckpointError(
                f"{tensors.title}: tensor {name!r} says blocks of {' and '.join(map(repr, sizes))} and shape {shape}, "
                f"the model expects {wanted}"
            )
        return cls(tensors, module, sizes[0], nested)

    @property
    def nested(self) -> tuple[str, ...]:
        """The names of tensors of 8-bit scales."""
        return () if self._nested is None else ("weight.nested_absmax", "weight.nested_quant_map")

    @property
    def dtype(self) -> str:
        """The dtype of stored scales."""
        return "float32" if self._nested is None else "uint8"

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        """Scales as float32."""
        if self._nested is None:
            return stored
        size, offset = self._nested
        table = self._tensors.read(f"{self._name}.nested_quant_map").to(stored.device)
        outer = self._tensors.read(f"{self._name}.nested_absmax").to(stored.device)
        return table[stored.int()] * outer.repeat_interleave(size)[: len(stored)] + offset


def _block(where: str, module: Module, size: int) -> tuple[int, int]:
    """The rows and columns of ``size`` neighbours in the flattened matrix."""
    columns = module.in_features
    if columns % size == 0:
        return 1, size
    if size % columns == 0 and module.out_features % (size // columns) == 0:
        return size // columns, columns
    raise CheckpointError(
        f"{where}: {module.name!r} has {columns} columns, and blocks of {size} end within its rows, which is not "
        "supported"
    )


def _row_scales(stored: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"weight_scale": (stored * _STEP)[:, None]}


def _check_format(stored: torch.Tensor) -> Mapping[str, torch.Tensor]:
    if int(stored):
        raise CheckpointError(f"is {int(stored)}, and rows in order (0) alone are read")
    return {}

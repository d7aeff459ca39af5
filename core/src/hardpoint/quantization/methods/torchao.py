"""``quant_method: torchao``: tensors of torchao's own classes, as Transformers stores them in safetensors.

Read in torchao 0.18 (``torchao/prototype/safetensors``, ``torchao/quantization/quantize_/workflows``). A weight is
several plain tensors, ``MODULE._weight_qdata``, ``MODULE._weight_scale``, and so on. The file's metadata says under
``MODULE.weight``, as JSON, of which class they are a part (``_type``), and the class's settings (``_data``). Other
weights are stored as they are. Axes: N rows (out), K columns (in), g columns of a group.

* ``Float8Tensor``: ``qdata`` float8 [N, K], ``scale`` for each block of ``block_size``.
* ``Int8Tensor``: ``qdata`` int8 [N, K], ``scale`` likewise, ``zero_point`` int8, all 0.
* ``IntxUnpackedToInt8Tensor``: the same with 1 to 8 bits, a byte for each element; zero points may be others than 0
  where the config asks for it (``mapping_type``).
* ``Int4Tensor``: ``qdata`` int8 [N, K / 2], two elements a byte, the first in the low bits; ``scale`` and
  ``zero_point`` [K / g, N]. ``w = q * scale + zero_point``, q from -8 to 7.
* ``Int4TilePackedTo4dTensor``: the same numbers in tiles, see torchao_tiles.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch

from hardpoint.numerics import pack_nibbles
from hardpoint.quantization.methods.fp8 import column, copied
from hardpoint.quantization.methods.packed import integer_spec
from hardpoint.quantization.methods.settings import Settings
from hardpoint.quantization.methods.torchao_tiles import stored_tiles
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

_OUT, _IN, _ONE = Dim("out"), Dim("in"), Dim(None)
_FLOATS = ("float8_e4m3fn", "float8_e5m2")
_SCALES = ("float32", "bfloat16", "float16")


class TorchAo(QuantizationMethod):
    """Reads the five classes above. Activations are as they are, or quantized dynamically with a scale for each token.

    torchao's granularity ``PerTensor`` of dynamic activations has one scale for all tokens of a batch; each token has
    its own here, so that a request's numbers do not depend on the others in its batch.
    """

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        self._tensors, self._dtype = request.tensors, request.dtype
        self._asymmetric = _is_asymmetric(request.config)

    def scheme(self, module: Module) -> Scheme | None:
        if f"{module.name}._weight_qdata" not in self._tensors.names:
            return None
        weight = StoredWeight(self._tensors, module)
        spec, stored = _CLASSES[weight.kind](weight, self._asymmetric)
        return Scheme(spec, weight.activation(self._dtype), tuple(stored))

    def embedding(self, module: Module, *, tied: bool) -> Scheme | None:
        scheme = self.scheme(module)
        if scheme is not None and not tied:
            raise CheckpointError(
                f"{self._tensors.title}: the embedding {module.name!r} is quantized, which is read only where it is "
                "the output head, too; quantize without include_input_output_embeddings"
            )
        return scheme


class StoredWeight:
    """The tensors of one module's weight, and what the metadata says of them."""

    def __init__(self, tensors: CheckpointTensors, module: Module) -> None:
        """Raises CheckpointError where the metadata says nothing of the module, or names a class that is not read."""
        self.tensors, self.module = tensors, module
        name = f"{module.name}.weight"
        try:
            described = json.loads(tensors.metadata[name])
            self.kind, data = described["_type"], described["_data"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{tensors.title}: the metadata of the safetensors files does not describe {name!r}, so its tensors "
                "cannot be read; save the model again with Transformers 5 and torchao 0.15 or newer"
            ) from None
        self.data = Settings(data, f"{tensors.title}: metadata of {name!r}")
        if self.kind not in _CLASSES:
            raise CheckpointError(
                f"{tensors.title}: {name!r} is stored as torchao's {self.kind}, which is not read; read are "
                f"{', '.join(_CLASSES)}"
            )
        for part in ("act_pre_scale", "act_quant_scale"):
            if f"{module.name}._weight_{part}" in tensors.names:
                raise CheckpointError(
                    f"{tensors.title}: '{module.name}._weight_{part}' is stored, and scales of activations are not "
                    "read; quantize with dynamic activations, or weights alone"
                )

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns that share a scale; -1 where all do. Empty in the metadata: all."""
        shape = self.module.out_features, self.module.in_features
        block = self.data.get("block_size", []) or list(shape)
        if len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise self.data.wrong("block_size", "must be rows and columns")
        n, k = (-1 if size == whole else size for size, whole in zip(block, shape, strict=True))
        return (n if (n, k) == (-1, -1) or n != -1 else shape[0], k)

    def scale(self) -> tuple[Scale, StoredTensor]:
        """The scales, one for each block."""
        info = self.tensors.info(f"{self.module.name}._weight_scale")
        dims = self._blocks(len(info.shape))
        stored = StoredTensor("_weight_scale", dims, _SCALES, ("weight_scale",), lambda x: {"weight_scale": column(x)})
        return Scale(info.dtype, self.block), stored

    def zero_point(self, read: Callable[[torch.Tensor], torch.Tensor] | None) -> StoredTensor:
        """The zero points, one for each block, as ``read`` makes them; None: they must be 0."""
        name = f"{self.module.name}._weight_zero_point"
        dims = self._blocks(len(self.tensors.info(name).shape)) if name in self.tensors.names else ()
        if read is None:
            return StoredTensor("_weight_zero_point", dims, ("int8",), (), _check_zero)
        fills = ("weight_zero_point",)
        return StoredTensor("_weight_zero_point", dims, ("int8",), fills, lambda x: {fills[0]: column(read(x))})

    def _blocks(self, axes: int) -> tuple[Dim, ...]:
        """The axes of a tensor with a number for each block."""
        n, k = self.block
        if (n, k) == (-1, -1):
            return (_ONE,) * axes
        return (Dim("out", n), _ONE if k == -1 else Dim("in", k))

    def activation(self, dtype: str) -> QuantSpec:
        """The spec of the module's inputs, which are of ``dtype``. Raises CheckpointError for settings not read."""
        if self.data.get("activation_quantization", None) is not None:
            self.data.one_of("activation_quantization", ("int8_asym_per_token",))
            return _dynamic("int8", zero_point=True)
        if self.kind == "Int4Tensor" and (chosen := self.data.table("activation_dtype")) is not None:
            element = chosen.one_of("_data", ("bfloat16", "float16", "float8_e4m3fn"))
            return _dynamic(element) if element in _FLOATS else QuantSpec(dtype)
        asked = self.data.table("act_quant_kwargs")
        settings = None if asked is None else asked.table("_data")
        if settings is None:
            return QuantSpec(dtype)
        granularity, mapping = settings.table("granularity"), settings.table("mapping_type")
        for key in ("hp_value_lb", "hp_value_ub"):
            if settings.get(key, None) is not None:
                raise settings.wrong(key, "must be null: limits of activations are not supported")
        columns = -1
        if granularity is not None and granularity.one_of("_type", ("PerRow", "PerTensor", "PerBlock")) == "PerBlock":
            size = granularity.table("_data")
            block = None if size is None else size.block("block_size")
            if block is None or block[0] != 1:
                raise granularity.wrong("_data", "must give 'block_size' of one row")
            columns = block[1]
        element = "int8" if self.kind == "Int8Tensor" else _float8_of(settings)
        zero_point = mapping is not None and mapping.one_of("_data", ("SYMMETRIC", "ASYMMETRIC")) == "ASYMMETRIC"
        return _dynamic(element, zero_point=zero_point, columns=columns)


def _dynamic(element: str, *, zero_point: bool = False, columns: int = -1) -> QuantSpec:
    """Activations with a scale for each token, or for ``columns`` of its elements."""
    scales = (Scale("float32", (1, columns)),)
    return QuantSpec(element, scales=scales, zero_point=zero_point, static=False)


def _float8_of(settings: Settings) -> str:
    dtype = settings.table("float8_dtype")
    return _FLOATS[0] if dtype is None else str(dtype.one_of("_data", _FLOATS))


def _is_asymmetric(config: object) -> bool:
    """Whether a torchao config, or one of those in it, asks for weights with zero points."""
    if not isinstance(config, Mapping):
        return False
    for key, value in config.items():
        if key in ("mapping_type", "weight_mapping_type") and isinstance(value, Mapping):
            if str(value.get("_data")).startswith("ASYMMETRIC"):
                return True
        elif _is_asymmetric(value):
            return True
    return False


Read = tuple[QuantSpec, list[StoredTensor]]


def _float8(weight: StoredWeight, asymmetric: bool) -> Read:
    element = weight.tensors.info(f"{weight.module.name}._weight_qdata").dtype
    scale, stored = weight.scale()
    elements = StoredTensor("_weight_qdata", (_OUT, _IN), _FLOATS, ("weight",), lambda q: {"weight": q})
    return QuantSpec(element, scales=(scale,)), [elements, stored]


def _int8(weight: StoredWeight, asymmetric: bool) -> Read:
    scale, stored = weight.scale()
    found = [copied("_weight_qdata", (_OUT, _IN), "int8", "weight"), stored]
    if f"{weight.module.name}._weight_zero_point" in weight.tensors.names:
        found.append(weight.zero_point(None))
    return QuantSpec("int8", scales=(scale,)), found


def _intx(weight: StoredWeight, asymmetric: bool) -> Read:
    """Integers of up to 4 bits share bytes from here on, and those of up to 8 have one each."""
    dtype = weight.data.table("target_dtype")
    name = "int8" if dtype is None else dtype.one_of("_data", [f"int{bits}" for bits in range(1, 9)])
    bits, module = (4 if int(name[3:]) <= 4 else 8), weight.module
    if bits == 4 and module.in_features % 2:
        raise CheckpointError(f"{weight.tensors.title}: {module.name!r} has an odd number of 4-bit columns")
    middle = (1 << (bits - 1)) if asymmetric else 0

    def unsigned(q: torch.Tensor) -> torch.Tensor:
        return (q.to(torch.int16) + middle).to(torch.uint8)

    def elements(q: torch.Tensor) -> Mapping[str, torch.Tensor]:
        codes = unsigned(q) if asymmetric else q
        return {"weight": pack_nibbles(codes) if bits == 4 else codes}

    scale, stored = weight.scale()
    qdata = StoredTensor("_weight_qdata", (_OUT, _IN), ("int8",), ("weight",), elements)
    zero_point = weight.zero_point(unsigned if asymmetric else None)
    return integer_spec(bits, not asymmetric, scale), [qdata, stored, zero_point]


def _int4(weight: StoredWeight, asymmetric: bool) -> Read:
    k = weight.block[1]
    groups = _ONE if k == -1 else Dim("in", k)
    name = f"{weight.module.name}._weight_scale"
    scale = Scale(weight.tensors.info(name).dtype if name in weight.tensors.names else _SCALES[1], (1, k))
    found = [StoredTensor("_weight_qdata", (_OUT, Dim("in", 2)), ("int8", "uint8"), ("weight",), _bytes)]
    for part, slot in (("scale", "weight_scale"), ("zero_point", "weight_min")):
        read = _transposed(slot)
        found.append(StoredTensor(f"_weight_{part}", (groups, _OUT), (scale.format,), (slot,), read))
    return QuantSpec("int4", scales=(scale,), minimum=True), found


def _tiles(weight: StoredWeight, asymmetric: bool) -> Read:
    k = weight.block[1]
    scale = Scale("bfloat16", (1, weight.module.in_features if k == -1 else k))
    return QuantSpec("int4", scales=(scale,), minimum=True), stored_tiles(weight.module, scale)


def _bytes(q: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"weight": q.contiguous().view(torch.uint8)}


def _transposed(slot: str) -> Callable[[torch.Tensor], Mapping[str, torch.Tensor]]:
    return lambda stored: {slot: stored.t()}


def _check_zero(zeros: torch.Tensor) -> Mapping[str, torch.Tensor]:
    if zeros.any():
        raise CheckpointError("is not 0 throughout, and the config says nothing of asymmetric weights")
    return {}


_CLASSES: Mapping[str, Callable[[StoredWeight, bool], Read]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Int4Tensor": _int4,
    "Int4TilePackedTo4dTensor": _tiles,
}
"""By torchao's name of the class."""

"""``quant_method: fp8``: weights in 8-bit floats with a scale for the whole, for each channel, or for each tile.

Two tools' conventions, told apart by what is stored (read in their sources, November 2026):

* AutoFP8: ``weight_scale`` of one number, or one for each channel; ``input_scale`` where activations are static,
  ``act_scale`` before June 2024.
* DeepSeek's, as Transformers writes it: ``weight_scale_inv`` for each tile of ``weight_block_size`` (despite its name
  it multiplies), or one number where that is null; ``activation_scale`` where activations are static.

A module whose weight is stored in a wider dtype is not quantized, whether an ignore list names it or not.
"""

from __future__ import annotations

import torch

from hardpoint.quantization.methods.settings import Settings
from hardpoint_plugin_api import (
    NVFP4,
    CacheScales,
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

_FP8 = "float8_e4m3fn"
_ELEMENTS = (_FP8, "float8_e5m2")
_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_INPUT_SCALES = ("input_scale", "act_scale", "activation_scale")
_OUT, _IN = Dim("out"), Dim("in")


class Fp8(QuantizationMethod):
    """Reads FP8 checkpoints. Dynamic activations have a scale for each token, or for each of a token's tiles."""

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        settings = Settings(request.config, f"{request.where}: quantization_config")
        self._dynamic = settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
        self._block = settings.block("weight_block_size")
        self._tensors = request.tensors
        if self._block and not self._dynamic:
            raise settings.wrong("activation_scheme", "must be 'dynamic' where weights have scales for blocks")

    def scheme(self, module: Module) -> Scheme | None:
        tensors, weight = self._tensors, f"{module.name}.weight"
        if weight not in tensors.names:
            return None
        element = tensors.info(weight).dtype
        if element not in _ELEMENTS:
            return None
        scale, stored_scale = self._weight_scale(module)
        stored = [copied("weight", (_OUT, _IN), element, "weight"), stored_scale]
        if self._dynamic:
            k = scale.block[1]
            activation = QuantSpec(element, scales=(Scale("float32", (1, k)),), static=False)
            return Scheme(QuantSpec(element, scales=(scale,)), activation, tuple(stored))
        name = stored_under(tensors, module, _INPUT_SCALES, "activation_scheme is static")
        stored.append(single(tensors, module, name, "input_scale"))
        activation = QuantSpec(element, scales=(Scale("float32", (-1, -1)),))
        value = single_value(tensors, f"{module.name}.{name}")
        return Scheme(QuantSpec(element, scales=(scale,)), activation, tuple(stored), must_agree=value)

    def cache_scales(self, attention: str) -> CacheScales | None:
        return stored_cache_scales(self._tensors, attention)

    def _weight_scale(self, module: Module) -> tuple[Scale, StoredTensor]:
        why = "its weight is stored in an 8-bit float"
        name = stored_under(self._tensors, module, ("weight_scale_inv", "weight_scale"), why)
        info = self._tensors.info(f"{module.name}.{name}")
        rows, columns = module.out_features, module.in_features
        shapes: dict[tuple[int, ...], tuple[tuple[int, int], tuple[Dim, ...]]] = {}
        if self._block:
            n, k = self._block
            tiles = (Dim("out", n), Dim("in", k))
            shapes[tuple(dim.size(rows, columns) for dim in tiles)] = (self._block, tiles)
        else:
            one = Dim(None)
            shapes = {(rows,): ((1, -1), (_OUT,)), (rows, 1): ((1, -1), (_OUT, one))}
            shapes |= {(): ((-1, -1), ()), (1,): ((-1, -1), (one,)), (1, 1): ((-1, -1), (one, one))}
        if info.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{self._tensors.title}: tensor '{module.name}.{name}' has shape {list(info.shape)}, expected "
                f"{expected} for a weight of {rows} x {columns}"
            )
        block, dims = shapes[info.shape]
        scale = Scale(info.dtype, block)
        return scale, StoredTensor(name, dims, _SCALE_DTYPES, ("weight_scale",), lambda x: {"weight_scale": column(x)})


def column(scales: torch.Tensor) -> torch.Tensor:
    """Scales of rows as a matrix of one column; a matrix, or a rank's slice of one, is what it is."""
    return scales if scales.ndim == 2 else scales.reshape(-1, 1)


def copied(name: str, dims: tuple[Dim, ...], dtype: str, slot: str) -> StoredTensor:
    """A tensor that fills its slot unchanged."""
    return StoredTensor(name, dims, (dtype,), (slot,), lambda x: {slot: x})


def stored_under(tensors: CheckpointTensors, module: Module, names: tuple[str, ...], why: str) -> str:
    """The first of ``names`` that the checkpoint holds for ``module``; CheckpointError where it holds none."""
    for name in names:
        if f"{module.name}.{name}" in tensors.names:
            return name
    expected = " or ".join(f"'{module.name}.{name}'" for name in names)
    raise CheckpointError(f"{tensors.title}: tensor {expected} is missing, and {why}")


def single(tensors: CheckpointTensors, module: Module, name: str, slot: str) -> StoredTensor:
    """A tensor of one number, of whatever rank it is stored, that fills ``slot``."""
    rank = len(tensors.info(f"{module.name}.{name}").shape)
    dtypes = ("float32", "bfloat16", "float16") if slot.startswith("input_scale") else ("int8", "uint8", "float32")
    return StoredTensor(name, (Dim(None),) * rank, dtypes, (slot,), lambda x: {slot: x.reshape(1)})


def single_value(tensors: CheckpointTensors, name: str) -> float:
    """The number in a tensor of one; CheckpointError where it holds several."""
    info = tensors.info(name)
    if any(n != 1 for n in info.shape):
        raise CheckpointError(f"{tensors.title}: tensor {name!r} has shape {list(info.shape)}, expected one number")
    value: torch.Tensor = tensors.read(name)
    return float(value.float())


def cache_element(settings: Settings) -> str:
    """The element of caches that the checkpoint's scales are for: ``int8``, ``float8_e4m3fn`` or ``nvfp4``.

    ``kv_cache_scheme`` says so, of compressed-tensors and of newer Model Optimizer; else the latter's
    ``kv_cache_quant_algo``. 4-bit floats are NVFP4 to both.
    """
    scheme = settings.table("kv_cache_scheme")
    if scheme is None:
        return NVFP4 if settings.get("kv_cache_quant_algo", None) == "NVFP4" else _FP8
    if scheme.get("type", "float") == "int":
        return "int8"
    return NVFP4 if scheme.get("num_bits", 8) == 4 else _FP8


def stored_cache_scales(tensors: CheckpointTensors, attention: str, element: str = _FP8) -> CacheScales | None:
    """``k_scale`` and ``v_scale`` beside an attention module's projections, where both are there, for ``element``.

    Model Optimizer has them within the projections, compressed-tensors before August 2024 as their ``output_scale``.
    """
    for name in ("{0}_scale", "{0}_proj.{0}_scale", "{}_proj.output_scale"):
        k, v = (f"{attention}.{name.format(part)}" for part in "kv")
        if {k, v} <= tensors.names:
            return CacheScales(k, v, element)
    return None

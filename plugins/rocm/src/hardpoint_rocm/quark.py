"""``quant_method: quark``: checkpoints of AMD Quark, in 8-bit floats and in OCP MX formats.

Read in Quark's exporter (quark/torch/export at 1d27b5582e4ecbb466fa1658e0bc91d01a5fbdd1 of github.com/amd/Quark) and in
vLLM's reader of it. The config has numbers for all layers (``global_quant_config``), for layers by pattern
(``layer_quant_config``), and names or patterns of layers that are not quantized (``exclude``). A layer's numbers are
those of its ``weight`` and of its input (``input_tensors``, null: as it is). The tensors of a layer:

* ``fp8_e4m3``, per tensor or per channel: ``weight`` float8_e4m3fn [out, in]; ``weight_scale`` of one number, or [out];
  ``input_scale`` of one number where activations are static.
* ``fp4`` in groups of 32 with scales in e8m0 (MXFP4): ``weight`` uint8 [out, in / 2], the first code in the low bits;
  ``weight_scale`` uint8 [out, in / 32], exponents with a bias of 127.

Dynamic activations have a scale for each token, also where Quark has one for all tokens of a batch: results then do not
depend on the other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch

from hardpoint.quantization.methods.fp8 import column, copied, single, single_value, stored_cache_scales, stored_under
from hardpoint.quantization.methods.settings import Settings
from hardpoint_plugin_api import (
    CacheScales,
    CheckpointError,
    Dim,
    MethodRequest,
    Module,
    QuantizationMethod,
    QuantSpec,
    Scale,
    Scheme,
    StoredTensor,
)

_FP8, _FP4 = "float8_e4m3fn", "float4_e2m1"
_ELEMENTS = {"fp8_e4m3": _FP8, "fp4": _FP4}
_GROUP = 32
_MX_SCALE = "float8_e8m0fnu"
_OUT, _IN, _ONE = Dim("out"), Dim("in"), Dim(None)


class Quark(QuantizationMethod):
    """Reads Quark's checkpoints."""

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        settings = Settings(request.config, f"{request.where}: quantization_config")
        if export := settings.table("export"):
            export.one_of("weight_format", ("real_quantized",), "real_quantized")
        by_class = settings.table("layer_type_quant_config")
        if by_class is not None and by_class.names:
            raise settings.wrong("layer_type_quant_config", "must be empty: numbers by class are not supported")
        self._exclude = settings.names_of("exclude")
        by_pattern = settings.table("layer_quant_config")
        self._patterns = dict(_tables(by_pattern)) if by_pattern else {}
        self._global = settings.table("global_quant_config")
        self._tensors, self._dtype = request.tensors, request.dtype
        self._check_elements()

    def scheme(self, module: Module) -> Scheme | None:
        numbers = self._numbers_of(module)
        if numbers is None or (weight := numbers.table("weight")) is None:
            return None
        if numbers.get("bias", None) is not None:
            raise numbers.wrong("bias", "must be null: quantized biases are not supported")
        if f"{module.name}.input_rotation" in self._tensors.names:
            raise CheckpointError(
                f"{self._tensors.title}: {module.name!r} rotates its input (input_rotation), which is not supported"
            )
        spec, stored = self._weight(module, weight)
        inputs = numbers.table("input_tensors")
        if inputs is None:
            return Scheme(spec, QuantSpec(self._dtype), stored)
        if inputs.flag("is_dynamic", False):
            return Scheme(spec, QuantSpec(_element(inputs), scales=(_input_scale(inputs),), static=False), stored)
        if _element(inputs) != _FP8 or inputs.get("qscheme") != "per_tensor":
            raise inputs.wrong("is_dynamic", "may be false only for fp8_e4m3 per_tensor")
        name = stored_under(self._tensors, module, ("input_scale",), "activations are static")
        value = single_value(self._tensors, f"{module.name}.{name}")
        activation = QuantSpec(_FP8, scales=(Scale("float32", (-1, -1)),))
        return Scheme(spec, activation, (*stored, single(self._tensors, module, name, name)), must_agree=value)

    def cache_scales(self, attention: str) -> CacheScales | None:
        return stored_cache_scales(self._tensors, attention)

    def _numbers_of(self, module: Module) -> Settings | None:
        """The numbers of the first pattern that names ``module``, else of all layers; None where it is excluded."""
        if any(_names(pattern, module.name) for pattern in self._exclude):
            return None
        if module.kind == "router" and f"{module.name}.weight_scale" not in self._tensors.names:
            return None
        found = (numbers for pattern, numbers in self._patterns.items() if _names(pattern, module.name))
        return next(found, self._global)

    def _weight(self, module: Module, numbers: Settings) -> tuple[QuantSpec, tuple[StoredTensor, ...]]:
        if numbers.flag("is_dynamic", False):
            raise numbers.wrong("is_dynamic", "must be false for weights")
        if _element(numbers) == _FP4:
            _check_groups(numbers)
            return QuantSpec(_FP4, scales=(Scale(_MX_SCALE, (1, _GROUP)),)), (
                copied("weight", (_OUT, Dim("in", 2)), "uint8", "weight"),
                StoredTensor("weight_scale", (_OUT, Dim("in", _GROUP)), ("uint8", _MX_SCALE), ("weight_scale",), _e8m0),
            )
        scheme = numbers.one_of("qscheme", ("per_tensor", "per_channel"))
        if scheme == "per_channel" and numbers.get("ch_axis", 0) != 0:
            raise numbers.wrong("ch_axis", "must be 0: a scale for each row")
        block = (1, -1) if scheme == "per_channel" else (-1, -1)
        weight = copied("weight", (_OUT, _IN), _FP8, "weight")
        name = stored_under(self._tensors, module, ("weight_scale",), "its weight is quantized")
        info = self._tensors.info(f"{module.name}.{name}")
        rank = len(info.shape)
        dims = (_OUT, *(_ONE,) * (rank - 1)) if scheme == "per_channel" else (_ONE,) * rank
        scale = StoredTensor(name, dims, ("float32", "bfloat16", "float16"), (name,), lambda x: {name: column(x)})
        return QuantSpec(_FP8, scales=(Scale(info.dtype, block),)), (weight, scale)

    def _check_elements(self) -> None:
        """Raise CheckpointError for elements that nothing here reads, whichever layer's."""
        for numbers in (*self._patterns.values(), *([self._global] if self._global else [])):
            for name in ("weight", "input_tensors"):
                if table := numbers.table(name):
                    _element(table)


def _tables(settings: Settings) -> Iterator[tuple[str, Settings]]:
    for name in settings.names:
        if (table := settings.table(name)) is not None:
            yield name, table


def _names(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return fnmatchcase(name, pattern)


def _element(numbers: Settings) -> str:
    """The element of a weight or input; CheckpointError for one that is not read, and for several levels."""
    return _ELEMENTS[numbers.one_of("dtype", tuple(_ELEMENTS))]


def _check_groups(numbers: Settings) -> None:
    numbers.one_of("qscheme", ("per_group",))
    numbers.one_of("group_size", (_GROUP,))
    numbers.one_of("scale_format", ("e8m0",))


def _input_scale(numbers: Settings) -> Scale:
    if _element(numbers) == _FP4:
        _check_groups(numbers)
        return Scale(_MX_SCALE, (1, _GROUP))
    numbers.one_of("qscheme", ("per_tensor", "per_channel", "per_token"))
    return Scale("float32", (1, -1))


def _e8m0(exponents: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight_scale": exponents.contiguous().view(torch.float8_e8m0fnu)}

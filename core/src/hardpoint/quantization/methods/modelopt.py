"""``quant_method: modelopt``: TensorRT Model Optimizer, whose ``quant_algo`` says how modules are stored.

Read in the library's version 0.47 and in what it exports. A module has ``weight``, ``weight_scale`` and more:

* ``FP8``: ``weight`` float8_e4m3fn [out, in], ``weight_scale`` and ``input_scale`` one float32 each.
* ``FP8_PER_CHANNEL_PER_TOKEN``: ``weight_scale`` float32 [out]; activations have a scale for each token.
* ``NVFP4``: ``weight`` uint8 [out, in / 2], two elements e2m1 a byte, the first in the low bits; ``weight_scale``
  float8_e4m3fn [out, in / 16]; ``weight_scale_2`` and ``input_scale`` one float32 each, which multiply.
* ``W4A16_NVFP4``: the same without ``input_scale``.
* ``MXFP8``: ``weight`` float8_e4m3fn, ``weight_scale`` uint8 [out, in / 32], exponents with 127 added.
* ``MIXED_PRECISION``: ``quantized_layers`` names modules, each with a ``quant_algo``; others are not quantized.

``ignore`` (``exclude_modules`` in hf_quant_config.json, which older checkpoints have instead) names modules that are
stored as they are, with ``*`` for any characters.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import ClassVar

from hardpoint.quantization.methods.block_floats import (
    MXFP8,
    NVFP4,
    check_columns,
    outer_scale,
    stored_elements,
    stored_group_scales,
)
from hardpoint.quantization.methods.fp8 import (
    cache_element,
    column,
    copied,
    single,
    single_value,
    stored_cache_scales,
    stored_under,
)
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

_FP8 = "float8_e4m3fn"
_OUT, _IN, _ONE = Dim("out"), Dim("in"), Dim(None)
_WIDE = ("float32", "bfloat16", "float16")
_MIXED = "MIXED_PRECISION"


_LEFT = "name the module in 'ignore' if it is not quantized"


class ModelOpt(QuantizationMethod):
    """Reads every ``quant_algo`` of ``algorithms``; subclasses are for those who name one by its own name."""

    algorithms: ClassVar[tuple[str, ...]] = (
        "FP8",
        "FP8_PER_CHANNEL_PER_TOKEN",
        "NVFP4",
        "W4A16_NVFP4",
        "MXFP8",
        _MIXED,
    )

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        settings = Settings(request.config, f"{request.where}: quantization_config")
        settings = settings.table("quantization") or settings
        self._algorithm: str | None = None
        if settings.get("quant_algo", None) is not None or settings.get("kv_cache_quant_algo", None) is None:
            self._algorithm = settings.one_of("quant_algo", self.algorithms)
        self._layers = settings.table("quantized_layers") if self._algorithm == _MIXED else None
        if self._algorithm == _MIXED and self._layers is None:
            raise settings.wrong("quantized_layers", "must say how each module is quantized")
        self._excluded = settings.texts("ignore") or settings.texts("exclude_modules")
        self._tensors, self._dtype = request.tensors, request.dtype
        self._cache_element = cache_element(settings)
        self._readers: dict[str, Callable[[Module], Scheme]] = {
            "FP8": self._fp8,
            "FP8_PER_CHANNEL_PER_TOKEN": self._fp8_by_channel,
            "NVFP4": self._nvfp4,
            "W4A16_NVFP4": self._nvfp4_weights,
            "MXFP8": self._mxfp8,
        }

    def scheme(self, module: Module) -> Scheme | None:
        algorithm = self._algorithm_of(module)
        return None if algorithm is None else self._readers[algorithm](module)

    def cache_scales(self, attention: str) -> CacheScales | None:
        return stored_cache_scales(self._tensors, attention, self._cache_element)

    def _algorithm_of(self, module: Module) -> str | None:
        """How a module is stored; None where it is as it was. Routers that nobody quantized need not be excluded."""
        if any(fnmatchcase(module.name, pattern) for pattern in self._excluded):
            return None
        if module.kind == "router" and f"{module.name}.weight_scale" not in self._tensors.names:
            return None
        if self._layers is None:
            return self._algorithm
        layer = self._layers.table(module.name)
        known = tuple(name for name in self._readers if name in self.algorithms)
        return None if layer is None else layer.one_of("quant_algo", known)

    def _fp8(self, module: Module) -> Scheme:
        scale = self._float_scale(module, rows=False)
        name = stored_under(self._tensors, module, ("input_scale",), "quant_algo is FP8")
        value = single_value(self._tensors, f"{module.name}.{name}")
        stored = (copied("weight", (_OUT, _IN), _FP8, "weight"), scale, single(self._tensors, module, name, name))
        spec = QuantSpec(_FP8, scales=(Scale("float32", (-1, -1)),))
        return Scheme(spec, spec, stored, must_agree=value)

    def _fp8_by_channel(self, module: Module) -> Scheme:
        stored = copied("weight", (_OUT, _IN), _FP8, "weight"), self._float_scale(module, rows=True)
        by_row = (Scale("float32", (1, -1)),)
        return Scheme(QuantSpec(_FP8, scales=by_row), QuantSpec(_FP8, scales=by_row, static=False), stored)

    def _nvfp4(self, module: Module) -> Scheme:
        weights = self._nvfp4_weights(module)
        name = stored_under(self._tensors, module, ("input_scale",), "quant_algo is NVFP4")
        value = single_value(self._tensors, f"{module.name}.{name}")
        outer = outer_scale(self._tensors, module, name, "input_scale_2")
        activation = QuantSpec(NVFP4.element, scales=NVFP4.scales, static=False)
        return Scheme(weights.weight, activation, (*weights.stored, outer), must_agree=value)

    def _nvfp4_weights(self, module: Module) -> Scheme:
        check_columns(self._tensors.title, module, NVFP4.scales[0].block[1])
        if f"{module.name}.pre_quant_scale" in self._tensors.names:
            raise CheckpointError(
                f"{self._tensors.title}: {module.name!r} scales its input (pre_quant_scale), which is not supported; "
                "export the model without AWQ"
            )
        stored = (
            stored_elements("weight", NVFP4),
            stored_group_scales("weight_scale", NVFP4),
            outer_scale(self._tensors, module, "weight_scale_2", "weight_scale_2"),
        )
        return Scheme(NVFP4, QuantSpec(self._dtype), stored)

    def _mxfp8(self, module: Module) -> Scheme:
        if module.expert is not None:
            raise CheckpointError(
                f"{self._tensors.title}: {module.name!r} is an expert in MXFP8, and of this format dense layers alone "
                "are read; take a checkpoint in NVFP4 or FP8"
            )
        check_columns(self._tensors.title, module, MXFP8.scales[0].block[1])
        name = f"{module.name}.weight_scale"
        if name in self._tensors.names and len(shape := self._tensors.info(name).shape) != 2:
            raise CheckpointError(
                f"{self._tensors.title}: tensor {name!r} has shape {list(shape)}, expected two axes: rows, and groups "
                "of 32 columns"
            )
        stored = stored_elements("weight", MXFP8), stored_group_scales("weight_scale", MXFP8)
        return Scheme(MXFP8, QuantSpec(_FP8, scales=MXFP8.scales, static=False), stored)

    def _float_scale(self, module: Module, *, rows: bool) -> StoredTensor:
        """``weight_scale``: one number, or one for each of the rows."""
        name = stored_under(self._tensors, module, ("weight_scale",), f"quant_algo is {self._algorithm}; {_LEFT}")
        rank = len(self._tensors.info(f"{module.name}.{name}").shape)
        dims = (_OUT, *(_ONE,) * (rank - 1)) if rows else (_ONE,) * rank
        return StoredTensor(name, dims, _WIDE, (name,), lambda x: {name: column(x.float())})


class ModelOptFp4(ModelOpt):
    """``modelopt_fp4``: checkpoints in NVFP4 alone."""

    algorithms = ("NVFP4", "W4A16_NVFP4")


class ModelOptMxfp8(ModelOpt):
    """``modelopt_mxfp8``: checkpoints in MXFP8 alone."""

    algorithms = ("MXFP8",)

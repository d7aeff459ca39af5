"""Methods that quantize a checkpoint of plain weights while it loads, tensor by tensor.

A weight is rounded to nearest as it is read, so that at no time there is more of it in memory than the one tensor.
Embeddings stay as they are, and so does the output head unless ``lm_head=true`` asks for it. Methods of 4 bits make it
8-bit integers by default. With ``layers=experts`` all but the experts of mixtures stays as it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from hardpoint.numerics import quantize_stack, quantize_weight
from hardpoint.quantization.elements import NF4
from hardpoint.quantization.methods.block_floats import MXFP4, MXFP8, NVFP4
from hardpoint.quantization.methods.settings import Options
from hardpoint_plugin_api import (
    ConfigError,
    Dim,
    MethodRequest,
    Module,
    QuantizationMethod,
    QuantSpec,
    Scale,
    Scheme,
    StoredTensor,
    scale_slot,
)

_PLAIN = ("float32", "float16", "bfloat16", "float64")
_ROW = (Scale("float32", (1, -1)),)
_SWITCH = ("false", "true")
_HEAD_BITS: dict[str, tuple[str, ...]] = {"lm_head": ("int8", *_SWITCH)}
"""Of methods of 4 bits. Errors of a head reach the logits as they are, so it has more bits than the rest; llama.cpp
stores ``output.weight`` of Q4_K_M files as Q6_K (src/llama-quant.cpp)."""
_INT8 = QuantSpec("int8", scales=_ROW)
_INT4_GROUPS = (128, 64, 32)
_TILE = (128, 128)
"""DeepSeek-V3 (arXiv:2412.19437, section 3.3.2): tiles of the weight, and as wide stretches of activations."""


class OnlineMethod(QuantizationMethod):
    """The common part: everything but the specs. ``known`` are the options and their values, see Options."""

    online = True
    reads_stacks = True
    known: ClassVar[dict[str, tuple[str, ...]]] = {"lm_head": _SWITCH, "layers": ("all", "experts")}

    def __init__(self, request: MethodRequest) -> None:
        self.options = Options(request.options, self.known)
        self.plain = QuantSpec(request.dtype)
        self.request = request

    @abstractmethod
    def specs(self, module: Module) -> tuple[QuantSpec, QuantSpec]:
        """The specs of weight and activation. Raises ConfigError where the weight's shape does not allow it."""

    def leave_tied_head(self) -> None:
        asked = self.request.options.get("lm_head", "false")
        if asked != "false":
            raise ConfigError(
                f"--quantization-options lm_head={asked}: the output head of {self.request.where} is the embedding, "
                "which is not quantized; leave the option out"
            )

    def scheme(self, module: Module) -> Scheme | None:
        head = self.options.text("lm_head")
        if module.kind == "router" or (module.kind == "lm_head" and head == "false"):
            return None
        if self.options.text("layers") == "experts" and module.expert is None and module.stack is None:
            return None
        is_int8_head = module.kind == "lm_head" and head == "int8"
        weight, activation = (_INT8, self.plain) if is_int8_head else self.specs(module)
        scales = (scale_slot(level) for level in range(len(weight.scales)))
        fills = ("weight", *scales, *(("weight_zero_point",) if weight.zero_point else ()))
        return Scheme(weight, activation, (_source(module, weight, fills),))


def _source(module: Module, weight: QuantSpec, fills: tuple[str, ...]) -> StoredTensor:
    """The plain tensor of a module, or of all its experts, quantized as it is read."""
    stack = module.stack

    def read_stack(tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return quantize_stack(tensor.transpose(1, 2) if stack and stack.transposed else tensor, weight)

    if stack is None:
        dims = Dim("out"), Dim("in")
        return StoredTensor("weight", dims, _PLAIN, fills, lambda one: quantize_weight(one, weight), read_stack)
    axes = (Dim("expert"), Dim("in"), Dim("out")) if stack.transposed else (Dim("expert"), Dim("out"), Dim("in"))
    return StoredTensor(stack.tensor, axes, _PLAIN, fills, read_stack)


class Fp8Online(OnlineMethod):
    """8-bit floats. Options: ``scales`` = channel, tensor or block; ``activations`` = dynamic or none."""

    known: ClassVar = {
        "scales": ("channel", "tensor", "block"),
        "activations": ("dynamic", "none"),
        **OnlineMethod.known,
    }

    def specs(self, module: Module) -> tuple[QuantSpec, QuantSpec]:
        fp8 = self.request.device.fp8
        element = fp8.dtype if fp8 else "float8_e4m3fn"
        block = {"channel": (1, -1), "tensor": (-1, -1), "block": _TILE}[self.options.text("scales")]
        weight = QuantSpec(element, scales=(Scale("float32", block),))
        if self.options.text("activations") == "none":
            return weight, self.plain
        stretch = (1, _TILE[1]) if block == _TILE else (1, -1)
        return weight, QuantSpec(element, scales=(Scale("float32", stretch),), static=False)


class Int8Online(OnlineMethod):
    """8-bit integers, a scale for each channel. Option: ``activations`` = dynamic (a scale for each token), or none."""

    known: ClassVar = {"activations": ("dynamic", "none"), **OnlineMethod.known}

    def specs(self, module: Module) -> tuple[QuantSpec, QuantSpec]:
        if self.options.text("activations") == "none":
            return _INT8, self.plain
        return _INT8, replace(_INT8, static=False)


class Int4Online(OnlineMethod):
    """4-bit integers, weights alone. Options: ``group_size``, ``symmetric`` = true or false (with zero points).

    The default is what GPTQModel and llm-compressor's W4A16 write: groups of 128 columns without zero points. Where 128
    do not divide a matrix's columns, or those that a rank has of them, its groups are of 64, or of 32. Experts have
    groups of 64, or of 32 where 64 do not divide what a rank has of both their matrices: kernels take one size for all
    matrices of a mixture.
    """

    known: ClassVar = {"group_size": (), "symmetric": ("true", "false"), **OnlineMethod.known, **_HEAD_BITS}

    def specs(self, module: Module) -> tuple[QuantSpec, QuantSpec]:
        size = self.options.number("group_size", _int4_group(module))
        if module.in_features % size or size % 2:
            raise ConfigError(
                f"--quantization int4: groups of {size} do not divide the {module.in_features} columns of "
                f"{module.name!r}; set --quantization-options group_size=SIZE to an even divisor"
            )
        symmetric = self.options.text("symmetric") == "true"
        scales = (Scale(self.request.dtype, (1, size)),)
        return QuantSpec("int4" if symmetric else "uint4", scales=scales, zero_point=not symmetric), self.plain


def _int4_group(module: Module) -> int:
    """The columns of a group where none are asked for; see Int4Online."""
    is_expert = module.expert is not None or module.stack is not None
    sizes = _INT4_GROUPS[1:] if is_expert else _INT4_GROUPS
    widths = (module.own_in_features, module.in_features)
    return next((size for width in widths if width for size in sizes if width % size == 0), sizes[0])


class BlockFloatOnline(OnlineMethod):
    """Floats of 8 or 4 bits with 8-bit scales for short groups of columns: ``weight``, and ``activations`` = none or
    dynamic, which rounds them to the same format."""

    name: ClassVar[str]
    weight: ClassVar[QuantSpec]
    known: ClassVar = {"activations": ("none", "dynamic"), **OnlineMethod.known}

    def specs(self, module: Module) -> tuple[QuantSpec, QuantSpec]:
        group = self.weight.scales[0].block[1]
        if module.in_features % group:
            raise ConfigError(
                f"--quantization {self.name}: groups of {group} do not divide the {module.in_features} columns of "
                f"{module.name!r}; take --quantization int4, whose groups can be smaller, or fp8"
            )
        if self.options.text("activations") == "none":
            return self.weight, self.plain
        return self.weight, replace(self.weight, scales=self.weight.scales[:1], static=False)


class Nf4Online(OnlineMethod):
    """4-bit quantiles of the normal distribution, weights alone. Option: ``group_size`` (64)."""

    known: ClassVar = {"group_size": (), **OnlineMethod.known, **_HEAD_BITS}

    def specs(self, module: Module) -> tuple[QuantSpec, QuantSpec]:
        size = self.options.number("group_size", 64)
        if module.in_features % size or size % 2:
            raise ConfigError(
                f"--quantization nf4: groups of {size} do not divide the {module.in_features} columns of "
                f"{module.name!r}; set --quantization-options group_size=SIZE to an even divisor"
            )
        return QuantSpec.of(NF4, [Scale("float32", (1, size))]), self.plain


class Mxfp8Online(BlockFloatOnline):
    """8-bit floats, a power of two for 32 columns."""

    name, weight = "mxfp8", MXFP8


class Mxfp4Online(BlockFloatOnline):
    """4-bit floats, a power of two for 32 columns."""

    name, weight = "mxfp4", MXFP4
    known: ClassVar = {**BlockFloatOnline.known, **_HEAD_BITS}


class Nvfp4Online(BlockFloatOnline):
    """4-bit floats, an 8-bit float for 16 columns, one scale more for the matrix. Activations, where they are rounded,
    have no such outer scale: without calibration nobody knows it."""

    name, weight = "nvfp4", NVFP4
    known: ClassVar = {**BlockFloatOnline.known, **_HEAD_BITS}
